"""Runs an attempt as a process: captures output, forwards signals and requeues Slurm jobs.

    RUN/logs/attempt_1/output.txt    stdout and stderr of the first attempt
    RUN/logs/latest                  symbolic link to the newest attempt's folder

The output file is locked (fcntl.lockf) while the attempt runs. Slurm sends SIGUSR1 before the time
limit (sbatch --signal=B:USR1@300). On preemption, Slurm sends SIGTERM only to the steps of the job.
Slurm 22.05 does not requeue a job that exits by itself after this signal, so this module requeues
the job. A job that was cancelled with scancel receives SIGTERM too, but is not requeued.
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
"""Path of the newest attempt's output file, relative to the run directory."""


def open_output(logs: Path) -> Path:
    """Create the next attempt's folder, link `latest` to it, and return the output file's path."""
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
    raise AssertionError("the numbers never end")


class ManagedProcess:
    """Command that runs in its own session and is killed when this process dies."""

    def __init__(self, command: Sequence[str], *, output: Path | None = None) -> None:
        """Start the command. Without an output file, the command inherits stdout and stderr."""
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
        """Request a stop: send SIGINT if `number` is SIGINT, else SIGUSR1.

        SIGTERM is not sent, because it would terminate srun, which forwards SIGUSR1.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1)

    def poll(self) -> int | None:
        """Return the exit code by shell convention, or None while the process runs.

        If the stop request (SIGUSR1) kills the process before the process has installed a signal
        handler, this counts as a graceful stop, with exit code EX_TEMPFAIL.
        """
        code = self._process.poll()
        if code is None:
            return None
        if self._output_file is not None:
            self._output_file.close()
        if code == -signal.SIGUSR1:
            return os.EX_TEMPFAIL
        return code if code >= 0 else 128 - code

    def wait(self) -> int:
        """Wait for the process to exit and return the exit code, as `poll` does."""
        self._process.wait()
        code = self.poll()
        assert code is not None, "the process has exited"
        return code

    def last_line(self) -> str:
        """Return the last non-empty line of the output file; '' without output."""
        lines = read_tail(self.output_path).split("\n") if self.output_path else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class SignalForwarder:
    """Context manager that forwards stop signals from this process to running attempts."""

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
    """Raise ValueError if this process is not part of a Slurm job."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError("--requeue: this process is not in a Slurm job; submit the job with sbatch, or omit --requeue")


def requeue_job(received: Container[int]) -> None:
    """Requeue this Slurm job if it received SIGUSR1 (time limit) or was preempted.

    The requeued job runs the same batch script with the same options.
    """
    job = os.environ["SLURM_JOB_ID"]
    if signal.SIGUSR1 not in received and not _is_preempted(job):
        return
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    print(f"requeueing job {job} after {restarts} restarts", flush=True)
    subprocess.run(["scontrol", "requeue", job], check=True)


def _is_preempted(job: str) -> bool:
    told = subprocess.run(["scontrol", "show", "job", "--oneliner", job], stdout=subprocess.PIPE, text=True, check=True).stdout
    return any(word.startswith("PreemptTime=") and word != "PreemptTime=None" for word in told.split())


def run_attempt(command: Sequence[str], *, logs: Path | None = None, requeues: bool = False) -> int:
    """Run one attempt, wait until it exits, and return the exit code.

    Args:
        command: Command that runs the attempt.
        logs: Folder for the output of attempts. With None, the attempt inherits stdout and stderr.
        requeues: True to requeue this Slurm job if Slurm ended the attempt.
    """
    if requeues:
        require_job()
    output = open_output(logs) if logs else None
    if output:
        print(output, flush=True)
    with SignalForwarder() as signal_forwarder:
        begun = ManagedProcess(command, output=output)
        signal_forwarder.processes.append(begun)
        if signal_forwarder.received:  # a signal arrived before the process was registered
            begun.forward_signal(signal.SIGUSR1)
        code = begun.wait()
        if output:
            print(begun.last_line(), flush=True)
        if requeues and code:
            requeue_job(signal_forwarder.received)
    return code
