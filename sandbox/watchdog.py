"""Takes down what outgrows its memory or its number of processes, on hosts where no control group does."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from sandbox import tally
from sandbox.keeper import Interpreter, ZygoteManager
from sandbox.types import BoxLimits

POLL_S = 0.1


class ResourceWatchdog:
    """Over `lives`, those that are now. `lost` hears why it ended, if it did: nobody bounds the boxes from then on."""

    def __init__(
        self,
        zygote: ZygoteManager,
        *,
        list_interpreters: Callable[[], Iterable[Interpreter]],
        limits: BoxLimits,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._zygote, self._list_interpreters, self._limits, self._on_failure = zygote, list_interpreters, limits, on_failure
        self._kill_tasks: set[asyncio.Task[object]] = set()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._kill_tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._on_failure(task.exception())

    async def _run(self) -> None:
        slab = None
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(OSError):  # no descriptor left to look with, say: the next round may see again
                slab = slab or tally.KernelMemoryMonitor(self._limits)
                self._check_interpreters(count_mappings=slab.has_grown())

    def _check_interpreters(self, *, count_mappings: bool) -> None:
        for life in self._list_interpreters():
            if life.exceeded_limit is None and not life.exit_future.done():
                life.exceeded_limit = tally.find_exceeded_limit(
                    life.pid, limits=self._limits, shared_bytes=self._zygote.shared_anonymous_bytes, count_mappings=count_mappings
                )
                if life.exceeded_limit is not None:  # an end may take its time: the others are looked at meanwhile
                    task = asyncio.create_task(self._zygote.end_interpreter(life))
                    self._kill_tasks.add(task)
                    task.add_done_callback(self._kill_tasks.discard)
