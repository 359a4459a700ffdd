"""Keeps the records of steps that a resumed run repeats.

    RUN/superseded/step_00000006/            the run resumed after step 6 and repeated later steps
        metrics.jsonl                        metrics of the repeated steps
        eval.json, prompts.jsonl             results, if a finished run was extended
        final/, adapter/                     trained model, if a finished run repeats any steps
        rollouts/                            recorded rollouts of the repeated steps, with images
    RUN/superseded/checkpoints/step_00000008/    damaged checkpoint (run/checkpoints.py)

If a folder step_00000006 already exists, the new folder is named step_00000006.1. Files in
RUN/superseded are never read or removed.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.io.bounded_files import is_regular
from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, image_file_name, image_keys_in
from megatron_rl.observe.rollout_store import STEP_NAME_PATTERN, image_keys_of_step, step_number

SUPERSEDED = "superseded"
"""Name of the folder for superseded records in a run directory."""
IMAGE_KEY_READERS = {".jsonl": image_keys_in, ".parquet": image_keys_of_step}
"""Functions that return the image keys in a rollout file, keyed by file suffix."""


def supersede_records(
    run_dir: Path, *, first_step: int, first_line: int, num_steps: int, results: Sequence[str], models: Sequence[str]
) -> tuple[Path, int] | None:
    """Move to RUN/superseded the records of the steps that a resumed run repeats.

    Args:
        run_dir: Run directory.
        first_step: First step to be repeated.
        first_line: First step for which this attempt writes a line to metrics.jsonl. This is
            `first_step - 1` if the evaluation after that step is pending, else `first_step`.
        num_steps: Total number of steps of the run. If `num_steps` is greater than `first_step`,
            the final evaluation of a finished shorter run is added to the metrics line of that
            run's last step, like a periodic evaluation.
        results: Names of the result files of a finished run.
        models: Names of the model folders of a finished run. The folders are moved only if at least
            one step is repeated.

    Returns:
        The folder that the records were moved to and the number of repeated steps; None if there
        were no records to move.
    """
    path = run_dir / METRICS_FILE
    lines = read_metrics(path) if path.is_file() else []
    repeated = [line for line in lines if line["step"] >= first_line]
    num_repeated = sum(not _is_final_evaluation(line) for line in repeated)
    files = [file for file in _step_files(run_dir / ROLLOUTS_FOLDER) if step_number(file) >= first_step]
    names = [name for name in (*results, *(models if num_repeated else ())) if (run_dir / name).exists()]
    superseded = _new_folder(run_dir / SUPERSEDED / f"step_{first_step:08d}") if repeated or files or names else None
    if superseded:
        write_lines_atomically(superseded / METRICS_FILE, repeated)
        _move_rollouts(files, superseded / ROLLOUTS_FOLDER)
        for name in names:
            (run_dir / name).rename(superseded / name)
    if path.is_file():  # written last, so that the next attempt still finds the moved lines after a kill
        kept = [line for line in lines if line["step"] < first_line]
        write_lines_atomically(path, _with_evaluation(kept, repeated) if num_steps > first_step else kept)
    return (superseded, num_repeated) if superseded else None


def find_gaps(run_dir: Path, *, first_line: int) -> str:
    """Return a warning about missing or out-of-order lines in metrics.jsonl, or "".

    The file must have one line for each step before `first_line`, in order.
    """
    path = run_dir / METRICS_FILE
    found = [int(line["step"]) for line in read_metrics(path)] if path.is_file() else []
    missing = sorted(set(range(first_line)) - set(found))
    if missing:
        steps = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        return f"{path} has no line for {len(missing)} completed steps ({steps}); they are missing in plots and reports"
    return "" if found == sorted(set(found)) else f"{path} has lines that are out of order or duplicated; the file was changed"


def _is_final_evaluation(line: Mapping[str, float]) -> bool:
    """Return True if `line` is the metrics line that a finished run adds after its last step."""
    return all(name == "step" or name.startswith(("eval/", "time/", "alarms/")) for name in line)


def _with_evaluation(kept: Sequence[dict[str, float]], repeated: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Add the final evaluation to the last kept line if it was recorded directly afterwards."""
    if not (kept and repeated and _is_final_evaluation(repeated[0]) and repeated[0]["step"] == kept[-1]["step"] + 1):
        return list(kept)
    evaluation = {name: value for name, value in repeated[0].items() if name.startswith("eval/")}
    return [*kept[:-1], {**kept[-1], **evaluation}]


def _step_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix in IMAGE_KEY_READERS and STEP_NAME_PATTERN.fullmatch(path.stem))


def _new_folder(wanted: Path) -> Path:
    folder = find_free_path(wanted)
    folder.mkdir(parents=True)
    return folder


def find_free_path(wanted: Path) -> Path:
    """Return `wanted`, or `wanted` with the first free number appended if the path exists."""
    path, number = wanted, 0
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}.{number}")
    return path


def _move_rollouts(files: Sequence[Path], to: Path) -> None:
    """Link the images of rollout files into the folder `to`, then move the files to that folder.

    Images are linked instead of moved, because other steps may use the same images.
    """
    for file in files:
        for name in map(image_file_name, IMAGE_KEY_READERS[file.suffix](file)):
            source, target = file.parent / name, to / name
            if is_regular(source, follow_link=False) and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(source, target)
        to.mkdir(exist_ok=True)
        file.rename(to / file.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
