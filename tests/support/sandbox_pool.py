"""Helpers of the sandbox's end-to-end tests: a pool with an event loop that stays open for a
module's tests, and a snapshot of the host.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest

from megatron_rl_sandbox import BoxLimits, SandboxError, SandboxPool
from megatron_rl_sandbox.cgroups import find_own_groups
from megatron_rl_sandbox.layers import choose_layers, detect_layers


class PoolRunner:
    """A started pool that plain test functions can use."""

    def __init__(self, runner: asyncio.Runner, pool: SandboxPool) -> None:
        self.runner, self.pool = runner, pool

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def run_codes(self, *codes: str, **inputs: Any) -> list[Any]:
        """Run the codes in one sandbox and return their results."""

        async def calls() -> list[Any]:
            async with await self.pool.open(**inputs) as box:
                return [await box.run(code) for code in codes]

        return self.run_coroutine(calls())


def start_pool(limits: BoxLimits | None = None, *, size: int = 4) -> Iterator[PoolRunner]:
    """Start a pool. Skips the tests, with the reason, if the host supports no isolation."""
    try:
        choose_layers(detect_layers())
    except SandboxError as fault:
        pytest.skip(str(fault))
    with asyncio.Runner() as runner:
        pool = SandboxPool(size=size, limits=limits)
        runner.run(pool.start())
        yield PoolRunner(runner, pool)
        runner.run(pool.close())


def snapshot_host() -> dict[str, object]:
    """Return everything that a pool could leave on this host, for a comparison before and after a
    test.
    """
    me = psutil.Process()
    groups = (
        {path for place in find_own_groups().values() for path in place.glob("sandbox-*")} if Path("/proc/self/cgroup").exists() else set()
    )
    return {
        "processes": {child.pid for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE},
        "descriptors": {
            number: os.readlink(f"/proc/self/fd/{number}") for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)
        },
        "threads": {thread.name for thread in threading.enumerate()},
        "files": {entry.name for entry in Path(gettempdir()).glob("sandbox-*")},
        "groups": {path for path in groups if path.name.split("-")[1] == str(os.getpid())},
        "mounts": Path("/proc/self/mountinfo").read_text(),
    }


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the descriptor that listed the folder
        return False
    return True
