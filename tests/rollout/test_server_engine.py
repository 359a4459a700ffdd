"""Tests a server engine with no reachable server, and the timer of its requests."""

import asyncio
import time
from collections.abc import Coroutine, Iterator

import pytest

from megatron_rl.config import EngineSettings
from megatron_rl.errors import InfraTimeout
from megatron_rl.rollout.busy_timer import BusyTimer
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.health import ServerControl
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.client import PartialCompletion
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.types import SpecialTokens

NOBODY = "http://127.0.0.1:9"


def test_a_server_works_while_anything_of_ours_is_under_way() -> None:
    """Requests are in flight from 1 to 4 s, 2 to 6 s and 8 to 9 s, and one from 9.5 s on. At 10 s
    the timer has counted 5 + 1 + 0.5 s.
    """
    work = BusyTimer()
    for act, now in ((work.start, 1), (work.start, 2), (work.stop, 4), (work.stop, 6), (work.start, 8), (work.stop, 9), (work.start, 9.5)):
        act(now)
    assert work.busy_seconds(10) == 5 + 1 + 0.5


@pytest.fixture
def dark() -> Iterator[tuple[ServerEngine, list[str]]]:
    """Return an engine with one unreachable server, and the list of its log lines.

    Responses wait half a second.
    """
    settings = EngineSettings(mode="server", urls=[NOBODY], outage_timeout_s=0.5)
    said: list[str] = []
    engine = ServerEngine(
        [VllmServer(NOBODY)], settings, name="run", special_tokens=SpecialTokens(image_token_id=7), decode_tokens=str,
        all_gather=lambda mine: [([], {}), mine],
        control=ServerControl(), log=said.append,
    )  # fmt: skip
    yield engine, said
    engine.close()


def asked(engine: ServerEngine) -> Coroutine[object, object, Completion]:
    return asyncio.wait_for(engine.generate([1, 2], [], SamplingSettings(4, 1.0, seed=0)), 30)


@pytest.mark.known_failure("dead-engines")
def test_a_reply_does_not_wait_for_ever_where_no_engine_is_well(dark: tuple[ServerEngine, list[str]]) -> None:
    """A request waits for outage_timeout_s and then fails with a message that names all servers. A
    weight update that no server has received is no error.
    """
    engine, said = dark
    engine.load_weights(iter(()), version=1)
    began = time.monotonic()
    with pytest.raises(
        InfraTimeout, match=rf"^none of {NOBODY} was healthy for 0.5 s \(engine.outage_timeout_s\); the last failure: {NOBODY}: "
    ):
        engine.run(asked(engine))
    assert 0.5 <= time.monotonic() - began < 20
    assert said == ["no engine is healthy; requests wait for a healthy engine for up to 0.5 s (engine.outage_timeout_s)"]


def test_all_wait_together(dark: tuple[ServerEngine, list[str]]) -> None:
    """The wait starts when the last server becomes unhealthy. Twenty requests in a row therefore
    wait no longer than one, and requests after an update no longer than others. A new outage starts
    a new wait.
    """
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


def test_a_stop_string_across_two_requests_drops_its_experts(dark: tuple[ServerEngine, list[str]]) -> None:
    """The experts of tokens after a stop string are dropped with the tokens. The last kept
    token has
    none, because the prompt has two tokens, of which the first is known.
    """
    engine, _ = dark
    engine._decode_tokens = lambda token_ids: "".join(map(chr, token_ids))
    completion, sampling = Completion([], [], is_stopped=False, weight_versions=[]), SamplingSettings(9, 1.0, seed=0, stop=("bc",))
    first = PartialCompletion([97, 98], [-1.0] * 2, "abort", routed_experts=[b"1", b"2"])
    assert not engine._append_part(completion, first, sampling, version=0)
    rest = PartialCompletion([99, 100, 101], [-1.0] * 3, "length", routed_experts=[b"3", b"4", b"5"])
    assert engine._append_part(completion, rest, sampling, version=1)
    assert completion.token_ids == [97, 98, 99] and completion.routed_experts == [b"1", b"2", b"3"]
