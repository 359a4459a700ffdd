"""Tests that signals end a process that waits in C code, in the rendezvous store or in a
collective, and the resource limits that a run needs.

All processes are started together and examined one by one. Tests of signals in runs that return
from C code are in tests/run/test_shutdown.py.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_rl.distributed import world
from megatron_rl.distributed.world import connect, read_world
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.free_port import free_port

WAITING = SUPPORT / "blocked_process.py"
CASES = {  # where the process waits, the signals, and the seconds between them
    "store": ("store", (signal.SIGTERM,), 0.0),
    "collective": ("collective", (signal.SIGTERM,), 0.0),
    "interrupted twice": ("collective", (signal.SIGINT, signal.SIGINT), 0.1),
    "asked again": ("collective", (signal.SIGTERM, signal.SIGTERM), 1.2),
    "forked": ("forked", (), 0.0),
}


@pytest.fixture(scope="module")
def begun() -> Iterator[dict[str, list[fork_server.Process]]]:
    found = {}
    for case, (how, _, _) in CASES.items():
        port, ranks = free_port(), 2 if how == "collective" else 1
        found[case] = [fork_server.Process(WAITING, how, port, environment={"RANK": str(rank)}) for rank in range(ranks)]
    yield found
    for process in (process for each in found.values() for process in each):
        process.kill()


def end(case: str, begun: dict[str, list[fork_server.Process]]) -> tuple[int, list[str], float]:
    """Send the signals once the process waits.

    Return its exit code, its output lines, and the seconds from the last signal to its end.
    """
    process, (_, signals, between_s) = begun[case][0], CASES[case]
    deadline = time.monotonic() + 120
    while signals and "waits" not in process.output.read_text():
        assert time.monotonic() < deadline and process.poll() is None, process.output.read_text()
        time.sleep(0.05)
    time.sleep(0.5)  # the process prints the line just before it waits
    for number in signals:
        process.send_signal(number)
        began = time.monotonic()
        time.sleep(between_s)
    said, _ = process.communicate(timeout=60)
    return process.returncode, [line for line in said.splitlines() if line != "waits"], time.monotonic() - began if signals else 0.0


def test_who_waits_for_ranks_to_meet_is_ended(begun: dict[str, list[fork_server.Process]]) -> None:
    code, lines, seconds = end("store", begun)
    assert code == os.EX_TEMPFAIL and seconds < 15
    assert len(lines) == 1 and re.fullmatch(
        r"stopped before the first step, by SIGTERM at world.py:\d+ in connect; the same command resumes the run", lines[0]
    ), lines


def test_who_waits_in_a_collective_is_ended_after_the_grace(begun: dict[str, list[fork_server.Process]]) -> None:
    code, lines, seconds = end("collective", begun)
    assert code == os.EX_TEMPFAIL and 1.0 < seconds < 15
    assert len(lines) == 1 and re.fullmatch(r"error: SIGTERM: still at .* after \d s; the same command resumes .*", lines[0]), lines


@pytest.mark.parametrize("case", ["interrupted twice", "asked again"])
def test_a_second_signal_ends_it_at_once(case: str, begun: dict[str, list[fork_server.Process]]) -> None:
    code, lines, seconds = end(case, begun)
    assert code == 128 + signal.SIGINT and seconds < 15
    assert len(lines) == 1 and lines[0].startswith("error: interrupted at "), lines


def test_signals_of_a_forked_process_are_its_own(begun: dict[str, list[fork_server.Process]]) -> None:
    assert end("forked", begun)[:2] == (0, ["well False"])


def test_a_meeting_that_nobody_comes_to_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^--nnodes=1: the 2 processes did not connect within parallel.timeout_s=2 \(.*\); check that"):
        connect(read_world(), timeout_s=2)
    assert time.monotonic() - began < 20


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from megatron_rl.distributed.world import connect, read_world
try:
    connect(read_world(), timeout_s=5)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("soft", "hard", "said"), [(96, 4000, "4000"), (96, 96, "ulimit -n 96: a run needs at least 256 open files; .*")])
def test_few_open_files(soft: int, hard: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert re.fullmatch(said, done.stdout.strip()), done


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[int, int]] = []
    for soft, hard in ((70000, 80000), (1024, resource.RLIM_INFINITY), (1024, 2048)):
        monkeypatch.setattr(world.resource, "getrlimit", lambda _, both=(soft, hard): both)
        monkeypatch.setattr(world.resource, "setrlimit", lambda _, both: changed.append(both))
        world.raise_file_limit()
    assert changed == [(65536, resource.RLIM_INFINITY), (2048, 2048)]
