"""Stopping a run: signals, agreement of all ranks, and time limits.

SIGTERM, SIGUSR1 and SIGINT request a stop of this process, without interrupting anything. At the
end of a step all ranks agree on it (`StopSignal.check`). Rollouts that are not complete grace_s
after the signal are cancelled (`StopSignal.run_with_grace`), and the next attempt repeats the step.
A second SIGINT ends the process at once. Without a launcher, so does any other signal that arrives
SECOND_SIGNAL_S or more after the first.

Python runs signal handlers only when the main thread returns from C code. In a collective, or while
ranks wait for each other at startup, that may take minutes. `SignalDeadline` therefore receives
signals in a thread and ends a process that has not stopped in time:

    STARTUP_TIMEOUT_S after the signal              before the first `check`
    IMMEDIATE_S after the second signal             if a second one arrives
    grace_s + close_timeout_s after the signal      otherwise

Without a launcher the last limit is CLOSE_TIMEOUT_S after the grace period or after the last
movement of the main thread, the later of both, if that is earlier.
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
"""Seconds that a process has after a signal before its first step, with nothing to save yet."""
SECOND_SIGNAL_S = 5.0
"""Seconds within which a further signal counts as the same request, delivered twice: by a launcher,
a queue, a terminal.
"""
IMMEDIATE_S = 3.0
"""Seconds that a process has after a second signal."""
CLOSE_TIMEOUT_S = 120.0
"""Seconds beyond the grace period for a step's updates, its checkpoint and the shutdown of the
engine.
"""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that received a second signal."""
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


@contextmanager
def handling_signals(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Install these signal handlers inside the block.

    Python allows this in the main thread only; in other threads nothing changes.
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
    """Time and way in which a process is ended that does not stop by itself."""

    deadline: float
    """Time of the exit on the clock of time.monotonic."""
    message: str
    exit_code: int


class SignalDeadline:
    """Context manager that ends this process at a deadline after a signal.

    `rule` returns the deadline, given the (number, time) of all signals received so far. It works
    in the main thread only.
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
        """Detach a forked child process, which must not pass its signals to the parent."""
        if self._writer.fileno() >= 0:
            signal.set_wakeup_fd(-1)
            self._writer.close()

    def _watch(self) -> None:
        """Thread that receives signals until the socket is closed."""
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
    """Return True under torchrun and launch/launch.py.

    Launchers have their own time limits and signal the remaining processes when one exits.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporting_rank() -> bool:
    """Return True for the one process of a launcher that reports signals."""
    return not has_launcher() or os.environ.get("RANK", "0") == "0"


def main_thread_location() -> str:
    """Return the innermost line of this package in the main thread.

    Example: `world.py:71 in connect`.
    """
    frame = sys._current_frames()[threading.main_thread().ident]
    own = frame
    while own.f_back is not None and not Path(own.f_code.co_filename).is_relative_to(Path(__file__).parents[1]):
        own = own.f_back
    return f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"


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
        """Return when and how SignalDeadline ends this process; see the module docstring."""
        number, first = received[0]
        interrupts = [at for other, at in received if other == signal.SIGINT]
        again = interrupts[1:] + [at for _, at in received if at - first >= SECOND_SIGNAL_S and not has_launcher()]
        name, where = signal.Signals(number).name, main_thread_location()
        if again:
            line = f"error: interrupted at {where}; the checkpoints that were complete stay, and the same command goes on"
            return ForcedExit(min(again) + IMMEDIATE_S, line, EXIT_INTERRUPTED)
        if not self._has_started:
            line = f"stopped before the first step, by {name} at {where}; the same command goes on"
            return ForcedExit(first + STARTUP_TIMEOUT_S, line, os.EX_TEMPFAIL)
        at = first + self._grace_s + self._close_timeout_s
        if not has_launcher():
            at = min(at, max(first + self._grace_s, self._last_move()) + CLOSE_TIMEOUT_S)
        line = f"error: {name}: still at {where} after {time.monotonic() - first:.0f} s; the same command goes on from the last checkpoint"
        return ForcedExit(at, line, os.EX_TEMPFAIL)

    def _last_move(self) -> float:
        """Return the time.monotonic at which the main thread last moved in the code."""
        frame = sys._current_frames()[threading.main_thread().ident]
        if (frame.f_code, frame.f_lasti) != self._last_location:
            self._last_location, self._last_move_at = (frame.f_code, frame.f_lasti), time.monotonic()
        return self._last_move_at

    @property
    def is_requested(self) -> bool:
        """True if this process received a stop signal.

        Other ranks may have received one earlier.
        """
        return self._since is not None

    def mark_started(self) -> None:
        """Declare that from now on there may be something to save."""
        self._has_started = True

    def check(self) -> None:
        """Raise GracefulStop on every rank if any rank received a stop signal.

        All ranks call this together, from the first step on.
        """
        self.mark_started()
        self.check_start()

    def check_start(self) -> None:
        """Raise GracefulStop like `check`, but during startup."""
        asked = torch.tensor(int(self.is_requested))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked.item():
            self.mark_started()  # allow more than STARTUP_TIMEOUT_S for an orderly close
            raise GracefulStop

    async def run_with_grace(self, run: Callable[[], Coroutine[object, object, T]]) -> T | None:
        """Return the result of `run`, or None if it was cancelled grace_s after a stop signal."""
        work = asyncio.create_task(run())
        while not work.done():
            await asyncio.wait({work}, timeout=_LOOK_S)
            if self._since is not None and self._clock() - self._since > self._grace_s and work.cancel():
                with suppress(asyncio.CancelledError):
                    await work
                return None
        return work.result()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies for any reason (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
