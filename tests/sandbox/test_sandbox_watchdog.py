"""Tests the watchdog that replaces control groups: it checks a box while it opens, and survives the
death of the zygote."""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_rl_sandbox import BoxLimits, CallResult, Fault, SandboxError, SandboxPool, confine, resource_usage
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from tests.support.sandbox_pool import PoolRunner

GREEDY = """
import os, time
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        held = b"x" * (100 << 20)
        time.sleep(1.5)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""
"""Allocates 400 MiB in pieces, each below the limit of one process."""


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    try:
        layers = replace(choose_layers(detect_layers()), cgroup=False, watchdog=True)
    except SandboxError as fault:
        pytest.skip(str(fault))
    with asyncio.Runner() as runner:
        sandbox = SandboxPool(size=1, limits=BoxLimits(memory=128 << 20), layers=layers)
        runner.run(sandbox.start())
        yield PoolRunner(runner, sandbox)
        runner.run(sandbox.close())


def test_a_box_that_outgrows_its_memory_while_it_opens_is_killed(room: PoolRunner):
    began = time.monotonic()
    with pytest.raises(ValueError, match="failed to open a box: the code used more than 134217728 bytes of memory"):
        room.run_coroutine(room.pool.open(preload=GREEDY))
    assert time.monotonic() - began < 10, "long before its time is over"
    assert room.pool.num_open == 0
    assert room.run_codes("print(1)")[0].text == "1\n"


def test_the_watchdog_outlives_a_zygote_that_dies_under_it(room: PoolRunner, monkeypatch: pytest.MonkeyPatch):
    """After the death of a zygote in the middle of a check, the watchdog still enforces the limits
    of boxes on the new zygote."""
    looked = resource_usage.find_exceeded_limit

    def dying(pid: int, *, limits: BoxLimits, shared_bytes: int, count_mappings: bool) -> str:
        monkeypatch.setattr(resource_usage, "find_exceeded_limit", looked)
        room.pool._zygote._process.kill()
        room.pool._zygote._process.wait()
        return "memory"  # the zygote that would end the box is dead

    async def calls() -> list[CallResult]:
        async with await room.pool.open() as box:
            monkeypatch.setattr(resource_usage, "find_exceeded_limit", dying)
            return [await box.run("import time; time.sleep(5)"), await box.run(GREEDY), await box.run("print(1)")]

    _, greedy, after = room.run_coroutine(calls())
    assert (greedy.fault, greedy.limit) == (Fault.CODE, "memory"), greedy
    assert (after.text, after.state_lost) == ("1\n", True)


SPAN = """
import mmap
block = mmap.mmap(-1, {gib} << 30, flags=0x4022, prot=1)
block.madvise(15)
for at in range(0, {gib} << 30, 2 << 20): block[at]
print("read", flush=True)
"""
SOCKETS = """
import os, socket, time
pairs = []
for _ in range(5):
    if os.fork() == 0:
        pairs += [socket.socketpair() for _ in range(100)]
        time.sleep(5)
        os._exit(0)
time.sleep(5)
"""
"""Opens 1000 socket ends of 256 KiB."""


def test_page_tables_are_bounded_by_addresses_and_counted(room: PoolRunner):
    """Finding 6 of the attack of 2026-11-21: page tables are counted, and the address space bounds
    them. Formerly 1.5 TB, read at every 2 MiB, took 3 GB of page tables that were not counted."""
    (result,) = room.run_codes(SPAN.format(gib=1500))
    assert (result.fault, result.limit, result.text) == (Fault.CODE, "memory", "")
    (honest,) = room.run_codes(SPAN.format(gib=3))
    assert (honest.fault, honest.text) == (Fault.NONE, "read\n")


def test_buffers_of_sockets_are_counted(room: PoolRunner):
    (result,) = room.run_codes(SOCKETS)
    assert (result.fault, result.limit) == (Fault.CODE, "memory")


def test_a_box_has_the_cores_of_its_place(room: PoolRunner):
    """A box may use the one core of its slot (BoxLimits.cpus is 1). Its children have the same
    core, and it cannot switch to another."""
    (result,) = room.run_codes(
        "import os, subprocess\nprint(len(os.sched_getaffinity(0)))\n"
        "print(subprocess.run(['nproc'], capture_output=True, text=True).stdout.strip())\nos.sched_setaffinity(0, {0, 1})"
    )
    assert (result.text, result.error.type) == ("1\n1\n", "PermissionError")


def test_places_side_by_side_have_other_cores(monkeypatch: pytest.MonkeyPatch):
    """Adjacent slots have different cores, and cores are reused only after all of them are
    taken."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 11})
    assert [confine.box_cores(place, cpus=1.0) for place in (0, 1, 4, 5)] == [{2}, {3}, {11}, {2}]
    assert [confine.box_cores(place, cpus=1.5) for place in (0, 1, 2)] == [{2, 3}, {5, 7}, {11, 2}]
    assert confine.box_cores(3, cpus=64) == {2, 3, 5, 7, 11}
