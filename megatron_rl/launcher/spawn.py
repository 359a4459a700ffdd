"""Launches processes as torchrun does, but with a graceful stop and short error messages.

When torchrun receives a signal, it stops monitoring the processes and forwards the signal (torch
2.13.0, distributed/elastic/multiprocessing/api.py). After shutdown_timeout, torchrun exits with a
SignalException, regardless of the processes' exit codes. This launcher installs its own handlers,
which forward the signals in SIGNALS. torch's agent continues to monitor the processes, so their
exit codes are available.
"""

import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from types import FrameType

import psutil
import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import determine_local_world_size, parse_args, run

from megatron_rl.config import RunSettings
from megatron_rl.distributed.world import first_line, raise_file_limit
from megatron_rl.run.shutdown import (
    CLOSE_TIMEOUT_S,
    SECOND_SIGNAL_S,
    SIGNALS,
    STARTUP_TIMEOUT_S,
    ForcedExit,
    SignalDeadline,
    handling_signals,
)

IMMEDIATE_KILL_S = 5
"""Delay in seconds between a second signal and killing the child processes.

A second SIGINT always counts as a second signal. Any other signal counts only if it arrives at
least SECOND_SIGNAL_S seconds after the first signal.
"""


class ChildProcesses:
    """Manages the launcher's child processes and the signals that the launcher received."""

    def __init__(self, *, shutdown_timeout_s: float) -> None:
        self._shutdown_timeout_s = shutdown_timeout_s
        self._received: list[int] = []
        self._first_signal_s = 0.0
        self._has_processes = False

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the children; a timer kills children that do not exit in time."""
        children = psutil.Process().children()
        if not children:
            raise SystemExit(128 + number)
        if not self._received:
            signal.setitimer(signal.ITIMER_REAL, self._shutdown_timeout_s)
        if number == signal.SIGINT in self._received or (self._received and time.monotonic() - self._first_signal_s >= SECOND_SIGNAL_S):
            signal.setitimer(signal.ITIMER_REAL, IMMEDIATE_KILL_S)
        self._first_signal_s = self._first_signal_s if self._received else time.monotonic()
        self._received.append(number)
        _send_signal(children, number)

    def hard_deadline(self, signals: Sequence[tuple[int, float]]) -> ForcedExit:
        """Return the deadline at which `SignalDeadline` ends this process (run/shutdown.py).

        The deadline is needed while the launcher waits for other nodes. During this time, the
        launcher has no child processes, and its signal handlers do not run. If the launcher has had
        child processes, there is no deadline, because the launcher exits when the child processes
        exit.
        """
        number, first = signals[0]
        self._has_processes |= bool(psutil.Process().children())
        line = f"error: {signal.Signals(number).name}: stopped while waiting for the launchers of other nodes"
        return ForcedExit(math.inf if self._has_processes else first + STARTUP_TIMEOUT_S / 2, line, 128 + number)

    def kill_children(self, number: int, frame: FrameType | None) -> None:
        """Kill all child processes when the timer expires (signal handler for SIGALRM)."""
        _send_signal(psutil.Process().children(), signal.SIGKILL)

    def exit_code(self, exitcode: int) -> int:
        """Convert a child's exit code to the shell's convention.

        The result is EX_TEMPFAIL if a forwarded signal killed the process. Such a process had not
        installed its signal handlers yet and can be restarted.
        """
        if -exitcode in self._received:
            return os.EX_TEMPFAIL
        return exitcode if exitcode >= 0 else 128 - exitcode


def launch_processes(arguments: Sequence[str]) -> int:
    """Start the processes, wait until they exit, and return the exit code."""
    try:
        raise_file_limit()
    except ValueError as error:
        print(f"error: {error}", flush=True)
        return 1
    given = parse_args(list(arguments))
    num_processes = determine_local_world_size(given.nproc_per_node)
    num_threads = omp_num_threads(len(os.sched_getaffinity(0)), num_processes=num_processes, num_gpus=torch.cuda.device_count())
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    logging.disable(logging.CRITICAL)  # suppress torch's error report, because the processes print their own errors
    given.signals_to_handle = "SIGHUP,SIGQUIT"
    patience_s = given.shutdown_timeout or parse_grace_s(given.training_script_args) + CLOSE_TIMEOUT_S
    processes = ChildProcesses(shutdown_timeout_s=patience_s)
    handlers = {**dict.fromkeys(SIGNALS, processes.forward_signal), signal.SIGALRM: processes.kill_children}
    with tempfile.TemporaryDirectory(prefix="spawn_") as logs, handling_signals(handlers), SignalDeadline(processes.hard_deadline):
        given.log_dir = given.log_dir or logs
        try:
            run(given)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            code = processes.exit_code(first.exitcode)
            if first.exitcode < 0 and code != os.EX_TEMPFAIL:
                print(f"error: rank {rank} was killed by {signal.Signals(-first.exitcode).name}; possible cause: out of memory", flush=True)
            return code
        except SignalException as ended:
            return 128 + ended.sigval
        except (DistError, RendezvousError) as apart:
            where = given.rdzv_endpoint and f"--rdzv_endpoint={given.rdzv_endpoint}"
            where = where or f"--master_addr={given.master_addr} --master_port={given.master_port}"
            remedy = "start it on every node with this address of the first node, and choose another port if this one is in use"
            print(f"error: {where}: the launchers of {given.nnodes} nodes could not connect ({first_line(apart)}); {remedy}", flush=True)
            return 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def omp_num_threads(num_cores: int, *, num_processes: int, num_gpus: int) -> int:
    """Return the value of OMP_NUM_THREADS for each process.

    With GPUs, each process gets an equal share of the cores. Without GPUs, each process gets one
    thread, because a vLLM engine on a CPU is up to 20 times slower with two threads per process
    than with one.
    """
    return max(1, num_cores // num_processes) if num_gpus else 1


def parse_grace_s(overrides: Sequence[str]) -> float:
    """Return the value of run.grace_s from a command line, or the default.

    Return 0 for an invalid number; the run reports the error.
    """
    given = [override.partition("=")[2] for override in overrides if override.startswith("run.grace_s=")]
    try:
        return float(given[-1]) if given else RunSettings().grace_s
    except ValueError:
        return 0.0


def _send_signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
