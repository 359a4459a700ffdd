"""Tests that cancelling a task that waits for the pool, at any moment, leaks neither a slot of the
pool nor a process."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from megatron_rl_sandbox import SandboxPool
from megatron_rl_sandbox.server import create_app
from megatron_rl_sandbox.zygote_manager import ExitStatus, Interpreter, ZygoteManager
from tests.support.sandbox_pool import PoolRunner, start_pool

RUN_CODE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/run_code",
    "raw_path": b"/run_code",
    "query_string": b"",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
}
"""The ASGI scope that uvicorn passes to the application."""


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(size=1)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when a box starts to end. The end then takes at least 0.05 s."""
    begun, end = asyncio.Event(), ZygoteManager.end_interpreter

    async def slow(self: ZygoteManager, life: Interpreter) -> ExitStatus:
        begun.set()
        await asyncio.sleep(0.05)
        return await end(self, life)

    monkeypatch.setattr(ZygoteManager, "end_interpreter", slow)
    return begun


async def usable(pool: SandboxPool) -> bool:
    async with await pool.open(wait_s=5) as box:
        return pool.num_open == 1 and (await box.run("print(1)")).text == "1\n"


def test_a_cancelled_close_still_frees_the_place(room: PoolRunner, ending: asyncio.Event):
    """Cancelling `close` does not stop the end of the box, which then frees its slot."""

    async def calls() -> bool:
        box = await room.pool.open()
        closing = asyncio.create_task(box.close())
        await ending.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        again = asyncio.create_task(box.close())  # a second close waits for the same end
        await asyncio.sleep(0)
        assert room.pool.num_open == 1
        await again
        assert room.pool.num_open == 0
        return await usable(room.pool)

    assert room.run_coroutine(calls())


def test_a_client_that_is_gone_when_its_code_ends_takes_no_place(room: PoolRunner, ending: asyncio.Event):
    """If the client of /run_code disconnects while its box ends, the slot is freed and the status
    is 499."""
    said: list[dict[str, Any]] = []

    async def calls() -> bool:
        body = json.dumps({"language": "python", "code": "print(1)"}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await ending.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        await create_app(room.pool)(dict(RUN_CODE), receive, send)
        return await usable(room.pool)

    assert room.run_coroutine(calls())
    assert said[0]["status"] == 499, "which nobody hears"


def test_an_open_cancelled_in_the_tick_its_process_is_ready_loses_no_process(room: PoolRunner):
    """An `open` that is cancelled in the tick in which its process becomes ready leaves as many
    processes as before."""

    def processes() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}

    async def calls() -> tuple[set[int], set[int]]:
        (spare,) = room.pool._spare_interpreters.values()
        await spare
        before = processes()
        async with await room.pool.open():
            pass
        (spare,) = room.pool._spare_interpreters.values()
        assert not spare.done()
        spare.add_done_callback(lambda _: opening.cancel())  # before the opening task resumes
        opening = asyncio.create_task(room.pool.open())
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert await usable(room.pool)
        await asyncio.gather(*room.pool._spare_interpreters.values())
        return before, processes()

    before, after = room.run_coroutine(calls())
    assert len(after) == len(before)
