"""launch/spawn.py: processes that fail, are asked to stop, do not listen, or lose their parent; small ones that import nothing."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.cli.spawn import grace_s
from tests.conftest import ROOT
from tests.support import forked

SPAWN = ROOT / "launch" / "spawn.py"
WORKER = """
import os, signal, sys, time
rank, how, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once: two processes write

def hear(number, frame):
    say(f"rank {rank} hears {signal.Signals(number).name}")
    if how == "listens":
        if rank == 0:
            time.sleep(0.3)  # the other one has heard it, too
            sys.exit(75)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

if how in ("listens", "deaf"):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hear)
say(f"threads {os.environ['OMP_NUM_THREADS']}")
open(os.path.join(folder, f"{rank} {os.getpid()}"), "w").close()
while len(os.listdir(folder)) < 2:
    time.sleep(0.01)
if how == "fails" and rank == 0:
    say("error: key=value: remedy")
    sys.exit(7)
if how == "dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how != "ends":
    time.sleep(60)
    time.sleep(60)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "there").mkdir()
    return tmp_path


def begin(home: Path, how: str, *arguments: str) -> forked.Process:
    """Two of them, on their way."""
    given = ("--nproc_per_node", "2", *arguments, home / "worker.py", how, home / "there")
    return forked.Process(SPAWN, *given, environment={"TMPDIR": str(home)})


def pids(home: Path, launcher: forked.Process) -> list[int]:
    """The processes that it has started, once both are there."""
    deadline = time.monotonic() + 60
    while len(list((home / "there").iterdir())) < 2:
        assert time.monotonic() < deadline and launcher.poll() is None, launcher.output.read_text()
        time.sleep(0.02)
    return [int(path.name.split()[1]) for path in (home / "there").iterdir()]


def end(home: Path, launcher: forked.Process) -> tuple[int, list[str]]:
    """Its exit code and what was said, with nobody and no folder of its own left."""
    output, _ = launcher.communicate(timeout=50)
    there = [int(path.name.split()[1]) for path in (home / "there").iterdir()]
    assert len(there) == 2 and not any(map(psutil.pid_exists, there)), output
    assert {path.name for path in home.iterdir()} == {"worker.py", "there"}
    return launcher.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("ends", 0, "threads 1"),
        ("fails", 7, "error: key=value: remedy"),
        ("dies", 128 + signal.SIGKILL, "error: rank 1 was ended by SIGKILL; was memory short, or did someone?"),
    ],
)
def test_the_last_line_is_the_workers(how: str, code: int, last: str, home: Path) -> None:
    found, lines = end(home, begin(home, how))
    assert (found, lines[-1]) == (code, last)
    assert set(lines) == {"threads 1", last}, "nothing of torchrun's own"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_all_and_the_exit_code_comes_back(number: signal.Signals, home: Path) -> None:
    launcher = begin(home, "listens")
    pids(home, launcher)
    launcher.send_signal(number)
    code, lines = end(home, launcher)
    assert code == os.EX_TEMPFAIL and {f"rank {rank} hears {number.name}" for rank in range(2)} <= set(lines)


def test_who_had_not_yet_begun_can_be_started_again(home: Path) -> None:
    launcher = begin(home, "early")
    pids(home, launcher)
    launcher.send_signal(signal.SIGTERM)
    code, lines = end(home, launcher)
    assert code == os.EX_TEMPFAIL and not [line for line in lines if line.startswith("error")]


def test_who_does_not_listen_is_killed_in_the_end(home: Path) -> None:
    launcher = begin(home, "deaf", "--shutdown-timeout", "1")
    pids(home, launcher)
    launcher.send_signal(signal.SIGTERM)
    code, lines = end(home, launcher)
    assert code == 128 + signal.SIGKILL and re.fullmatch(r"error: rank [01] was ended by SIGKILL; .*", lines[-1])


def test_a_second_sigint_does_not_wait(home: Path) -> None:
    launcher = begin(home, "deaf")
    pids(home, launcher)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
    began = time.monotonic()
    code, lines = end(home, launcher)
    assert code == 128 + signal.SIGKILL and time.monotonic() - began < 20
    assert sum(line == "rank 0 hears SIGINT" for line in lines) == 2


def test_the_grace_is_that_of_the_command_line() -> None:
    assert grace_s(["run.steps=3", "run.grace_s=7", "run.grace_s=8.5"]) == 8.5
    assert grace_s(["run.steps=3"]) == 60.0 and grace_s(["run.grace_s=long"]) == 0.0
