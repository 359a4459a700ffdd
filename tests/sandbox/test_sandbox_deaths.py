"""Tests who is blamed for the death of a box in a call, between two calls and during a fetch. A
death caused by the host is retried and never scored."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from megatron_rl_sandbox import BoxLimits, Fault, frames
from megatron_rl_sandbox.box import Box
from tests.support.sandbox_pool import PoolRunner, start_pool

LIMITS = BoxLimits(call_timeout_s=1.0, memory=192 << 20, disk=8 << 20, file=4 << 20)


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(LIMITS, size=2)


async def killed(box: Box) -> None:
    """Kill a box as the host's OOM killer would, and wait until the pool has noticed."""
    ended = box.interpreter.exit_future
    os.kill(box.interpreter.pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.shield(ended), 10)


def test_the_hosts_trouble_is_the_hosts_fault(room: PoolRunner):
    """If the host kills a box or the zygote, every affected call is a host fault. Later calls run
    on a new zygote, with `state_lost` set."""

    async def calls():
        async with await room.pool.open() as box, await room.pool.open() as other:
            await box.run("import time")
            call = asyncio.create_task(box.run("time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.1)
            os.kill(box.interpreter.pid, signal.SIGKILL)
            first = await call
            await box.run("import time")
            again = asyncio.create_task(box.run("time.sleep(30)", timeout_s=60))
            await asyncio.sleep(0.3)
            room.pool._zygote._process.kill()
            return [first, await again, await other.run("print(0)"), await other.run("print(1)"), await box.run("print(2)")]

    results = room.run_coroutine(calls())
    assert [result.fault for result in results] == [Fault.HOST] * 3 + [Fault.NONE] * 2
    assert "the box was killed from outside" in results[0].error.message
    assert all("zygote died" in result.error.message for result in results[1:3])
    assert [(result.text, result.state_lost) for result in results[3:]] == [("1\n", True), ("2\n", True)]  # a new zygote


def test_a_kill_by_the_host_between_two_calls_is_told_by_the_next_one(room: PoolRunner):
    """If the host kills a box between two calls, the next call reports a host fault. On a fresh
    interpreter the call would end with a NameError, and be scored."""

    async def calls():
        async with await room.pool.open() as box:
            await box.run("x = 1")
            await killed(box)
            return [await box.run("print(x)"), await box.run("print('x' in dir())"), await box.run("print(3)")]

    told, fresh, later = room.run_coroutine(calls())
    assert (told.fault, told.text) == (Fault.HOST, ""), told
    assert "the box was killed from outside" in told.error.message
    assert (fresh.fault, fresh.text, fresh.state_lost) == (Fault.NONE, "False\n", True)
    assert (later.text, later.state_lost) == ("3\n", False)


def test_an_end_by_the_codes_own_hand_between_two_calls_costs_it_its_state(room: PoolRunner):
    """Code that exits its own interpreter between two calls loses its state. The next call runs
    without a fault."""
    leave = "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), os._exit(3))).start()"

    async def calls():
        async with await room.pool.open() as box:
            await box.run(leave)
            await asyncio.wait_for(asyncio.shield(box.interpreter.exit_future), 10)
            return await box.run("print('os' in dir())")

    result = room.run_coroutine(calls())
    assert (result.fault, result.text, result.state_lost) == (Fault.NONE, "False\n", True), result


@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
def test_a_fetch_leaves_it_to_the_next_call_to_tell(room: PoolRunner, before: bool):
    """If the host kills a box before or during a fetch, the fetch returns nothing and the next call
    reports the host fault."""

    async def calls():
        async with await room.pool.open(files={"a": b"input"}) as box:
            await box.run("open('a', 'w').write('written')")
            if before:
                await killed(box)
                found = await box.fetch_files(["a"])
            else:
                os.kill(box.interpreter.pid, signal.SIGSTOP)
                fetching = asyncio.create_task(box.fetch_files(["a"]))
                await asyncio.sleep(0.1)
                await killed(box)
                found = await fetching
            return found, await box.run("print(1)"), await box.run("print(2)")

    found, told, after = room.run_coroutine(calls())
    assert (found, told.fault, after.text, after.state_lost) == ({}, Fault.HOST, "2\n", True), (told, after)


def test_to_read_an_answer_is_not_the_boxes_time(room: PoolRunner, monkeypatch: pytest.MonkeyPatch):
    """The time that the pool needs to read a reply does not count toward the limit of the box. Here
    the pool's reader is late by twice the limit."""
    parse = frames._parse_json

    def late(text: bytes) -> dict[str, object]:
        time.sleep(2.0)
        return parse(text)

    async def calls():
        async with await room.pool.open() as box:
            monkeypatch.setattr(frames, "MAX_INLINE_JSON", 0)
            monkeypatch.setattr(frames, "_parse_json", late)
            return await box.run("open('a', 'w').write('a'); print(1)"), await box.fetch_files(["a"])

    result, found = room.run_coroutine(calls())
    assert (result.fault, result.text, found) == (Fault.NONE, "1\n", {"a": b"a"}), result


def test_a_fetch_that_the_host_holds_up_is_its_fault(room: PoolRunner):
    """If the host stops a box during a fetch, the fetch returns nothing and the next call reports
    the host fault."""

    async def calls():
        async with await room.pool.open() as box:
            os.kill(box.interpreter.pid, signal.SIGSTOP)
            return await box.fetch_files(["a"]), await box.run("print(1)"), await box.run("print(2)")

    found, told, after = room.run_coroutine(calls())
    assert (found, told.fault, after.text, after.state_lost) == ({}, Fault.HOST, "2\n", True), (told, after)
    assert "stopped from outside" in told.error.message
