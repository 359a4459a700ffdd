"""Locks a run directory and decides whether a run may start or resume in it.

    Run directory                                             Action
    no step recorded                                          start; settings may differ
    finished, same settings except MUTABLE_KEYS               nothing to do
    more steps, or only MUTABLE_KEYS changed                  resume from the newest checkpoint, or
                                                              start again if there is no checkpoint
    as above, but finished or stopped gracefully at a         refuse, unless checkpoint.allow_repeat
      later step than the newest checkpoint's                 is set
    name of a checkpoint folder differs from its step         refuse
    any other change                                          refuse, unless run.overwrite is set,
                                                              which moves the directory aside

A run is finished if its directory contains eval.json and a folder final/ with all weights. If only
final/ is missing, the run is not finished, but all its steps count as completed. A run that stopped
gracefully leaves ended.json with the step of its last checkpoint. A run that was
killed or failed repeats the steps since its newest checkpoint when it is resumed.
run/superseded_steps.py keeps the old records of these steps.

The lock is an fcntl lock on RUN/.lock, held by rank 0. It has not been tested on NFS.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TextIO

import yaml

from megatron_rl.config import Settings
from megatron_rl.distributed.world import run_on_rank_zero
from megatron_rl.io.jsonl import parse_number, read_json, write_bytes_atomically
from megatron_rl.observe.metrics import METRICS_FILE
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER as ROLLOUTS
from megatron_rl.run.changed_settings import changed_keys, describe_changes, is_mutable_key, read_settings
from megatron_rl.run.checkpoint_state import read_state
from megatron_rl.run.paths import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EVALUATION_FILE,
    FINAL_FOLDER,
    explain_write_errors,
    list_checkpoints,
    step_name,
    step_of,
)
from megatron_rl.run.superseded_steps import SUPERSEDED
from megatron_rl.weights.formats.safetensors_folder import find_missing_file

LOCK = ".lock"
"""File name of the lock in a run directory."""
ENDED = "ended.json"
"""Name of the file that records how the last attempt ended: {"state": "stopped" or "failed",
"line": reason, "step": step of the newest checkpoint}. An attempt that finished the run or was
killed does not write this file.
"""
LENGTH_KEYS = {"rl": {"run.steps", "run.epochs"}, "sft": {"sft.steps"}}
"""Maps each stage to the names of the settings that specify its number of steps."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ResumeState:
    """Result of comparing a run directory with the settings of a run."""

    newest_checkpoint: Path | None = None
    """Checkpoint to resume from; None if there is no checkpoint."""
    changes: dict[str, tuple[object, object]] = field(default_factory=dict)
    """{dotted key: (old value, new value)} for the settings that changed since the last attempt."""
    is_finished: bool = False
    evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of the final evaluation; empty if the run is not finished."""
    missing_file: str = ""
    """First missing file in final/, for a run that has a final evaluation but is not finished."""
    refusal: str = ""
    """Reason why the run cannot use the directory; empty if the run can start or resume."""

    def describe_start(self, folder: Path, checkpoint: Path | None) -> str:
        """Return a log line that names the checkpoint and the changed settings; "" for a new run.

        `checkpoint` is the newest intact checkpoint, or None.
        """
        if checkpoint is None and not self.changes:
            return ""
        begins = f"resume: {checkpoint}" if checkpoint else f"start from the beginning: {folder}"
        lacks = f"; {folder / FINAL_FOLDER / self.missing_file} is missing, the run is not finished" if self.missing_file else ""
        return begins + (f"; changed since: {describe_changes(self.changes)}" if self.changes else "") + lacks


@contextmanager
def locked(settings: Settings) -> Iterator[ResumeState]:
    """Lock the run directory for the duration of the block and prepare it for the run.

    All ranks must call this together.

    Yields:
        The state of the directory. If the run is finished, nothing remains to be done.

    Raises:
        ValueError: Another run has locked the directory, or the directory contains a run that
            cannot be resumed with these settings.
    """
    with ExitStack() as locks:
        yield run_on_rank_zero(lambda: _lock_and_check(settings, locks))


def _lock_and_check(settings: Settings, locks: ExitStack) -> ResumeState:
    folder = Path(settings.run.dir)
    with explain_write_errors(folder):
        locks.enter_context(lock(folder))
        locks.callback(_remove_if_new, folder)  # runs while the lock is still held
        standing = read_resume_state(folder, settings)
        if settings.run.overwrite and (standing.refusal or standing.is_finished):
            moved = backup_path(folder)
            folder.absolute().rename(moved)
            locks.enter_context(lock(folder))
            print(f"run.overwrite=true: the contents of {folder} are now in {moved}; starting a new run", flush=True)
            standing = ResumeState()
    if standing.refusal:
        remedy = "set run.overwrite=true to move this folder aside, or choose another folder"
        raise ValueError(f"run.dir={folder}: {standing.refusal}; {remedy}")
    if standing.is_finished:
        return replace(standing, evaluation=_read_evaluation(folder))
    with explain_write_errors(folder):
        (folder / ENDED).unlink(missing_ok=True)
        _remove_partial_files(folder)
    locks.push(partial(_write_ended, folder))
    return standing


def lock(folder: Path) -> TextIO:
    """Lock the directory and return the open lock file; closing the file releases the lock.

    The lock file contains the host and process id of the lock's owner. Raises ValueError if another
    process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "owner not written yet"
        file.close()
        raise ValueError(f"run.dir={folder}: in use by an active run ({holder}); choose another folder") from error
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def _remove_if_new(folder: Path) -> None:
    """Remove the directory if it contains only the lock file, for example after a startup error."""
    if _entry_names(folder) == [LOCK]:
        with suppress(OSError):  # the run may be ending because of this disk
            (folder / LOCK).unlink()
            folder.rmdir()


