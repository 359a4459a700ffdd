"""The watchdog in place of control groups: it sees a box while it opens, and lives on when the zygote does not."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sandbox import Fault, Limits, Result, Sandbox, SandboxFault, pool
from sandbox.layers import choose, offered
from tests.support.sandbox_room import Room

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
"""400 MiB in pieces, each under the limit of one process."""


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    try:
        layers = replace(choose(offered()), cgroup=False, watchdog=True)
    except SandboxFault as fault:
        pytest.skip(str(fault))
    with asyncio.Runner() as runner:
        sandbox = Sandbox(size=1, limits=Limits(memory=128 << 20), layers=layers)
        runner.run(sandbox.start())
        yield Room(runner, sandbox)
        runner.run(sandbox.close())


def test_a_box_that_outgrows_its_memory_while_it_opens_is_killed(room: Room):
    began = time.monotonic()
    with pytest.raises(ValueError, match="opening: the code used more than 134217728 bytes of memory"):
        room.do(room.pool.open(preload=GREEDY))
    assert time.monotonic() - began < 1.4
    assert room.pool.num_open == 0
    assert room.run("print(1)")[0].text == "1\n"


def test_the_watchdog_outlives_a_zygote_that_dies_under_it(room: Room, monkeypatch: pytest.MonkeyPatch):
    looked = pool._outgrown

    def dying(pid: int, *, limits: Limits, shared: int) -> str:
        monkeypatch.setattr(pool, "_outgrown", looked)
        room.pool._keeper._process.kill()
        room.pool._keeper._process.wait()
        return "memory"  # the end that follows is asked of nobody

    async def calls() -> list[Result]:
        async with await room.pool.open() as box:
            monkeypatch.setattr(pool, "_outgrown", dying)
            return [await box.run("import time; time.sleep(5)"), await box.run(GREEDY), await box.run("print(1)")]

    _, greedy, after = room.do(calls())
    assert (greedy.fault, greedy.limit) == (Fault.CODE, "memory"), greedy
    assert (after.text, after.state_lost) == ("1\n", True)
