"""Locks, writes and resumes the results directory of a standalone evaluation.

    DIR/config.yaml                        settings; with other settings, resuming raises an error,
                                           unless run.overwrite moves the directory to a backup
    DIR/weights.json                       list of weight files, which must be unchanged on resume
    DIR/rollouts/step_000003.jsonl         episodes of one chunk of examples, in the format of a
                                           training run (observe/recorder.py)
    DIR/prompt.txt                         first prompt of the first example
    DIR/examples.jsonl, evaluation.json    written at the end: one line per example, and the scores
                                           with their conditions

When an evaluation is resumed, it runs the missing chunks and repeats each chunk in which an episode
failed with an infrastructure error.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from megatron_rl.config import Settings
from megatron_rl.distributed.world import raise_on_all_ranks, run_on_rank_zero
from megatron_rl.io.jsonl import read_json, write_bytes_atomically
from megatron_rl.observe.metrics import METRICS_FILE
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER as ROLLOUTS
from megatron_rl.observe.recorder import read_recorded, save_images, write_rollouts
from megatron_rl.run.changed_settings import changed_keys, describe_changes, is_mutable_key, read_settings
from megatron_rl.run.directory import backup_path, lock
from megatron_rl.run.paths import CONFIG_FILE, explain_write_errors
from megatron_rl.types import Example, Rollout

WEIGHTS_FILE, EXAMPLES_FILE, EVALUATION_FILE, PROMPT_FILE = "weights.json", "examples.jsonl", "evaluation.json", "prompt.txt"
RESULT_SETTINGS = ("model.", "task.", "evaluation.", "run.seed", "engine.dtype", "engine.max_model_len", "engine.max_images")
"""Settings on which the results depend. A name that ends with a dot stands for all settings with
this prefix.
"""


WEIGHT_SUFFIXES = (".safetensors", ".distcp", ".pt")
"""Suffixes of files with model weights."""


@contextmanager
def locked_results_directory(settings: Settings) -> Iterator[None]:
    """Context manager that locks run.dir. Collective over all ranks.

    Raises:
        ValueError: Another process has locked the directory, or the directory contains a training
            run or an evaluation with other settings or weights, and run.overwrite is false.
    """
    with ExitStack() as locks:
        run_on_rank_zero(lambda: _open_directory(settings, locks))
        yield


def _open_directory(settings: Settings, locks: ExitStack) -> None:
    folder = Path(settings.run.dir)
    with explain_write_errors(folder):
        locks.enter_context(lock(folder))
        refusal = _find_conflict(folder, settings)
        if refusal and settings.run.overwrite:
            moved = backup_path(folder)
            folder.absolute().rename(moved)
            locks.enter_context(lock(folder))
            print(f"run.overwrite=true: moved the previous contents of {folder} to {moved}", flush=True)
        elif refusal:
            raise ValueError(f"run.dir={folder}: {refusal}; set run.overwrite=true to move this folder aside, or choose another folder")
        write_bytes_atomically(folder / CONFIG_FILE, yaml.safe_dump(asdict(settings), sort_keys=False).encode())
        write_bytes_atomically(folder / WEIGHTS_FILE, json.dumps(fingerprint_weights(settings)).encode())


def _find_conflict(folder: Path, settings: Settings) -> str:
    if (folder / METRICS_FILE).exists():
        return "contains a training run"
    if not (folder / CONFIG_FILE).exists():
        return ""
    try:
        changes = changed_keys(read_settings(folder / CONFIG_FILE), yaml.safe_load(yaml.safe_dump(asdict(settings))))
        weights = read_json(folder / WEIGHTS_FILE) if (folder / WEIGHTS_FILE).exists() else []
    except (OSError, ValueError) as error:
        return f"contains an evaluation, but {CONFIG_FILE} or {WEIGHTS_FILE} cannot be read ({' '.join(str(error).split())[:200]})"
    others = {key: values for key, values in changes.items() if key.startswith(RESULT_SETTINGS) and not is_mutable_key(key, *values)}
    if others:
        return f"contains an evaluation with other settings: {describe_changes(others)}"
    return "" if weights == fingerprint_weights(settings) else "contains an evaluation of different weights: the weight files have changed"


def fingerprint_weights(settings: Settings) -> list[list[str | int]]:
    """Return the name, the size and the modification time of every weight file.

    The files in model.path are included even if evaluation.weights is set, because an adapter uses
    these files as its base model.
    """
    found: list[list[str | int]] = []
    for folder in dict.fromkeys(Path(given) for given in (settings.evaluation.weights, settings.model.path) if given):
        files = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHT_SUFFIXES)
        found += [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return found


def without_images(rollout: Rollout) -> Rollout:
    """Return the rollout without its sequences and images, which remain in the rollout's file."""
    return replace(rollout, sequences=[], turns=[replace(turn, images=[]) for turn in rollout.turns])


def chunk_path(folder: Path, number: int) -> Path:
    """Return the path of the file that contains a chunk's episodes."""
    return folder / ROLLOUTS / f"step_{number:06d}.jsonl"


def save_chunk(path: Path, rollouts: Sequence[Rollout], *, chunk: int) -> None:
    """Write a chunk's episodes, and the images that are available on each rank.

    Collective over all ranks.
    """
    with explain_write_errors(path.parent.parent):
        raise_on_all_ranks(lambda: save_images(path.parent, rollouts))
        run_on_rank_zero(lambda: write_rollouts(path, {"kept": rollouts}, step=chunk, step_rollouts=rollouts))


def load_chunk(path: Path, examples: Sequence[Example], *, samples: int) -> list[Rollout] | None:
    """Return a chunk's episodes without images, or None if the chunk must be run.

    The chunk must be run if its file is missing, or if an episode failed with an infrastructure
    error.

    Raises:
        ValueError: The file is damaged, or contains other examples.
    """
    if not path.is_file():
        return None
    rollouts = [without_images(entry.rollout) for entry in read_recorded(path, with_images=False)]
    if [rollout.example_id for rollout in rollouts] != [example.id for example in examples for _ in range(samples)]:
        raise ValueError(f"{path}: the examples differ from the examples of the current task; remove the folder, or use the original data")
    return rollouts if all(rollout.is_scored for rollout in rollouts) else None