def _remove_partial_files(folder: Path) -> None:
    """Remove partially written small files (io/jsonl.py) from an earlier attempt."""
    for half in (*folder.glob(".*.partial"), *(folder / ROLLOUTS).glob(".*.partial")):
        if half.is_file():
            half.unlink()


def _entry_names(folder: Path) -> list[str]:
    """Return the names of the directory's entries; empty if the directory does not exist.

    A missing directory must not raise an error here, because the new error would hide the error
    that ends the run.
    """
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _write_ended(folder: Path, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Write ended.json if the run started but did not finish.

    The directory must still be locked.
    """
    if (folder / EVALUATION_FILE).exists() or _entry_names(folder) in ([], [LOCK]):
        return
    is_stopped = error is None or isinstance(error, KeyboardInterrupt)
    line = "" if is_stopped else " ".join(str(error).split())[:500] or type(error).__name__
    ended = {"state": "stopped" if is_stopped else "failed", "line": line, "step": newest_saved_step(folder)}
    with suppress(OSError):  # the run may be ending because of this disk
        write_bytes_atomically(folder / ENDED, json.dumps(ended).encode())


def newest_saved_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0 if there is none."""
    return max(map(step_of, list_checkpoints(folder / CHECKPOINTS_FOLDER)), default=0)


def read_resume_state(folder: Path, settings: Settings) -> ResumeState:
    """Compare a run directory with a run's settings; determine if the run can start or resume."""
    metrics, newest = folder / METRICS_FILE, next(reversed(list_checkpoints(folder / CHECKPOINTS_FOLDER)), None)
    if newest is None and not (metrics.is_file() and metrics.stat().st_size):
        return ResumeState()
    try:
        stored = read_settings(folder / CONFIG_FILE)
        changes = changed_keys(stored, yaml.safe_load(yaml.safe_dump(asdict(settings))))
        num_steps = sum(stored["sft"]["steps"]) if settings.stage == "sft" else int(stored["run"]["steps"])
        has_epochs = stored["run"].get("epochs", 0) != 0
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return ResumeState(refusal=f"contains a run whose {CONFIG_FILE} cannot be read ({' '.join(str(error).split())[:200]})")
    if has_epochs and settings.run.epochs:
        changes.pop("run.steps", None)  # follows from run.epochs
    for key in ("model.dtype", "engine.dtype"):
        if changes.get(key, ("", ""))[1] == "auto":  # a login node without a GPU cannot say which
            del changes[key]
    others = {key: values for key, values in changes.items() if not is_mutable_key(key, *values)}
    if others:
        return ResumeState(refusal=f"contains a run with other settings: {describe_changes(others)}")
    renamed = _find_renamed(folder)
    if renamed:
        return ResumeState(refusal=renamed)
    is_evaluated, missing = (folder / EVALUATION_FILE).is_file(), find_missing_file(folder / FINAL_FOLDER)
    is_finished = is_evaluated and not missing
    if is_finished and not changes.keys() & LENGTH_KEYS[settings.stage]:
        return ResumeState(is_finished=True)
    num_done = num_steps if is_evaluated else _read_stopped_step(folder)
    if num_done > (step_of(newest) if newest else 0) and not settings.checkpoint.allow_repeat:
        lacks = f"{folder / FINAL_FOLDER / missing} is missing, " if is_evaluated and missing else ""
        refusal = lacks + _repeated_error(folder, newest, num_done=num_done)
        return ResumeState(refusal=f"{describe_changes(changes)}: {refusal}" if changes else refusal)
    return ResumeState(newest_checkpoint=newest, changes=changes, missing_file=missing if is_evaluated else "")


def _find_renamed(folder: Path) -> str:
    """Return an error if a checkpoint folder's name differs from the step in its state, else "".

    Damaged checkpoints are ignored.
    """
    for checkpoint in list_checkpoints(folder / CHECKPOINTS_FOLDER):
        with suppress(ValueError):
            step = read_state(checkpoint).step
            if checkpoint.name != step_name(step):
                return f"{checkpoint} is the checkpoint of step {step} according to its run/state.json; rename it to {step_name(step)}"
    return ""


def _read_stopped_step(folder: Path) -> int:
    """Return the step at which a run stopped gracefully, or 0 if it ended in any other way."""
    try:
        ended = read_json(folder / ENDED)
        return int(ended["step"]) if ended["state"] == "stopped" else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _repeated_error(folder: Path, newest: Path | None, *, num_done: int) -> str:
    """Return the error message for a run that would repeat completed steps."""
    saved = step_of(newest) if newest else 0
    has = f"the newest checkpoint is from step {saved}" if newest else "there is no checkpoint"
    return (
        f"{has}, but the run has completed {num_done} steps: resuming would repeat {num_done - saved} steps "
        f"(checkpoint.allow_repeat=true allows it, and keeps their records in {folder / SUPERSEDED})"
    )


def _read_evaluation(folder: Path) -> dict[str, float]:
    path = folder / EVALUATION_FILE
    try:
        found = read_json(path)
        return {str(name): parse_number(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); remove it to repeat the final evaluation") from error


def backup_path(folder: Path) -> Path:
    """Return DIR.N, where N >= 1 is the smallest number for which DIR.N does not exist."""
    own, number = folder.absolute(), 1
    while own.with_name(f"{own.name}.{number}").exists():
        number += 1
    return own.with_name(f"{own.name}.{number}")
