"""A run folder as it is seen from outside, by any process that can read it: how its run stands, how far it is, what it reached.

    waiting     nothing was begun in it
    running     a process holds its lock, or an attempt at it (run/process.py) is under way
    finished    eval.json and all of final/ are there
    stopped     it was asked to stop; the same command goes on
    failed      all else, with the line that says why
A folder on several machines shows a run on another one only where its file system passes locks of fcntl on.
"""

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_rl.io.bounded_files import is_regular, read_tail
from megatron_rl.io.jsonl import read_json
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.run.directory import ENDED, LOCK, read_settings
from megatron_rl.run.process import LATEST
from megatron_rl.run.record import CHECKPOINTS_FOLDER, CONFIG_FILE, EVALUATION_FILE, FINAL_FOLDER, list_checkpoints
from megatron_rl.weights.formats.safetensors_folder import find_missing_file

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, pid."""
_NO_REASON = "ended without a word; was it killed?"
_EVALUATED = "eval/"


class RunState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True, frozen=True, kw_only=True)
class RunStatus:
    """What a folder shows of its run."""

    folder: Path
    state: RunState
    error: str = ""
    """Why it failed."""
    step: int = 0
    """Steps that are recorded."""
    num_steps: int = 0
    """Steps that it is to have; 0 where its settings are not there."""
    train_hours: float = 0.0
    """What the recorded steps took. What was lost with a life, and the starts, are not in it."""
    evaluation: Mapping[str, float]
    """The last one, as in eval.json: greedy_success, ..."""
    settings: Mapping[str, object]
    """{dotted key: value} of config.yaml."""


def read_status(folder: Path) -> RunStatus:
    """ValueError: a file of the folder cannot be read."""
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
    """Whether another process has locked the file (fcntl.lockf), on any machine that sees it. Takes no lock itself."""
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
    """Whether a run is under way in it, or an attempt that will come to one."""
    return is_locked(folder / LOCK) or is_locked(folder / LATEST)


def is_finished(folder: Path) -> bool:
    """It has its last evaluation and all of its weights, and nobody is at it."""
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
    """When the run wrote how it ended, and what."""
    if not path.is_file():
        return None
    try:
        word = read_json(path)
        return path.stat().st_mtime, RunState(word["state"]), str(word["line"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); it is the run's own, remove it") from error


def _read_last_line(path: Path) -> tuple[float, RunState, str] | None:
    """When the newest attempt last said something, and how it ended, if it told."""
    if not path.is_file():
        return None
    for line in reversed(read_tail(path).splitlines()):
        if line.startswith("error: "):
            return path.stat().st_mtime, RunState.FAILED, line.removeprefix("error: ")
        if line.startswith("stopped at step "):
            return path.stat().st_mtime, RunState.STOPPED, ""
    return None


def _settings_of(folder: Path) -> dict[str, object]:
    path = folder / CONFIG_FILE
    try:
        return flatten(read_settings(path)) if is_regular(path) else {}
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}; it is the run's own, restore it") from error


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _num_steps(settings: Mapping[str, object]) -> int:
    if not settings:
        return 0
    return sum(settings["sft.steps"]) if settings["stage"] == "sft" else settings["run.steps"]
