"""Stops a run gracefully after a signal, on all ranks and within time limits.

SIGTERM, SIGUSR1 and SIGINT request a stop of the run without interrupting the current step. At the
end of a step, all ranks stop if any rank has received a signal (`StopSignal.check`). Rollouts that
are still incomplete grace_s seconds after the signal are cancelled (`StopSignal.run_with_grace`),
and the next attempt repeats the step. A second SIGINT ends the process at once. Without a launcher,
any stop signal that arrives at least SECOND_SIGNAL_S seconds after the first signal also ends the
process at once.

Python runs a signal handler only after the main thread has returned from C code. In a collective,
or while ranks wait for each other at startup, this return may take minutes. `SignalDeadline`
therefore receives signals in a separate thread and ends a process that has not stopped by the
deadline. The first condition that holds determines the deadline:

    IMMEDIATE_S after the second signal             if a second signal ends the process at once
    STARTUP_TIMEOUT_S after the signal              before the first `check`
    grace_s + close_timeout_s after the signal      otherwise

Without a launcher, the last of these deadlines is earlier if the main thread makes no progress. The
process then ends CLOSE_TIMEOUT_S after the end of the grace period or after the last instruction
that the main thread executed, whichever is later.
"""

import asyncio
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import GracefulStop

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STARTUP_TIMEOUT_S = 10.0
"""Delay in seconds between a signal that arrives before the first step and the forced exit. Before
the first step, there is nothing to save.
"""
SECOND_SIGNAL_S = 5.0
"""Seconds after the first signal during which further signals count as the same request. Launchers,
queues and terminals may each deliver the request once.
"""
IMMEDIATE_S = 3.0
"""Delay in seconds between a second signal and the forced exit of the process."""
CLOSE_TIMEOUT_S = 120.0
"""Time in seconds, after the grace period, in which the process may complete the step's updates,
save the checkpoint and shut down the engine.
"""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that is ended after a second signal."""
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


@contextmanager
def handling_signals(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install signal handlers for the duration of the block.

    Python allows signal handlers only in the main thread. In other threads, this context manager
    does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(slots=True, frozen=True)
class ForcedExit:
    """Deadline, message and exit code for ending a process that does not stop by itself."""

    deadline: float
    """Exit time, as a value of time.monotonic()."""
    message: str
    exit_code: int


class SignalDeadline:
    """Context manager that ends this process at a deadline after a stop signal.

    `rule` computes the deadline from the (signal number, time) pairs of all signals received so
    far. In threads other than the main thread, the context manager does nothing.
    """

    def __init__(self, rule: Callable[[Sequence[tuple[int, float]]], ForcedExit]) -> None:
        self._rule = rule
        self._received: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._close_in_child)
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_main:
            signal.set_wakeup_fd(self._before)
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _close_in_child(self) -> None:
        """Detach a forked child process, so that its signals do not reach the parent."""
        if self._writer.fileno() >= 0:
            signal.set_wakeup_fd(-1)
            self._writer.close()

    def _watch(self) -> None:
        """Receive signals until the socket is closed; end the process at the deadline.

        This method runs in a separate thread.
        """
        while True:
            if select.select([self._reader], [], [], _LOOK_S if self._received else None)[0]:
                numbers = self._reader.recv(64)
                if not numbers:
                    return
                self._received += [(number, time.monotonic()) for number in numbers if number in SIGNALS]
            if self._received and time.monotonic() > (end := self._rule(self._received)).deadline:
                if end.message and is_reporting_rank():
                    os.write(sys.stderr.fileno(), f"{end.message}\n".encode())  # the main thread may hold the lock of sys.stderr
                os._exit(end.exit_code)


def has_launcher() -> bool:
    """Return True if torchrun or launch/launch.py started this process.

    Launchers have their own time limits and send signals to the remaining processes when a process
    exits.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporting_rank() -> bool:
    """Return True if this process reports signals: rank 0, or any process without a launcher."""
    return not has_launcher() or os.environ.get("RANK", "0") == "0"


