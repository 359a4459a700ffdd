"""Decides whether a run has survived its mishaps: it equals the undisturbed run, or it ended with
an error line and can resume, and it leaves nothing behind.

Runs are equal if the files of the last checkpoint with its numbers (weights, moments, generators)
and the files of the final model are the same bytes, the run state is equal, and every metric of
every step is equal, except time/ and memory/. An engine's logprobs round differently if requests
are batched differently, which depends on the timing of tools and of retried episodes (docs/log.md,
"golden runs and timing": 1e-8). With this algorithm, only rollout_mismatch/ metrics depend on these
logprobs, and they may differ by ROUNDING in runs with tools.
"""

import json
import math
import re
from collections.abc import Container, Sequence
from pathlib import Path

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.status import is_locked
from tests.support import comparable_metrics

OF_THE_MACHINE = (*comparable_metrics.MACHINE_PREFIXES, "weight_sync/pause_s", "weight_sync/transfer_s")

ROUNDING = 2e-5
"""Maximum difference between engine metrics of two runs with tools. Float32 logprobs of single
tokens differ by 1e-5 between batches.
"""
DEFINED = re.compile(
    r"error: (?:[\w./-]+=|step \d+, |ranks? \d|no response from ranks? \d|all ranks wait|the first node|\d+ of \d+ rollouts failed|"
    r"\S+: |\S+ row \d+: )"
)
"""Valid beginnings of the error line of a run: it names a config key or the failing part."""
STOPPED = re.compile(
    r"^stopped (at step \d+ of \d+; (.*; )?|before the first step, by SIG\w+ at .*; )the same command resumes the run$", re.MULTILINE
)
MISMATCH = "rollout_mismatch/"
COMPILED = "torchinductor_"
"""Prefix of torch's cache of compiled code, which is meant to stay."""
REFUSED = "error: engine.urls="
KEPT = ("*.distcp", "common.pt")
FINISHED, ASKED, FAILED = 0, 75, 1


def trouble_of_end(codes: Sequence[int | None], said: Sequence[str], *, struck: Container[int]) -> list[str]:
    """Return what is wrong with the end of an attempt.

    `struck` contains the ranks that a mishap has ended, which may exit without a message.
    """
    found = []
    spoke = [text for rank, text in enumerate(said) if rank not in struck]
    lines = [line for text in spoke for line in text.splitlines() if line.startswith("error: ")]
    left = [code for rank, code in enumerate(codes) if rank not in struck]
    if any("Traceback (most recent call last)" in text for text in spoke):
        found.append(f"a traceback: {_last(spoke)}")
    if FAILED in left and not lines:
        found.append(f"ended with code 1 and without a word: {_last(spoke)}")
    if lines and not DEFINED.match(lines[0]):
        found.append(f"its first line names neither key nor part: {lines[0][:200]}")
    if ASKED in left and not any(STOPPED.search(text) for text in said):
        found.append(f"stopped without its word: {_last(said)}")
    strange = [code for code in left if code not in (FINISHED, ASKED, FAILED)]
    if strange:
        found.append(f"exit codes {codes}: {_last(spoke)}")
    return found


def trouble_of_second(code: int | None, said: str) -> list[str]:
    """Return what is wrong with the end of a second run on the first run's engine.

    The second run must be refused with the engine's name, still be active, or have finished.
    """
    if code in (None, FINISHED):
        return []
    found = trouble_of_end([code], [said], struck=())
    if code == FAILED and not found and REFUSED not in said:
        found.append(f"it was not refused: {_last([said])}")
    return found


def _last(said: Sequence[str]) -> str:
    return " | ".join(text.strip().splitlines()[-1][-200:] if text.strip() else "nothing" for text in said)


def given_up(run: Path) -> list[int]:
    """Return the steps in which rollouts of training or of the following evaluation were
    given up.
    """
    return [int(line["step"]) for line in read_metrics(run / "metrics.jsonl") if any(_failed(line))]


def _failed(line: dict[str, float]) -> list[str]:
    return [name for name, value in line.items() if name.endswith("failed_fraction") and value > 0]


def differences(run: Path, undisturbed: Path, *, has_tools: bool) -> list[str]:
    """Return all differences between a finished run and the undisturbed run; empty if they are
    equal.
    """
    return [*_metrics(run, undisturbed, has_tools=has_tools), *_files(run, undisturbed), *_memory(run, undisturbed)]


def _metrics(run: Path, undisturbed: Path, *, has_tools: bool) -> list[str]:
    ours, theirs = read_metrics(run / "metrics.jsonl"), read_metrics(undisturbed / "metrics.jsonl")
    steps = [[int(line["step"]) for line in lines] for lines in (ours, theirs)]
    if steps[0] != steps[1]:
        return [f"metrics of steps {steps[0]}, not {steps[1]}"]
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        for name in sorted(mine.keys() | other.keys()):
            values = mine.get(name), other.get(name)
            rounds = has_tools and name.startswith(MISMATCH)
            if not name.startswith(OF_THE_MACHINE) and not _equal(*values, within=ROUNDING if rounds else 0.0):
                found.append(f"step {int(mine['step'])}, {name}: {values[0]}, not {values[1]}")
    return found[:5]


def _equal(mine: float | None, other: float | None, *, within: float) -> bool:
    if mine is None or other is None:
        return False
    return mine == other or (math.isnan(mine) and math.isnan(other)) or abs(mine - other) <= within


def _files(run: Path, undisturbed: Path) -> list[str]:
    found = []
    theirs = sorted(path for path in (undisturbed / "final").rglob("*") if path.is_file())
    last = max((undisturbed / "checkpoints").glob("step_*"))
    theirs += sorted(path for pattern in KEPT for path in last.glob(pattern))
    assert any(path.suffix == ".distcp" for path in theirs), "nothing to compare"
    for other in theirs:
        mine = run / other.relative_to(undisturbed)
        if not mine.is_file():
            found.append(f"{other.relative_to(undisturbed)} is missing")
        elif _content(mine, run) != _content(other, undisturbed):
            found.append(f"{other.relative_to(undisturbed)} differs")
    return found


def _content(file: Path, run: Path) -> bytes:
    """Return the file's bytes without the run's folder, which a model card may contain (the token
    file of a pair lies there).
    """
    return file.read_bytes().replace(bytes(run.parent), b"")


def _memory(run: Path, undisturbed: Path) -> list[str]:
    states = []
    for folder in (run, undisturbed):
        state = json.loads((max((folder / "checkpoints").glob("step_*")) / "run" / "state.json").read_text())
        history = state["history"]
        pending = history["pending_metrics"].items()
        history["pending_metrics"] = {name: value for name, value in pending if not name.startswith((*OF_THE_MACHINE, MISMATCH))}
        states.append({"step": state["step"], "success": state["success"], **history})
    one, other = states
    differ = [f"{name}: {one.get(name)}, not {other.get(name)}" for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    return [f"it remembers {'; '.join(differ)}"[:400]] if differ else []


def left_behind(run: Path, temporary: Path) -> list[str]:
    """Return what a finished run has left behind: partial files in its directory, a lock that is
    still held, and temporary files.
    """
    found = [f"{path.relative_to(run)} is left" for path in run.rglob("*.partial")]
    if is_locked(run / ".lock"):
        found.append("the lock is still held")
    return found + [f"TMPDIR/{path.name} is left" for path in temporary.iterdir() if not path.name.startswith(COMPILED)]
