"""Attempts at a run: their output kept one by one, signals passed on, and a Slurm job put back into the queue when its time is over.

    RUN/logs/attempt_1/output.txt    what the first one said
    RUN/logs/latest                  a link to the newest
The output is locked (fcntl.lockf) while its attempt is under way. SIGUSR1 is what Slurm sends before a time limit (sbatch
--signal=B:USR1@300). A preemption sends SIGTERM to the steps of a job alone, and Slurm (22.05) does not requeue one that then ends by
itself. scancel sends SIGTERM, too; who was canceled does not come back.
"""

import fcntl
import os
import signal
import subprocess
from collections.abc import Container, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from megatron_rl.io.bounded_files import read_tail
from megatron_rl.run.shutdown import SIGNALS, die_with_parent, handling_signals

LOGS, OUTPUT = "logs", "output.txt"
LATEST = f"{LOGS}/latest/{OUTPUT}"
"""Of a run folder: what the newest attempt said."""


def open_output(logs: Path) -> Path:
    """The output file of the next attempt: its folder is new, and what `latest` links to."""
    logs.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = logs / f"attempt_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        link = logs / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(logs / "latest")
        return folder / OUTPUT


class ManagedProcess:
    """A command under way, in a session of its own; it does not outlive this process."""

    def __init__(self, command: Sequence[str], *, output: Path | None = None) -> None:
        """Without an output file it speaks where this process does."""
        self.output_path = output
        self._output_file: IO[bytes] | None = None
        if output is not None:
            self._output_file = output.open("wb")
            fcntl.lockf(self._output_file, fcntl.LOCK_EX)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output_file, stderr=subprocess.STDOUT if output else None,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip

    def forward_signal(self, number: int) -> None:
        """Ask it to stop. srun takes SIGTERM for its own end; SIGUSR1 it passes on."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1)

    def poll(self) -> int | None:
        """Its exit code as a shell has it, once it has ended. Who died of the question to stop had not yet begun."""
        code = self._process.poll()
        if code is None:
            return None
        if self._output_file is not None:
            self._output_file.close()
        if code == -signal.SIGUSR1:
            return os.EX_TEMPFAIL
        return code if code >= 0 else 128 - code

    def wait(self) -> int:
        self._process.wait()
        return self.poll()

    def last_line(self) -> str:
        """What it said last, '' if nothing."""
        lines = read_tail(self.output_path).split("\n") if self.output_path else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class SignalForwarder:
    """As a context: what this process is asked, the attempts under way are asked."""

    def __init__(self) -> None:
        self.processes: list[ManagedProcess] = []
        self.received: set[int] = set()
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._closing.enter_context(handling_signals(dict.fromkeys(SIGNALS, self._on_signal)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        for attempt in self.processes:
            attempt.forward_signal(number)


def require_job() -> None:
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError("--requeue: this is no Slurm job; submit it with sbatch, or leave it out")


def requeue_job(received: Container[int]) -> None:
    """Put this Slurm job back into the queue, as it was submitted, where its time was over or another one goes before."""
    job = os.environ["SLURM_JOB_ID"]
    if signal.SIGUSR1 not in received and not _is_preempted(job):
        return
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"job {job} goes back into the queue, after {restarts} restarts", flush=True)
    subprocess.run(["scontrol", "requeue", job], check=True)


def _is_preempted(job: str) -> bool:
    told = subprocess.run(["scontrol", "show", "job", "--oneliner", job], stdout=subprocess.PIPE, text=True, check=True).stdout
    return any(word.startswith("PreemptTime=") and word != "PreemptTime=None" for word in told.split())


def run_attempt(command: Sequence[str], *, logs: Path | None = None, requeues: bool = False) -> int:
    """One attempt, to its end; returns its exit code. `requeues`: where Slurm wanted its end, this job is put back into the queue."""
    if requeues:
        require_job()
    output = open_output(logs) if logs else None
    if output:
        print(output, flush=True)
    with SignalForwarder() as hearing:
        begun = ManagedProcess(command, output=output)
        hearing.processes.append(begun)
        if hearing.received:  # in between
            begun.forward_signal(signal.SIGUSR1)
        code = begun.wait()
        if output:
            print(begun.last_line(), flush=True)
        if requeues and code:
            requeue_job(hearing.received)
    return code