def main_thread_location() -> str:
    """Return the innermost line of this package on the main thread's stack, as text.

    Example: `world.py:71 in connect`.
    """
    own = _main_thread_frame()
    while own.f_back is not None and not Path(own.f_code.co_filename).is_relative_to(Path(__file__).parents[1]):
        own = own.f_back
    return f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"


def _main_thread_frame() -> FrameType:
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread has started"
    return sys._current_frames()[ident]


class StopSignal:
    """Context manager that receives stop signals and coordinates the stop across ranks."""

    def __init__(self, *, grace_s: float, close_timeout_s: float = CLOSE_TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._close_timeout_s, self._clock = grace_s, close_timeout_s, clock
        self._since: float | None = None
        self._interrupted = self._has_started = False
        self._last_location: tuple[CodeType, int] | None = None
        self._last_move_at = 0.0
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._closing.enter_context(handling_signals(dict.fromkeys(SIGNALS, self._on_signal)))
        self._closing.enter_context(SignalDeadline(self._forced_exit))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._since is None:
            self._since = self._clock()
        elif not has_launcher() and self._clock() - self._since >= SECOND_SIGNAL_S:
            raise KeyboardInterrupt

    def _forced_exit(self, received: Sequence[tuple[int, float]]) -> ForcedExit:
        """Return the deadline for ending this process, according to the module docstring."""
        number, first = received[0]
        interrupts = [at for other, at in received if other == signal.SIGINT]
        again = interrupts[1:] + [at for _, at in received if at - first >= SECOND_SIGNAL_S and not has_launcher()]
        name, where = signal.Signals(number).name, main_thread_location()
        if again:
            line = f"error: interrupted at {where}; complete checkpoints are kept, and the same command resumes the run"
            return ForcedExit(min(again) + IMMEDIATE_S, line, EXIT_INTERRUPTED)
        if not self._has_started:
            line = f"stopped before the first step, by {name} at {where}; the same command resumes the run"
            return ForcedExit(first + STARTUP_TIMEOUT_S, line, os.EX_TEMPFAIL)
        at = first + self._grace_s + self._close_timeout_s
        if not has_launcher():
            at = min(at, max(first + self._grace_s, self._last_move()) + CLOSE_TIMEOUT_S)
        line = f"error: {name}: still at {where} after {time.monotonic() - first:.0f} s; the same command resumes from the last checkpoint"
        return ForcedExit(at, line, os.EX_TEMPFAIL)

    def _last_move(self) -> float:
        """Return the time.monotonic() value of the main thread's last observed progress."""
        frame = _main_thread_frame()
        if (frame.f_code, frame.f_lasti) != self._last_location:
            self._last_location, self._last_move_at = (frame.f_code, frame.f_lasti), time.monotonic()
        return self._last_move_at

    @property
    def is_requested(self) -> bool:
        """True if this process has received a stop signal.

        Other ranks may have received a stop signal even if this is False.
        """
        return self._since is not None

    def mark_started(self) -> None:
        """Mark the first step as started.

        After this call, a stop request leaves the process time to save its progress.
        """
        self._has_started = True

    def check(self) -> None:
        """Raise GracefulStop on every rank if any rank received a stop signal.

        All ranks must call this together, starting with the first step.
        """
        self.mark_started()
        self.check_start()

    def check_start(self) -> None:
        """Raise GracefulStop as `check` does; for use during startup, before the first step."""
        asked = torch.tensor(int(self.is_requested))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked.item():
            self.mark_started()  # allow more than STARTUP_TIMEOUT_S for an orderly close
            raise GracefulStop

    async def run_with_grace(self, run: Callable[[], Coroutine[object, object, T]]) -> T | None:
        """Await `run()` and return its result, or None if it was cancelled after the grace period.

        The grace period ends grace_s seconds after the first stop signal.
        """
        work = asyncio.create_task(run())
        while not work.done():
            await asyncio.wait({work}, timeout=_LOOK_S)
            if self._since is not None and self._clock() - self._since > self._grace_s and work.cancel():
                with suppress(asyncio.CancelledError):
                    await work
                return None
        return work.result()


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies for any reason (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
