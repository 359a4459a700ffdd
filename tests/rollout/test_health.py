"""Tests the health monitor with servers that crash, hang, have other weights, or report to be
healthy without generating tokens. The HTTP transport is replaced by functions that answer like
vLLM's servers.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.config import EngineSettings
from megatron_rl.rollout import health, server_engine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.health import ServerControl
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.types import SpecialTokens
from megatron_rl_sandbox.bounded_http import BoundedClient

PROBE_S = 0.2
GENERATE = "/inference/v1/generate"


class Fake:
    """Inference server with switchable failures, which records the paths of its requests.

    The label names its weights. `moves` makes the counter of generated tokens grow.
    """

    def __init__(self, number: int) -> None:
        self.url, self.label = f"http://server{number}:1", "run.0"
        self.is_there = self.answers = self.samples = True
        self.moves, self.count = False, 0
        self.asked: list[str] = []

    gives_up = is_broken = False
    """`gives_up`: another rank aborts all requests of the server.

    `is_broken`: its engine has crashed.
    """

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if not self.is_there:
            raise httpx.ConnectError("refused")
        if not self.answers:
            await asyncio.sleep(600)
        while path == GENERATE and not self.samples:
            await asyncio.sleep(0.01)
        if self.is_broken:
            return httpx.Response(500, text="the engine is gone")
        if path == "/weight_info":
            return httpx.Response(200, json={"weight_version": self.label})
        if path == "/metrics":
            self.count += self.moves
            return httpx.Response(200, text=f"# HELP\nvllm:generation_tokens_total{{}} {self.count}\nvllm:num_requests_running 1\n")
        return httpx.Response(200, json=self.sampled(json.loads(request.content)) if path == GENERATE else {})

    def sampled(self, body: dict) -> dict:
        num = 0 if self.gives_up else body["sampling_params"]["max_tokens"]
        choice = {
            "finish_reason": "abort" if self.gives_up else "length", "token_ids": [5] * num,
            "logprobs": {"content": [{"logprob": -1.0}] * num}, "weight_versions": [{"version": self.label, "start": 0, "end": num}],
        }  # fmt: skip
        return {"prompt_token_ids": body["token_ids"], "choices": [choice]}


class Kept:
    """Supervisor that starts no servers and records its calls."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bool]] = []
        self.well: set[str] = set()

    def report_alive(self, url: str) -> None:
        """Do nothing."""

    def report_healthy(self, url: str) -> None:
        self.well.add(url)

    def restart(self, url: str, *, is_unresponsive: bool) -> None:
        self.said.append((url, is_unresponsive))


