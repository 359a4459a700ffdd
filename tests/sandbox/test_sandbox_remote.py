"""Tests that a box behind HTTP returns the same results as a box in this process."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from megatron_rl_sandbox import CallResult, CallUsage, Fault
from megatron_rl_sandbox.sandbox_client import SandboxClient
from megatron_rl_sandbox.server import create_app
from tests.support.sandbox_pool import PoolRunner, start_pool


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(size=1)


def remote(room: PoolRunner) -> SandboxClient:
    return SandboxClient("http://127.0.0.1:8080", transport=httpx.ASGITransport(create_app(room.pool)))


@pytest.mark.parametrize("code", ["x = '\ud800'", "\n# \udc00\udc01 \u00e9", "print('\u00e9\U0001f600')"], ids=["one", "two", "whole"])
def test_half_a_surrogate_pair_is_the_codes_fault_here_and_there(room: PoolRunner, code: str):
    """Code has the same result in a local box and behind HTTP. A lone surrogate is the code's
    fault; any other Unicode is no fault."""

    async def calls() -> list[CallResult]:
        async with remote(room) as pool, await pool.open() as box:
            return [await box.run(code), await box.run("print(2)")]

    there, here = room.run_coroutine(calls()), room.run_codes(code, "print(2)")
    assert [replace(result, id=0, usage=CallUsage()) for result in there] == [replace(result, id=0, usage=CallUsage()) for result in here]
    assert there[0].fault is (Fault.NONE if "print" in code else Fault.CODE)
    assert there[1].text == "2\n"


def test_half_a_surrogate_pair_in_a_preload_is_the_callers_mistake_here_and_there(room: PoolRunner):
    """A preload with a lone surrogate raises ValueError, locally and behind HTTP."""

    async def open_remote() -> None:
        async with remote(room) as pool:
            await pool.open(preload="x = '\ud800'")

    for opening in (open_remote(), room.pool.open(preload="x = '\ud800'")):
        with pytest.raises(ValueError, match="preload"):
            room.run_coroutine(opening)
    assert room.pool.num_open == 0
