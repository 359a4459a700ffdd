"""Reads the recorded rollouts of a step, and finds the weights that sampled them.

Rollouts that cannot be read are skipped and reported.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import EngineSettings, ModelSettings, ParallelSettings
from megatron_rl.dtypes import dtype_name
from megatron_rl.evaluation.results_directory import EVALUATION_FILE
from megatron_rl.io.jsonl import iterate_lines
from megatron_rl.io.rollout_codec import from_record
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, make_image_loader
from megatron_rl.observe.rollout_store import num_rows, read_rollouts, step_path
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.paths import CHECKPOINTS_FOLDER, CONFIG_FILE, FINAL_FOLDER
from megatron_rl.types import Rollout, TokenSequence

MAX_ERROR_CHARS = 160
"""Maximum length in characters of an error message on the findings page."""


@dataclass(slots=True, frozen=True)
class RecordedSequence:
    """A sequence of a recorded step."""

    rollout_index: int
    """Zero-based row or line index of the rollout in its file."""
    index: int
    tokens: TokenSequence

    def __str__(self) -> str:
        return f"rollout {self.rollout_index} sequence {self.index}"

    @property
    def sampled_rows(self) -> list[int]:
        """Positions that are followed by a sampled token."""
        return [place - 1 for place, sampled in enumerate(self.tokens.loss_mask) if sampled and place > 0]

    @property
    def recorded_logprobs(self) -> list[float]:
        """Logprobs of the sampled tokens as the engine recorded them."""
        return [self.tokens.rollout_logprobs[row + 1] for row in self.sampled_rows]


@dataclass(slots=True)
class RecordedStep:
    """Rollouts of a step, keyed by row or line, and an error message for each skipped rollout."""

    path: Path
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def sequences(self) -> list[RecordedSequence]:
        """Sequences with sampled tokens."""
        return [
            RecordedSequence(place, number, context)
            for place, rollout in self.rollouts.items()
            for number, context in enumerate(rollout.sequences)
            if any(context.loss_mask)
        ]

    @property
    def weight_versions(self) -> list[int]:
        """Versions of the weights that sampled tokens in this step, newest first."""
        return sorted({version for each in self.sequences for version in each.tokens.weight_versions if version >= 0}, reverse=True)


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplaySettings:
    """Settings from a run's config.yaml that a replay needs."""

    model: ModelSettings
    parallel: ParallelSettings
    engine: EngineSettings
    """Engine settings for this machine.

    The value of `tp` is the run's value if that divides the number of processes, else 1.
    """
    temperature: float
    dtype: str
    """Dtype of the engine or of the trainer, whichever is less precise."""
    num_steps: int
    max_staleness: int
    """Maximum staleness in weight versions.

    The staleness is unlimited in evaluations and rollout-only runs, because they use a single set
    of weights.
    """
    initial_weights: str
    """Path of the initial weights (version 0)."""
    trains_subset: bool
    """True if only some weights change, because others are frozen or an adapter is trained."""
    allow_grounding_tokens: bool


