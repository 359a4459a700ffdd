"""Determines the status of a run by reading the run directory.

    waiting     no run was started in the directory
    running     a process holds the directory's lock, or an attempt (run/process.py) is running
    finished    eval.json and all files in final/ exist
    stopped     the run stopped on request and can be resumed with the same command
    failed      all other cases; RunStatus.error contains the error line

On a shared file system, a run on another machine counts as running only if the file system supports
fcntl locks.
"""

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_rl.io.bounded_files import flatten, is_regular, read_tail
from megatron_rl.io.jsonl import read_json
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.directory import ENDED, LOCK
from megatron_rl.run.paths import CHECKPOINTS_FOLDER, CONFIG_FILE, EVALUATION_FILE, FINAL_FOLDER, list_checkpoints
from megatron_rl.run.process import LATEST
from megatron_rl.weights.formats.safetensors_folder import find_missing_file

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock in fcntl(2) on 64-bit Linux: type, whence, start, length, pid."""
_NO_REASON = "ended without an error message; it may have been killed"
_EVALUATED = "eval/"


class RunState(StrEnum):
    """State of a run, as defined in the module docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True, frozen=True, kw_only=True)
class RunStatus:
    """Status of a run, read from the run directory."""

    folder: Path
    state: RunState
    error: str = ""
    """Error line of a failed run; empty in other states."""
    step: int = 0
    """Number of recorded training steps."""
    num_steps: int = 0
    """Total number of steps in the run's settings; 0 if config.yaml is missing."""
    train_hours: float = 0.0
    """Total duration of the recorded steps in hours, excluding startup and unrecorded steps."""
    evaluation: Mapping[str, float]
    """Scores of the last evaluation, such as greedy_success, as in eval.json."""
    settings: Mapping[str, object]
    """{dotted key: value} for all settings in config.yaml."""


def read_status(folder: Path) -> RunStatus:
    """Read the status of a run from its directory.

    Raises:
        ValueError: A file in the run directory is damaged.
    """
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.is_file() else []
    settings = _settings_of(folder)
    state, error = _determine_state(folder, has_begun=bool(steps or list_checkpoints(folder / CHECKPOINTS_FOLDER)))
    evaluations = [line for line in steps if any(name.startswith(_EVALUATED) for name in line)]
    last = evaluations[-1] if evaluations else {}
    num_steps = _num_steps(settings)
    return RunStatus(
        folder=folder, state=state, error=error, settings=settings, num_steps=num_steps,
        step=min(int(max((line["step"] for line in steps), default=-1)) + 1, num_steps),
        train_hours=sum(line.get("time/total", 0.0) for line in steps) / 3600,
        evaluation={name.removeprefix(_EVALUATED): value for name, value in last.items() if name.startswith(_EVALUATED)},
    )  # fmt: skip


def is_locked(path: Path) -> bool:
    """Return True if another process holds a lock on the file (fcntl.lockf).

    The other process may run on any machine that shares the file system. This function does not
    acquire a lock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        return _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Return True if a process holds the directory's lock or the output file of an attempt."""
    return is_locked(folder / LOCK) or is_locked(folder / LATEST)


def is_finished(folder: Path) -> bool:
    """Return True if the final evaluation and the weights are complete, and no run is active."""
    return not is_running(folder) and (folder / EVALUATION_FILE).is_file() and not find_missing_file(folder / FINAL_FOLDER)


def _determine_state(folder: Path, *, has_begun: bool) -> tuple[RunState, str]:
    if is_running(folder):
        return RunState.RUNNING, ""
    if is_finished(folder):
        return RunState.FINISHED, ""
    if (folder / EVALUATION_FILE).is_file():
        return (
            RunState.FAILED,
            f"{folder / FINAL_FOLDER / find_missing_file(folder / FINAL_FOLDER)} is missing; the same command writes it again",
        )
    words = [word for word in (_read_ended(folder / ENDED), _read_last_line(folder / LATEST)) if word]
    if words:
        _, state, line = max(words)
        return state, line
    return (RunState.FAILED, _NO_REASON) if has_begun or (folder / LATEST).exists() else (RunState.WAITING, "")


def _read_ended(path: Path) -> tuple[float, RunState, str] | None:
    """Return the modification time of ended.json and the recorded state and reason."""
    if not path.is_file():
        return None
    try:
        word = read_json(path)
        return path.stat().st_mtime, RunState(word["state"]), str(word["line"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); remove the file") from error


def _read_last_line(path: Path) -> tuple[float, RunState, str] | None:
    """Return the time of the newest attempt's last output, and the state and error it reports."""
    if not path.is_file():
        return None
    for line in reversed(read_tail(path).splitlines()):
        if line.startswith("error: "):
            return path.stat().st_mtime, RunState.FAILED, line.removeprefix("error: ")
        if line.startswith("stopped at step "):
            return path.stat().st_mtime, RunState.STOPPED, ""
    return None


def _settings_of(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        return flatten(read_settings(path)) if is_regular(path) else {}
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}; restore the original file") from error


def _num_steps(settings: Mapping[str, Any]) -> int:
    if not settings:
        return 0
    return sum(settings["sft.steps"]) if settings["stage"] == "sft" else settings["run.steps"]
