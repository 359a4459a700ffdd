"""Stopping: what a signal asks of a run, where all ranks agree to it, and how long a step may take until then.

SIGTERM, SIGUSR1 and SIGINT ask this process to stop; nothing is interrupted. At the end of a step all ranks agree (`check`). Rollouts that
are not done grace_s after the signal are given up (`within_grace`): the step is played again by the run's next life. A second SIGINT ends
the process at once.
"""

import asyncio
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.types import Stopped

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


@contextmanager
def hearing(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Inside the block these signals have these handlers. Python hears signals in the main thread alone: in another one nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Whether this process was asked to stop, and since when. As a context it hears the signals."""

    def __init__(self, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s, self._clock = grace_s, clock
        self._since: float | None = None
        self._interrupted = False
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._closing.enter_context(hearing(dict.fromkeys(SIGNALS, self._hear)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if self._since is None:
            self._since = self._clock()

    @property
    def is_asked(self) -> bool:
        """Of this process; other ranks may know better."""
        return self._since is not None

    def check(self) -> None:
        """Raise Stopped on every rank if one of them was asked. All ranks together."""
        asked = torch.tensor(int(self.is_asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked.item():
            raise Stopped

    async def within_grace(self, play: Callable[[], Coroutine[object, object, T]]) -> T | None:
        """What `play` returns; None where this process was asked to stop grace_s ago and it was cancelled."""
        work = asyncio.create_task(play())
        while not work.done():
            await asyncio.wait({work}, timeout=_LOOK_S)
            if self._since is not None and self._clock() - self._since > self._grace_s and work.cancel():
                with suppress(asyncio.CancelledError):
                    await work
                return None
        return work.result()


def die_with_parent() -> None:
    """From now on this process is killed when the one that started it dies, however that dies (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