def read_replay_settings(run: Path, *, model_path: str = "", num_processes: int = 1) -> ReplaySettings:
    """Return the replay settings of a run.

    Pass `model_path` to replace the run's model.path if the model files have moved.

    Raises:
        ValueError: The run directory has no valid settings.
    """
    try:
        found: dict[str, Any] = read_settings(run / CONFIG_FILE)
        given, engine, sampled, start = found["model"], found["engine"], found["algo"]["temperature"], ""
        is_evaluation = (run / EVALUATION_FILE).is_file()
        if is_evaluation:  # greedy evaluations record logprobs at temperature 1
            sampled, start = found["evaluation"]["temperature"] or 1.0, str(found["evaluation"]["weights"])
        stays = is_evaluation or found["run"].get("mode") == "rollout_only"
        chosen = ModelSettings(
            path=model_path or str(given["path"]), dtype="float32",
            min_pixels=int(given["min_pixels"]), max_pixels=int(given["max_pixels"]),
        )  # fmt: skip
        sizes = {name: found["parallel"][name] for name in ("tp", "pp", "vpp", "sequence_parallel")}
        alike = {name: engine[name] for name in ("dtype", "kv_cache_mib", "max_model_len", "max_images", "gpu_memory_utilization")}
        alike["dtype"] = dtype_name(engine["dtype"])
        alike["tp"] = engine["tp"] if num_processes % engine["tp"] == 0 else 1
        return ReplaySettings(
            model=chosen, parallel=ParallelSettings(**sizes), engine=EngineSettings(**alike), temperature=float(sampled),
            dtype="bfloat16" if "bfloat16" in (dtype_name(given["dtype"]), alike["dtype"]) else "float32",
            num_steps=int(found["run"]["steps"]), max_staleness=sys.maxsize if stays else int(found["run"]["max_staleness"]),
            initial_weights=start or chosen.path, trains_subset=bool(given["frozen"] or found["lora"]["rank"]),
            allow_grounding_tokens=bool(found["task"]["data"]["allow_grounding_tokens"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run / CONFIG_FILE}: cannot be read ({_shorten_error(error)}); give a run directory that this version of the program wrote"
        ) from error


def read_step(run: Path, step: int) -> RecordedStep:
    """Read the recorded rollouts of a step.

    If the run saved all rollouts (rollouts.save=all), all of them are read. Otherwise, only the
    best and worst rollouts are read.

    Raises:
        ValueError: No rollout of the step can be read.
    """
    bank, lines = step_path(run / ROLLOUTS_FOLDER, step), run / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"
    skipped: list[str] = []
    for path, rows in ((bank, _iterate_rows), (lines, _iterate_rollout_lines)):
        if not path.is_file():
            continue
        found = RecordedStep(path, skipped=skipped)
        try:
            for place, load in rows(path):
                _load_rollout(found, place, load)
        except (OSError, ValueError) as error:
            skipped.append(_shorten_error(error))
        if found.rollouts:
            return found
    why = f": {skipped[0]}" if skipped else ""
    raise ValueError(f"{run / ROLLOUTS_FOLDER}: no rollout of step {step} can be read{why}; choose a --step that has a file in this folder")


RolloutLoader = Callable[[bool], Rollout]
"""Function that loads a rollout. If the argument is True, the rollout's images are loaded too."""


def _load_rollout(recorded_step: RecordedStep, index: int, load: RolloutLoader) -> None:
    """Load a rollout with its images, or without images if the image files cannot be read."""
    try:
        recorded_step.rollouts[index] = load(True)
        return
    except ValueError as error:
        recorded_step.skipped.append(f"rollout {index}: {_shorten_error(error)}")
    try:
        recorded_step.rollouts[index] = load(False)
    except ValueError:
        return
    recorded_step.skipped[-1] += " (checked without its images, and not replayed)"


def _iterate_rows(path: Path) -> Iterator[tuple[int, RolloutLoader]]:
    """Yield the index of each row and a function that loads the row.

    The file is read as a whole if it has no errors, else row by row.
    """
    try:
        together = read_rollouts(path)
    except ValueError:
        yield from _iterate_single_rows(path)
        return
    for place, rollout in enumerate(together):
        yield place, lambda pictures, rollout=rollout: rollout


def _iterate_single_rows(path: Path) -> Iterator[tuple[int, RolloutLoader]]:
    for place in range(num_rows(path)):
        yield place, lambda pictures, place=place: read_rollouts(path, [place], with_images=pictures)[0]


def _iterate_rollout_lines(path: Path) -> Iterator[tuple[int, RolloutLoader]]:
    load_picture = make_image_loader(path.parent)
    for number, line in iterate_lines(path):
        yield number - 1, lambda pictures, line=line: _decode_line(line, load_picture if pictures else lambda name: None)


def _decode_line(line: bytes, load: Callable) -> Rollout:
    try:
        entry = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(entry, dict) or "rollout" not in entry:
        raise ValueError("not a rollout record")
    return from_record(entry["rollout"], load)


def find_weights(run: Path, version: int, settings: ReplaySettings) -> Path:
    """Return the path of the weights after `version` completed steps.

    Raises:
        ValueError: These weights were not saved, or have been deleted.
    """
    kept = run / CHECKPOINTS_FOLDER / f"step_{version:08d}"
    if version == 0:
        return Path(settings.initial_weights)
    if kept.is_dir():
        return kept
    if version == settings.num_steps and (run / FINAL_FOLDER).is_dir():
        return run / FINAL_FOLDER
    raise ValueError(f"--weights: {kept} does not exist (see checkpoint.every); give weights of version {version}, or use --no-model")


def _shorten_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]
