"""Engines elsewhere that are not there."""

import asyncio
import time
from collections.abc import Coroutine, Iterator

import pytest

from megatron_rl.config import EngineSettings
from megatron_rl.errors import InfraTimeout
from megatron_rl.rollout.busy_timer import BusyTimer
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.server_api import VllmServer

NOBODY = "http://127.0.0.1:9"


def test_a_server_works_while_anything_of_ours_is_under_way() -> None:
    """Turns from 1 to 4, 2 to 6 and 8 to 9 s; at 10 s one that is not over has begun at 9.5."""
    work = BusyTimer()
    for act, now in ((work.start, 1), (work.start, 2), (work.stop, 4), (work.stop, 6), (work.start, 8), (work.stop, 9), (work.start, 9.5)):
        act(now)
    assert work.busy_seconds(10) == 5 + 1 + 0.5


@pytest.fixture
def dark() -> Iterator[tuple[ServerEngine, list[str]]]:
    """An engine whose only server is not there, and what is told; replies wait half a second."""
    settings = EngineSettings(mode="server", urls=[NOBODY], outage_timeout_s=0.5)
    said: list[str] = []
    engine = ServerEngine(
        [VllmServer(NOBODY)], settings, name="run", image_token_id=7, stop_ids=[], decode_tokens=str, all_gather=lambda mine: [([], {}),
        mine],
        sender=None, log=said.append,
    )  # fmt: skip
    yield engine, said
    engine.close()


def asked(engine: ServerEngine) -> Coroutine[object, object, Completion]:
    return asyncio.wait_for(engine.generate([1, 2], [], SamplingSettings(4, 1.0, seed=0)), 30)


def test_a_reply_does_not_wait_for_ever_where_no_engine_is_well(dark: tuple[ServerEngine, list[str]]) -> None:
    """It waits as long as it may, and its rollout fails by the names of all of them; weights that nobody took are no error of the run."""
    engine, said = dark
    engine.load_weights(iter(()), version=1)
    began = time.monotonic()
    with pytest.raises(
        InfraTimeout, match=rf"^none of {NOBODY} was well for 0.5 s \(engine.outage_timeout_s\); the last failure: {NOBODY}: "
    ):
        engine.run(asked(engine))
    assert 0.5 <= time.monotonic() - began < 20
    assert said == ["no engine is well; replies wait for one up to 0.5 s (engine.outage_timeout_s)"]


def test_all_wait_together(dark: tuple[ServerEngine, list[str]]) -> None:
    """From when the last one has gone: turns in a row wait no longer than one, those that an update has let ask no longer than others."""
    engine, said = dark
    engine.load_weights(iter(()), version=1)
    with pytest.raises(InfraTimeout):
        engine.run(asked(engine))
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(InfraTimeout):
            engine.run(asked(engine))
    assert time.monotonic() - began < 20 * 0.5 / 2 and len(said) == 1

    async def comes_and_goes() -> None:
        engine._health_monitor.readmit(engine._servers[0])
        engine._health_monitor.mark_unhealthy(engine._servers[0], "gone again")

    engine.run(comes_and_goes())
    began = time.monotonic()
    with pytest.raises(InfraTimeout):
        engine.run(asked(engine))
    assert time.monotonic() - began >= 0.5, "another outage, another wait"