class Giver:
    """Weight sender that sets the servers' labels without sending weights."""

    transfer_s = 0.0

    def __init__(self, fakes: list[Fake]) -> None:
        self.fakes, self.admitted, self.sent = {fake.url: fake for fake in fakes}, [], []
        self.refuses = False

    def send(self, tensors: object, label: str, *, urls: list[str]) -> tuple[list[str], dict[str, str]]:
        self.sent.append(list(urls))
        for url in urls:
            self.fakes[url].label = label
        return list(urls), {}

    def add_server(self, url: str) -> None:
        self.admitted.append(url)
        if self.refuses:
            raise EndpointError("it would not")
        self.fakes[url].label, self.fakes[url].samples = "run.0", True

    def release(self) -> None:
        """Do nothing."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    both = [Fake(0), Fake(1)]
    wire = httpx.MockTransport(lambda request: next(each for each in both if each.url.endswith(f"{request.url.host}:1")).answer(request))
    monkeypatch.setattr(server_engine, "BoundedClient", partial(BoundedClient, transport=wire))
    monkeypatch.setattr(health, "POLL_S", 0.02)
    return both


class Room:
    def __init__(self, fakes: list[Fake], *, own: bool, gives: bool = True) -> None:
        self.supervisor, self.giver, self.told = Kept() if own else None, Giver(fakes), []
        self.servers = [VllmServer(fake.url) for fake in fakes]
        settings = EngineSettings(
            mode="server", urls=[fake.url for fake in fakes], health_timeout_s=PROBE_S, request_timeout_s=60.0, outage_timeout_s=60.0
        )
        self.engine = ServerEngine(
            self.servers, settings, name="run", special_tokens=SpecialTokens(image_token_id=99), decode_tokens=str,
            all_gather=lambda mine: [mine or ([], {})],
            control=ServerControl(sender=self.giver if gives else None, supervisor=self.supervisor), log=self.told.append,
        )  # fmt: skip
        self.engine.load_weights(iter(()), version=0)

    def until(self, holds: Callable[[], bool], *, within_s: float = 60.0) -> None:
        async def main() -> None:
            async with asyncio.timeout(within_s):
                while not holds():
                    await asyncio.sleep(0.02)

        self.engine.run(main())

    def rest(self, seconds: float) -> None:
        self.engine.run(asyncio.sleep(seconds))


@pytest.fixture(params=[True, False], ids=["own servers", "others'"])
def room(request: pytest.FixtureRequest, fakes: list[Fake]) -> Iterator[Room]:
    room = Room(fakes, own=request.param)
    assert all(server.is_healthy for server in room.servers)
    yield room
    room.engine.close()


def test_one_that_answers_and_samples_stays(room: Room, fakes: list[Fake]) -> None:
    """A server that responds and generates tokens stays healthy. A server that has generated tokens
    recently gets no probe request; an idle server does.
    """
    room.until(lambda: all(fake.asked.count(GENERATE) >= 3 for fake in fakes))
    assert all(server.is_healthy for server in room.servers) and room.told == [] and room.giver.admitted == []
    for server, fake in zip(room.servers, fakes, strict=True):
        before, server.last_sampled_at = len(fake.asked), time.monotonic() + 1000
        room.until(lambda fake=fake, before=before: fake.asked[before:].count("/weight_info") >= 5)
        assert GENERATE not in fake.asked[before + 3 :]
    if room.supervisor:
        assert room.supervisor.well == {fake.url for fake in fakes} and room.supervisor.said == []


def test_one_that_hangs_is_out_and_told(room: Room, fakes: list[Fake]) -> None:
    """A server that hangs is unhealthy after the first failed check and reported as unresponsive
    after the third. When it responds again with the same weights, it becomes healthy without an
    update.
    """
    fakes[1].answers = False
    room.until(lambda: not room.servers[1].is_healthy)
    assert (
        room.servers[0].is_healthy
        and room.servers[1].is_responding is False
        and room.servers[1].failure.result() == "/weight_info: no complete response within 0.2 s"
    )
    if room.supervisor:
        room.until(lambda: (fakes[1].url, True) in room.supervisor.said)
        assert room.supervisor.said[:3] == [(fakes[1].url, False)] * 2 + [(fakes[1].url, True)]
    fakes[1].answers = True
    room.until(lambda: room.servers[1].is_healthy)
    assert room.giver.admitted == [] and len(room.told) == 1


@pytest.mark.parametrize("trouble", ["refuses", "says 500"])
def test_one_that_has_died_is_revived_at_once(room: Room, fakes: list[Fake], trouble: str) -> None:
    """A server that refuses connections or returns 500 is reported for a restart. A server whose
    engine has crashed may keep running forever, because vLLM's server waits until its connections
    are closed.
    """
    began = time.monotonic()
    fakes[0].is_there, fakes[0].is_broken = trouble != "refuses", trouble != "refuses"
    room.until(lambda: not room.servers[0].is_healthy)
    assert room.servers[0].failure.result() == {
        "refuses": "/weight_info: ConnectError: refused", "says 500": "/weight_info: 500, the engine is gone",
    }[trouble]  # fmt: skip
    if room.supervisor:
        room.until(lambda: (fakes[0].url, True) in room.supervisor.said)
        assert room.supervisor.said[:3] == [(fakes[0].url, False)] * 3 and time.monotonic() - began >= PROBE_S


def test_one_that_samples_nothing_is_out(room: Room, fakes: list[Fake]) -> None:
    """A server that reports to be healthy but generates no tokens is unhealthy, for example a
    paused server that was never resumed. An external server receives all weights again; the run's
    own server is restarted.
    """
    fakes[0].samples = False
    room.until(lambda: not room.servers[0].is_healthy)
    assert f"engine {fakes[0].url}: responds to health checks, but generated no token within engine.health_timeout_s={PROBE_S}" in room.told
    if room.supervisor:
        room.until(lambda: (fakes[0].url, True) in room.supervisor.said)
        room.rest(2 * PROBE_S)
        assert not room.servers[0].is_healthy, "its weights' label alone does not let it in"
    else:
        room.until(lambda: room.servers[0].is_healthy)
        assert {*room.giver.admitted} == {fakes[0].url}


def test_one_that_is_busy_stays(room: Room, fakes: list[Fake]) -> None:
    """A server stays healthy while the probe request waits behind other requests, as long as the
    server's counter of generated tokens grows.
    """
    fakes[0].samples, fakes[0].moves = False, True
    room.until(lambda: fakes[0].asked.count(GENERATE) >= 3)
    assert room.servers[0].is_healthy and room.told == []


def test_one_that_gives_up_for_another_rank_is_as_before(room: Room, fakes: list[Fake]) -> None:
    """Aborted probes change nothing: a healthy server stays healthy, and an unhealthy server
    becomes healthy only once it completes a probe.
    """
    for fake in fakes:
        fake.gives_up = True
    fakes[1].answers = False
    room.until(lambda: not room.servers[1].is_healthy)
    before, fakes[1].answers = fakes[1].asked.count(GENERATE), True
    room.until(lambda: fakes[0].asked.count(GENERATE) >= 3 and fakes[1].asked.count(GENERATE) >= before + 2)
    assert room.servers[0].is_healthy and not room.servers[1].is_healthy and room.giver.admitted == []
    assert room.supervisor is None or not any(hangs for _, hangs in room.supervisor.said)
    fakes[1].gives_up = False
    room.until(lambda: room.servers[1].is_healthy)


def test_one_with_other_weights_is_given_those_that_are_served(room: Room, fakes: list[Fake]) -> None:
    fakes[1].label = "default"
    room.until(lambda: room.giver.admitted == [fakes[1].url])
    room.until(lambda: room.servers[1].is_healthy)
    assert room.told == [f"engine {fakes[1].url}: has weights default, not run.0"]


def test_one_that_does_not_answer_is_given_no_update(room: Room, fakes: list[Fake]) -> None:
    """Weight updates skip a server that does not respond, and include it again once it has
    responded. If no server responds, the update is sent to all of them.
    """
    fakes[1].answers = False
    room.until(lambda: not room.servers[1].is_responding)
    room.engine.load_weights(iter(()), version=1)
    assert room.giver.sent[-1] == [fakes[0].url] and [server.is_healthy for server in room.servers] == [True, False]
    room.giver.refuses = fakes[1].answers = True
    room.until(lambda: fakes[1].url in room.giver.admitted)
    room.engine.load_weights(iter(()), version=2)
    assert room.giver.sent[-1] == [fake.url for fake in fakes] and all(server.is_healthy for server in room.servers)
    for fake in fakes:
        fake.answers = False
    room.until(lambda: not any(server.is_responding for server in room.servers))
    room.engine.load_weights(iter(()), version=3)
    assert room.giver.sent[-1] == [fake.url for fake in fakes]


def test_a_rank_that_gives_no_weights_looks_as_well(fakes: list[Fake]) -> None:
    """A rank without a weight sender monitors the servers, too, but never sends weights to them."""
    room = Room(fakes, own=False, gives=False)
    try:
        room.until(lambda: all(server.is_healthy for server in room.servers))
        fakes[0].samples = False
        room.until(lambda: not room.servers[0].is_healthy)
        room.rest(PROBE_S)
        fakes[0].samples = True
        room.until(lambda: room.servers[0].is_healthy)
        assert room.giver.admitted == []
    finally:
        room.engine.close()


def test_turns_of_one_that_falls_go_on_elsewhere(room: Room, fakes: list[Fake]) -> None:
    """If a server fails, its requests, including those in flight, are completed by the other
    server.
    """
    fakes[0].samples = fakes[1].samples = False

    async def main() -> list:
        turns = [asyncio.create_task(room.engine.generate([1, 2], [], SamplingSettings(3, 1.0, seed=index))) for index in range(4)]
        while sum(fake.asked.count(GENERATE) for fake in fakes) < 4:
            await asyncio.sleep(0.01)
        fakes[0].answers, fakes[1].samples = False, True
        return await asyncio.gather(*turns)

    completions = room.engine.run(main())
    assert [each.token_ids for each in completions] == [[5, 5, 5]] * 4 and not room.servers[0].is_healthy
