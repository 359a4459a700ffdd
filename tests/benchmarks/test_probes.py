"""Security probes of this project's servers, clients and readers: the quick probes with their
controls, and the rules for a successful attack.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.probes.__main__ import PROBES
from benchmarks.probes.probe import Probe, run, table

QUICK = (
    "host: rebound", "host: the correct", "page: from another port", "page: from another sub", "type: missing", "type: reports",
    "token: thirteen", "engine: a page", "engine: other worker", "viewer: its images",
    "token: repeated", "JSON: 200,000", "JSON: a sandbox", "terminal:",
    "proof: replayed", "proof: relayed", "proof: a judge", "a link out of the run", "weights: two", "checkpoint: a pickle",
    "checkpoint: another", "checkpoint: infinitely", "template: four",
)  # fmt: skip


def test_probes_are_held_and_their_controls_get_through() -> None:
    """The defended target of each quick probe withstands the attack, and the control does not."""
    chosen = [probe for probe in PROBES if probe.name.startswith(QUICK) or any(words in probe.name for words in QUICK)]
    assert len(chosen) >= len(QUICK)
    rows = run(chosen, limit_s=120)
    assert all(row.is_good for row in rows), table([row for row in rows if not row.is_good])


def test_there_are_sixty_and_none_twice() -> None:
    """There are at least 60 probes with distinct names, and at least 25 for servers, 15 for clients
    and 20 for files.
    """
    names = [(probe.area, probe.name) for probe in PROBES]
    areas = [area for area, _ in names]
    assert len(set(names)) == len(names) >= 60
    assert all(areas.count(area) >= least for area, least in {"servers": 25, "clients": 15, "files": 20}.items())


def hangs(target: object, folder: Path) -> str:
    time.sleep(60)
    return ""


def takes_memory(target: object, folder: Path) -> str:
    return "" if bytearray(500 << 20) and bytearray(b"x" * (500 << 20)) else "nothing"


def raises(error: BaseException) -> Callable[[object, Path], str]:
    def attack(target: object, folder: Path) -> str:
        raise error

    return attack


def dies(target: object, folder: Path) -> str:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("attack", "gained"),
    [
        (hangs, "does not finish within 2 s"), (takes_memory, "uses "), (raises(MemoryError()), "uses more than 1024 MB"),
        (raises(RecursionError("deep")), "unexpected RecursionError: deep"),
        (raises(ValueError("\x1b[2J")), "unsafe error message: '\\x1b[2J'"),
        (dies, "its process exited with code -9"), (raises(ValueError("no file")), ""), (lambda target, folder: "", ""),
        (lambda target, folder: f"{target} is had", "it is had"),
    ],
)  # fmt: skip
def test_what_an_attack_gains(attack: Callable[[object, Path], str], gained: str) -> None:
    """A probe is good if the attack succeeds on its control and fails on the defended target. The
    same attack on both sides is never good.
    """
    (row,) = run([Probe("servers", "name", attack, "it", "it")], limit_s=2 if attack is hangs else 120)
    for attempt in (row.defended, row.control):
        assert attempt.gained.startswith(gained) and bool(attempt.gained) == bool(gained)
    assert not row.is_good
    assert ("**broken**" in table([row])) == bool(gained) and ("**no control**" in table([row])) != bool(gained)
