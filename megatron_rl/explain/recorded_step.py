"""What a run has left of a step, and the weights that sampled it. What cannot be read is skipped and said, not guessed."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import EngineSettings, ModelSettings, ParallelSettings
from megatron_rl.evaluation.results_directory import EVALUATION_FILE
from megatron_rl.io.jsonl import iterate_lines
from megatron_rl.io.rollout_codec import from_record
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, make_image_loader
from megatron_rl.observe.rollout_store import num_rows, read_rollouts, step_path
from megatron_rl.run.directory import read_settings
from megatron_rl.run.record import CHECKPOINTS_FOLDER, CONFIG_FILE, FINAL_FOLDER
from megatron_rl.types import Rollout, TokenSequence

MAX_ERROR_CHARS = 160
"""Characters of an error that stand in a page."""


@dataclass(slots=True, frozen=True)
class RecordedSequence:
    """A context of a recorded step."""

    rollout_index: int
    """Its row or line, from 0."""
    index: int
    tokens: TokenSequence

    def __str__(self) -> str:
        return f"rollout {self.rollout_index} context {self.index}"

    @property
    def sampled_rows(self) -> list[int]:
        """The entries whose next token was sampled."""
        return [place - 1 for place, sampled in enumerate(self.tokens.loss_mask) if sampled and place > 0]

    @property
    def recorded_logprobs(self) -> list[float]:
        """What the engine said of each of them."""
        return [self.tokens.rollout_logprobs[row + 1] for row in self.sampled_rows]


@dataclass(slots=True)
class RecordedStep:
    """The rollouts of a step that could be read, by row or line, and a line for each that could not."""

    path: Path
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def sequences(self) -> list[RecordedSequence]:
        return [
            RecordedSequence(place, number, context)
            for place, rollout in self.rollouts.items()
            for number, context in enumerate(rollout.sequences)
            if any(context.loss_mask)
        ]

    @property
    def weight_versions(self) -> list[int]:
        """Of the weights that sampled any of it, the newest first."""
        return sorted({version for each in self.sequences for version in each.tokens.weight_versions if version >= 0}, reverse=True)


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplaySettings:
    """What of a run's config.yaml is needed to play it back."""

    model: ModelSettings
    parallel: ParallelSettings
    engine: EngineSettings
    """On this machine, over as many processes as in the run where the world is made of such parts, else in each alone."""
    temperature: float
    dtype: str
    """The coarser of the engine's and the trainer's."""
    num_steps: int
    max_staleness: int
    """Of an evaluation and of rollouts alone, which one set of weights plays: no limit."""
    initial_weights: str
    """Weights of version 0."""
    trains_subset: bool
    """Only some of the weights move: others are frozen, or an adapter is trained."""
    allow_grounding_tokens: bool


def read_replay_settings(run: Path, *, model_path: str = "", num_processes: int = 1) -> ReplaySettings:
    """`model_path` in the place of the run's model.path, where its files lie elsewhere now. ValueError: there are no settings of a run."""
    try:
        found = read_settings(run / CONFIG_FILE)
        given, engine, sampled, start = found["model"], found["engine"], found["algo"]["temperature"], ""
        is_evaluation = (run / EVALUATION_FILE).is_file()
        if is_evaluation:  # greedily it tells logprobs at temperature 1
            sampled, start = found["evaluation"]["temperature"] or 1.0, str(found["evaluation"]["weights"])
        stays = is_evaluation or found["run"].get("rollout_only", False)
        chosen = ModelSettings(
            path=model_path or str(given["path"]), min_pixels=int(given["min_pixels"]), max_pixels=int(given["max_pixels"]),
        )  # fmt: skip
        sizes = {name: found["parallel"][name] for name in ("tp", "pp", "vpp", "sequence_parallel")}
        alike = {name: engine[name] for name in ("dtype", "kv_cache_mib", "max_model_len", "max_images", "gpu_memory_utilization")}
        alike["tp"] = engine["tp"] if num_processes % engine["tp"] == 0 else 1
        return ReplaySettings(
            model=chosen, parallel=ParallelSettings(**sizes), engine=EngineSettings(**alike), temperature=float(sampled),
            dtype="bfloat16" if "bfloat16" in (given["dtype"], engine["dtype"]) else "float32",
            num_steps=int(found["run"]["steps"]), max_staleness=sys.maxsize if stays else int(found["run"]["max_staleness"]),
            initial_weights=start or chosen.path, trains_subset=bool(given["frozen"] or found["lora"]["rank"]),
            allow_grounding_tokens=bool(found["task"]["data"]["allow_grounding_tokens"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run / CONFIG_FILE}: cannot be read ({_shorten_error(error)}); give the folder of a run of this version"
        ) from error


def read_step(run: Path, step: int) -> RecordedStep:
    """All of a step where run.record=all kept it, else its best and worst. ValueError: nothing of it can be read."""
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
    raise ValueError(f"{run / ROLLOUTS_FOLDER}: nothing of step {step} can be read{why}; give --step of a file that lies there")


RolloutLoader = Callable[[bool], Rollout]
"""With pictures or without."""


def _load_rollout(recorded_step: RecordedStep, index: int, load: RolloutLoader) -> None:
    """A rollout whose pictures are lost is still looked at, as far as that goes without them."""
    try:
        recorded_step.rollouts[index] = load(True)
        return
    except ValueError as error:
        recorded_step.skipped.append(f"rollout {index}: {_shorten_error(error)}")
    try:
        recorded_step.rollouts[index] = load(False)
    except ValueError:
        return
    recorded_step.skipped[-1] += " (looked at without its pictures, and not played back)"


def _iterate_rows(path: Path) -> Iterator[tuple[int, RolloutLoader]]:
    """Read together where nothing is wrong, else one by one."""
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
        raise ValueError("no entry of recorded rollouts")
    return from_record(entry["rollout"], load)


def find_weights(run: Path, version: int, settings: ReplaySettings) -> Path:
    """Where the weights of a version lie: those after so many steps. ValueError: they were not kept."""
    kept = run / CHECKPOINTS_FOLDER / f"step_{version:08d}"
    if version == 0:
        return Path(settings.initial_weights)
    if kept.is_dir():
        return kept
    if version == settings.num_steps and (run / FINAL_FOLDER).is_dir():
        return run / FINAL_FOLDER
    raise ValueError(f"--weights: {kept} was not kept (checkpoint.every); give the weights of version {version}, or --no-model")


def _shorten_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]
