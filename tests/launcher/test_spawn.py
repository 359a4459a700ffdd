"""launch/launch.py with processes that fail, receive a signal, ignore signals or lose their parent.
The processes are small scripts without imports of the trainer.

All cases start at once and are checked one by one, because a launcher mostly waits.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.launcher import spawn
from megatron_rl.launcher.spawn import parse_grace_s
from tests.conftest import ROOT
from tests.support import fork_server

SPAWN = ROOT / "launch" / "launch.py"
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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


CASES = {  # behavior of the processes, and options of the launcher
    "ends": ("ends",),
    "fails": ("fails",),
    "dies": ("dies",),
    **{number.name: ("listens",) for number in ASKED},
    "early": ("early",),
    "deaf": ("deaf", "--shutdown-timeout", "1"),
    "deaf to two": ("deaf",),
}


@dataclass(frozen=True, slots=True)
class Launched:
    """A launcher and its two worker processes."""

    home: Path
    launcher: fork_server.Process

    def tell(self, number: signal.Signals) -> None:
        """Send the launcher a signal once both workers have started."""
        deadline = time.monotonic() + 60
        while len(list((self.home / "there").iterdir())) < 2:
            assert time.monotonic() < deadline and self.launcher.poll() is None, self.launcher.output.read_text()
            time.sleep(0.02)
        self.launcher.send_signal(number)

    def end(self) -> tuple[int, list[str]]:
        """Return the exit code and the output lines; assert that no worker and no folder of the
        launcher remains.
        """
        output, _ = self.launcher.communicate(timeout=50)
        there = [int(path.name.split()[1]) for path in (self.home / "there").iterdir()]
        assert len(there) == 2 and not any(map(psutil.pid_exists, there)), output
        assert {path.name for path in self.home.iterdir()} == {"worker.py", "there"}
        return self.launcher.returncode, output.splitlines()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launched]]:
    begun = {}
    for case, (how, *arguments) in CASES.items():
        home = tmp_path_factory.mktemp("spawn")
        (home / "worker.py").write_text(WORKER)
        (home / "there").mkdir()
        given = ("--nproc_per_node", "2", *arguments, home / "worker.py", how, home / "there")
        begun[case] = Launched(home, fork_server.Process(SPAWN, *given, environment={"TMPDIR": str(home)}))
    yield begun
    for case in begun.values():
        case.launcher.kill()


@pytest.mark.parametrize(
    ("case", "code", "last"),
    [
        ("ends", 0, "threads 1"),
        ("fails", 7, "error: key=value: remedy"),
        ("dies", 128 + signal.SIGKILL, "error: rank 1 was killed by SIGKILL; possible cause: out of memory"),
    ],
)
def test_the_last_line_is_the_workers(case: str, code: int, last: str, launched: dict[str, Launched]) -> None:
    found, lines = launched[case].end()
    assert (found, lines[-1]) == (code, last)
    assert set(lines) == {"threads 1", last}, "nothing of torchrun's own"


@pytest.mark.parametrize("number", ASKED)
def test_a_signal_reaches_all_and_the_exit_code_comes_back(number: signal.Signals, launched: dict[str, Launched]) -> None:
    launched[number.name].tell(number)
    code, lines = launched[number.name].end()
    assert code == os.EX_TEMPFAIL and {f"rank {rank} hears {number.name}" for rank in range(2)} <= set(lines)


def test_who_had_not_yet_begun_can_be_started_again(launched: dict[str, Launched]) -> None:
    """SIGTERM to workers that have not installed a signal handler yet gives exit code EX_TEMPFAIL,
    which allows a restart, and no error line.
    """
    launched["early"].tell(signal.SIGTERM)
    code, lines = launched["early"].end()
    assert code == os.EX_TEMPFAIL and not [line for line in lines if line.startswith("error")]


def test_who_does_not_listen_is_killed_in_the_end(launched: dict[str, Launched]) -> None:
    """Workers that ignore SIGTERM are killed with SIGKILL after --shutdown-timeout."""
    launched["deaf"].tell(signal.SIGTERM)
    code, lines = launched["deaf"].end()
    assert code == 128 + signal.SIGKILL and re.fullmatch(r"error: rank [01] was killed by SIGKILL; .*", lines[-1])


def test_a_second_sigint_does_not_wait(launched: dict[str, Launched]) -> None:
    """After a second SIGINT, workers that ignore signals are killed within 20 s instead of after
    the full timeout.
    """
    for _ in range(2):
        launched["deaf to two"].tell(signal.SIGINT)
        time.sleep(0.5)
    began = time.monotonic()
    code, lines = launched["deaf to two"].end()
    assert code == 128 + signal.SIGKILL and time.monotonic() - began < 20
    assert sum(line == "rank 0 hears SIGINT" for line in lines) == 2


def test_a_second_signal_later_on_does_not_wait_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal long after the first shortens the kill timer to IMMEDIATE_KILL_S. A signal
    within SECOND_SIGNAL_S of the first counts as another delivery of the same signal.
    """
    timers: list[float] = []
    monkeypatch.setattr(spawn.signal, "setitimer", lambda _, seconds: timers.append(seconds))
    monkeypatch.setattr(spawn.psutil, "Process", lambda: SimpleNamespace(children=lambda: ["child"]))
    monkeypatch.setattr(spawn, "_send_signal", lambda *_: None)
    processes = spawn.ChildProcesses(shutdown_timeout_s=100.0)
    for now in (50.0, 51.0, 56.0):
        monkeypatch.setattr(spawn.time, "monotonic", lambda now=now: now)
        processes.forward_signal(signal.SIGTERM, None)
    assert timers == [100.0, spawn.IMMEDIATE_KILL_S]


@pytest.mark.parametrize(
    ("words", "seconds"), [([], 60 + 120), (["run.grace_s=7"], 7 + 120), (["--shutdown-timeout", "9", "run.grace_s=7"], 9)]
)
def test_processes_have_the_time_to_close(words: list[str], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill timer that the kernel reports after SIGTERM equals the grace period plus 120 s for
    updates and a checkpoint, or --shutdown-timeout.
    """
    left: list[float] = []

    def run(given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])

    monkeypatch.setattr(spawn, "run", run)
    monkeypatch.setattr(spawn.psutil, "Process", lambda: SimpleNamespace(children=lambda: [SimpleNamespace(send_signal=lambda _: None)]))
    monkeypatch.setattr(spawn.logging, "disable", lambda _: None)
    options = [word for word in words if "=" not in word]
    assert spawn.launch_processes([*options, "train.py", *words[len(options) :]]) == 0
    assert left == [pytest.approx(seconds, abs=2)] and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_grace_is_that_of_the_command_line() -> None:
    """The last run.grace_s on the command line counts; the default is 60 s, and an invalid value
    counts as 0.
    """
    assert parse_grace_s(["run.steps=3", "run.grace_s=7", "run.grace_s=8.5"]) == 8.5
    assert parse_grace_s(["run.steps=3"]) == 60.0 and parse_grace_s(["run.grace_s=long"]) == 0.0
