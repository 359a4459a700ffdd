"""Tests launch/attempt.py: the output that it keeps, the signals that it forwards, and when the job
is requeued. A stand-in for scontrol records its arguments.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support import fork_server

SCRIPT = ROOT / "launch" / "attempt.py"
CHILD = """
import signal, sys, time
code, listens = int(sys.argv[1]), sys.argv[2] == "listens"
def hear(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(code)
if listens:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, hear)
print("begins", flush=True)
time.sleep(60 if listens else 0)
print("the last word\\n", flush=True)
sys.exit(code)
"""


class Bench:
    """Simulated Slurm job."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "child.py").write_text(CHILD)
        shown = f'case "$1" in show) echo JobId=$4 PreemptTime=$(cat {home}/preempted 2>/dev/null || echo None) Other=1;;'
        (home / "scontrol").write_text(f'#!/bin/sh\n{shown} *) echo "$@" >> {home}/told;; esac\n')
        (home / "scontrol").chmod(0o755)

    def begin(self, code: int, *, listens: bool, flags: tuple[str, ...] = (), job: str = "17") -> fork_server.Process:
        environment = {"PATH": f"{self.home}:{os.environ['PATH']}", "SLURM_JOB_ID": job}
        how = "listens" if listens else "ends"
        return fork_server.Process(SCRIPT, *flags, "--", sys.executable, self.home / "child.py", code, how, environment=environment)

    def output(self, number: int) -> str:
        path = self.home / "logs" / f"attempt_{number}" / "output.txt"
        return path.read_text() if path.exists() else ""

    def told(self) -> str:
        return (self.home / "told").read_text() if (self.home / "told").exists() else ""

    def wait_for(self, number: int) -> None:
        deadline = time.monotonic() + 30
        while "begins\n" not in self.output(number):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_attempt_is_kept_and_its_last_word_told(bench: Bench) -> None:
    for number, code in ((1, 0), (2, 7)):
        done = bench.begin(code, listens=False, flags=("--logs", str(bench.home / "logs"), "--requeue"))
        said, _ = done.communicate(timeout=60)
        assert (done.returncode, bench.output(number)) == (code, "begins\nthe last word\n\n")
        assert said == f"{bench.home}/logs/attempt_{number}/output.txt\nthe last word\n"
        assert (bench.home / "logs" / "latest").readlink() == Path(f"attempt_{number}")
    assert bench.told() == "", "an error does not go back into the queue"


@pytest.mark.parametrize(
    ("number", "flags", "code", "heard", "told"),
    [
        (signal.SIGUSR1, ("--requeue",), 75, "SIGUSR1", "requeue 17\n"),
        (signal.SIGUSR1, ("--requeue",), 0, "SIGUSR1", ""),
        (signal.SIGUSR1, (), 75, "SIGUSR1", ""),
        (signal.SIGTERM, ("--requeue",), 75, "SIGUSR1", ""),
        (signal.SIGTERM, ("--requeue", "preempted"), 75, "SIGUSR1", "requeue 17\n"),
        (signal.SIGINT, ("--requeue",), 75, "SIGINT", ""),
    ],
    ids=["time is over", "finished all the same", "not asked to", "canceled", "preempted", "interrupted"],
)  # fmt: skip
def test_who_goes_back(number: int, flags: tuple[str, ...], code: int, heard: str, told: str, bench: Bench) -> None:
    if "preempted" in flags:
        (bench.home / "preempted").write_text("2026-11-22T10:06:02")
    begun = bench.begin(code, listens=True, flags=("--logs", str(bench.home / "logs"), *(flag for flag in flags if flag[0] == "-")))
    bench.wait_for(1)
    begun.send_signal(number)
    said, _ = begun.communicate(timeout=60)
    assert (begun.returncode, bench.output(1), bench.told()) == (code, f"begins\nheard {heard}\n", told)
    assert ("job 17 after 0 restarts" in said) == bool(told)


def test_a_killed_attempt_leaves_nobody(bench: Bench) -> None:
    begun = bench.begin(0, listens=True, flags=("--logs", str(bench.home / "logs")))
    bench.wait_for(1)
    (child,) = psutil.Process(begun.pid).children()
    begun.kill()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_outside_of_a_job_nothing_is_requeued(bench: Bench) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    assert environment == dict(os.environ), "these tests run in no job"
    refused = fork_server.run_script(SCRIPT, "--requeue", "--", "true", timeout_s=60)
    told = "error: --requeue: this process is not in a Slurm job; submit the job with sbatch, or omit --requeue\n"
    assert (refused.returncode, refused.stdout) == (1, told)
    absent = fork_server.run_script(SCRIPT, "--", bench.home / "nothing", timeout_s=60)
    assert absent.returncode == 1 and absent.stdout.startswith("error: [Errno 2] No such file or directory")
