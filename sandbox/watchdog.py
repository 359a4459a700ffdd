"""Watchdog that enforces memory and process limits of boxes on hosts without control groups."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from megatron_rl_sandbox import resource_usage
from megatron_rl_sandbox.records import BoxLimits
from megatron_rl_sandbox.zygote_manager import Interpreter, ZygoteManager

POLL_S = 0.1


class ResourceWatchdog:
    """Background task that checks the running interpreters every POLL_S seconds.

    `list_interpreters` returns the running interpreters. If the task fails, `on_failure` is called,
    because the limits are no longer enforced.
    """

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
        """Stop the task and wait until all kills in progress are complete."""
        self._task.cancel()
        await asyncio.gather(self._task, *self._kill_tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._on_failure(task.exception())

    async def _run(self) -> None:
        slab = None
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(OSError):  # for example out of descriptors; the next round may succeed
                slab = slab or resource_usage.KernelMemoryMonitor(self._limits)
                self._check_interpreters(count_mappings=slab.has_grown())

    def _check_interpreters(self, *, count_mappings: bool) -> None:
        for life in self._list_interpreters():
            if life.exceeded_limit is None and not life.exit_future.done():
                life.exceeded_limit = resource_usage.find_exceeded_limit(
                    life.pid, limits=self._limits, shared_bytes=self._zygote.shared_anonymous_bytes, count_mappings=count_mappings
                )
                if life.exceeded_limit is not None:  # ending a box may take a while, and the other boxes must still be checked
                    task = asyncio.create_task(self._zygote.end_interpreter(life))
                    self._kill_tasks.add(task)
                    task.add_done_callback(self._kill_tasks.discard)
