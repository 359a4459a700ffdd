"""Probes (attacks with and without a defense), and their execution in processes with limits.

An attack succeeds if it returns a success message, if its target exceeds the limits on time or
memory, or if its target fails with an unexpected exception. An attack fails if its target raises an
exception that callers expect, with an error message that is safe to print on a terminal.
"""

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pyarrow as pa
from jinja2 import TemplateError

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.errors import InfraError
from megatron_rl_sandbox.bounded_http import NoResponse
from megatron_rl_sandbox.records import BoxClosed, PoolFull, SandboxError

LIMIT_S = 30.0
"""Time limit of an attempt; clients wait 1.5 s for a response, and servers 1 s for a header."""
LIMIT_MB = 400.0
"""Maximum memory growth of a target in MB; more counts as a success of the attack."""
SPARE_BYTES = 1 << 30
"""Memory growth in bytes above which the kernel refuses to allocate more."""
EXPECTED = (
    ValueError, OSError, NoResponse, EndpointError, InfraError, SandboxError, PoolFull, BoxClosed, TemplateError, httpx.HTTPError,
)  # fmt: skip
"""Exceptions that callers of a target expect and handle."""
OUT_OF_MEMORY = (MemoryError, pa.ArrowMemoryError)


@dataclass(frozen=True, slots=True)
class Probe:
    """Attack with a defended and an undefended target."""

    area: str
    name: str
    attack: Callable[[Any, Path], str]
    """Function that attacks the target and may write files to the folder, which is empty. It
    returns a success message, or "" if the attack failed."""
    defended: Any
    control: Any
    """Target without the defense."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Outcome of one attack on one target."""

    gained: str = ""
    """Success message of the attack, or a description of the damage; empty if the attack failed."""
    refusal: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Return True if the attack succeeded."""
        return bool(self.gained)


@dataclass(frozen=True, slots=True)
class Row:
    """Outcomes of a probe for the defended target and for the control."""

    probe: Probe
    defended: Attempt
    control: Attempt

    @property
    def is_held(self) -> bool:
        """Return True if the attack failed on the defended target."""
        return not self.defended.succeeded

    @property
    def is_good(self) -> bool:
        """Return True if the attack failed on the defended target and succeeded on the control."""
        return self.is_held and self.control.succeeded


def run(probes: Sequence[Probe], *, at_once: int = 6, limit_s: float = LIMIT_S) -> list[Row]:
    """Run each probe with and without the defense, with `at_once` attempts in parallel."""
    jobs = [(probe, target) for probe in probes for target in (probe.defended, probe.control)]
    attempts = dict(_attempts(jobs, at_once=at_once, limit_s=limit_s))
    return [Row(probe, attempts[2 * number], attempts[2 * number + 1]) for number, probe in enumerate(probes)]


def _attempts(jobs: Sequence[tuple[Probe, Any]], *, at_once: int, limit_s: float) -> Iterator[tuple[int, Attempt]]:
    """Yield the index and the outcome of each job, in order of completion."""
    context, left = multiprocessing.get_context("fork"), list(enumerate(jobs))[::-1]
    running: dict[Connection, tuple[int, Any, float]] = {}
    while left or running:
        while left and len(running) < at_once:
            number, (probe, target) = left.pop()
            outcome, sender = context.Pipe(duplex=False)
            process = context.Process(target=_attempt, args=(probe, target, sender))
            process.start()
            sender.close()
            running[outcome] = (number, process, time.monotonic())
        for outcome in wait(list(running), timeout=0.1):
            yield _ended(running.pop(outcome), outcome)
        for outcome, (number, process, began) in list(running.items()):
            if time.monotonic() - began > limit_s and not outcome.poll():
                del running[outcome]
                _kill(process)
                yield number, Attempt(gained=f"does not finish within {limit_s:g} s", seconds=limit_s)


def _ended(job: tuple[int, Any, float], outcome: Connection) -> tuple[int, Attempt]:
    number, process, began = job
    try:
        attempt = outcome.recv()
    except EOFError:
        process.join()
        attempt = Attempt(gained=f"its process exited with code {process.exitcode}")
    _kill(process)
    return number, replace(attempt, seconds=time.monotonic() - began)


def _kill(process: Any) -> None:
    """Kill a process and its descendants."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.join()


def _attempt(probe: Probe, target: object, outcome: Connection) -> None:
    before = _peak_mb()
    limit = psutil.Process().memory_info().data + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with TemporaryDirectory() as folder:
        attempt = _attack(probe, target, Path(folder))
    grown = _peak_mb() - before
    if grown > LIMIT_MB and not attempt.succeeded:
        attempt = Attempt(gained=f"uses {grown:.0f} MB")
    outcome.send(replace(attempt, megabytes=grown))
    outcome.close()
    os._exit(0)


def _attack(probe: Probe, target: object, folder: Path) -> Attempt:
    try:
        return Attempt(gained=probe.attack(target, folder))
    except OUT_OF_MEMORY:
        return Attempt(gained=f"uses more than {SPARE_BYTES >> 20} MB")
    except EXPECTED as error:
        words = str(error)
        is_plain = words.isprintable() and "memory" not in words.casefold()
        return Attempt(refusal=words) if is_plain else Attempt(gained=f"unsafe error message: {words[:80]!r}")
    except BaseException as error:
        return Attempt(gained=f"unexpected {type(error).__name__}: {str(error)[:80]}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one row per probe."""
    lines = ["| area | probe | with the defense | s | MB | control | s | MB |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        held = f"held{_because(row.defended.refusal)}" if row.is_held else f"**broken**: {_cell(row.defended.gained)}"
        control = f"succeeds: {_cell(row.control.gained)}" if row.control.succeeded else f"**no control**{_because(row.control.refusal)}"
        figures = [f"{each.seconds:.1f} | {each.megabytes:.0f}" for each in (row.defended, row.control)]
        lines.append(f"| {row.probe.area} | {row.probe.name} | {held} | {figures[0]} | {control} | {figures[1]} |")
    return "\n".join(lines)


def _because(refusal: str) -> str:
    return f": {_cell(refusal)}" if refusal else ""


def _cell(words: str) -> str:
    short = "".join(letter if letter.isprintable() and letter != "|" else "?" for letter in words)
    return short if len(short) <= 90 else f"{short[:87]}..."
