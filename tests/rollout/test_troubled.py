"""Tests failing servers over real HTTP: which server a request is retried on and when, and how soon
a server becomes unhealthy. The servers are stand-ins for vLLM's with switchable failures.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from threading import Event

import pytest

from megatron_rl.clients.endpoint_pool import KeyRefused
from megatron_rl.config import EngineSettings
from megatron_rl.errors import AccessDenied, InfraError, InfraTimeout
from megatron_rl.rollout import health
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.health import POLL_S, ServerControl
from megatron_rl.rollout.server_engine import MAX_ATTEMPTS, ServerEngine
from megatron_rl.rollout.vllm import server_api as server_module
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.types import SpecialTokens
from tests.support.hostile_server import serve_hostile
from tests.support.json_server import server_url, start_server, stop_server

PROBE_S, SLACK_S = 1.0, 3.0
"""PROBE_S is the health timeout; SLACK_S is the additional time that a busy machine may take."""
GENERATE = "/inference/v1/generate"
ALL = ("/weight_info", "/metrics", GENERATE)


class Troubled:
    """Server that fails as `how` specifies for each path: 500, garbage (200 with an HTML page),
    other (tokens of another run's weights), or hangs.
    """

    def __init__(self) -> None:
        self.how: dict[str, str] = {}
        self.asked: list[float] = []
        """Times of the requests for a turn.

        Probe requests of the health monitor ask for one token and are not recorded.
        """
        self.label, self.ends = "", Event()
        self.http = start_server(self.answer)
        self.url = server_url(self.http)

    def answer(self, path: str, body: dict) -> tuple[int, object] | None:
        if path == GENERATE and body["sampling_params"]["max_tokens"] > 1:
            self.asked.append(time.monotonic())
        how = self.how.get(path, "")
        if how == "hangs":
            self.ends.wait(60)
        if self.ends.is_set():  # the server has crashed with all of its requests
            return None
        if how in ("500", "garbage"):
            return (500, b"EngineCore has died") if how == "500" else (200, b"<html>Welcome to nginx</html>")
        said = {"/weight_info": {"weight_version": self.label}}
        if path == GENERATE:
            said[path] = self.sampled(body, of="theirs.9" if how == "other" else self.label)
        return 200, said.get(path, {})

    def sampled(self, body: dict, *, of: str) -> dict:
        num = body["sampling_params"]["max_tokens"]
        choice = {
            "finish_reason": "length", "token_ids": [5] * num, "logprobs": {"content": [{"logprob": -1.0}] * num},
            "weight_versions": [{"version": of, "start": 0, "end": num}],
        }  # fmt: skip
        return {"prompt_token_ids": body["token_ids"], "choices": [choice]}

    def close(self) -> None:
        self.ends.set()
        stop_server(self.http)


class Giver:
    transfer_s = 0.0

    def __init__(self, servers: Mapping[str, Troubled]) -> None:
        self.servers = servers

    def send(self, tensors: object, label: str, *, urls: list[str]) -> tuple[list[str], dict[str, str]]:
        for url in urls:
            self.servers[url].label = label
        return list(urls), {}

    def add_server(self, url: str) -> None:
        """Do nothing: the server has the weights."""

    def release(self) -> None:
        """Do nothing."""


@pytest.fixture
def two() -> Iterator[list[Troubled]]:
    made = [Troubled(), Troubled()]
    yield made
    for each in made:
        each.close()


Open = Callable[[list[Troubled]], ServerEngine]


def opened(
    stack: ExitStack, urls: list[str], *, probe_s: float, patience_s: float, meet: Callable[[object], list], sender: Giver | None
) -> ServerEngine:
    """Return an engine over the servers at these URLs, with weights of version 0.

    The engine is closed when the stack exits.
    """
    settings = EngineSettings(mode="server", urls=urls, health_timeout_s=probe_s, request_timeout_s=60.0, outage_timeout_s=patience_s)
    engine = ServerEngine(
        [VllmServer(url) for url in urls], settings, name="run", special_tokens=SpecialTokens(image_token_id=99), decode_tokens=str,
        all_gather=meet,
        control=ServerControl(sender=sender),
        log=lambda _: None,
    )  # fmt: skip
    stack.callback(engine.close)
    engine.load_weights(iter(()), version=0)
    return engine


@pytest.fixture
def open_engine() -> Iterator[Open]:
    """Return a function that opens an engine over the given servers, all of which have the current
    weights.
    """
    with ExitStack() as stack:

        def opens(servers: list[Troubled]) -> ServerEngine:
            urls = [each.url for each in servers]
            giver = Giver(dict(zip(urls, servers, strict=True)))
            return opened(stack, urls, probe_s=PROBE_S, patience_s=60.0, meet=lambda mine: [mine or ([], {})], sender=giver)

        yield opens


async def say(engine: ServerEngine) -> Completion:
    return await asyncio.wait_for(engine.generate([1, 2], [], SamplingSettings(3, 1.0, seed=0)), 60)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ServerEngine]]:
    """Return a function that opens an engine over one server, which is assumed to have the current
    weights.
    """
    monkeypatch.setattr(health, "POLL_S", 0.05)
    with ExitStack() as stack:
        yield lambda url: opened(stack, [url], probe_s=0.3, patience_s=0.5, meet=lambda mine: [([url], {})], sender=None)


@pytest.mark.parametrize("way", ["body by drops", "head by drops", "silent"])
def test_one_that_answers_by_drops_is_out_and_named(way: str, alone: Callable[[str], ServerEngine]) -> None:
    """A server that sends its reply byte by byte never exceeds a read timeout, so a request or a
    cancellation would wait forever. The server becomes unhealthy within engine.health_timeout_s,
    and the error names it.
    """
    with serve_hostile(way) as url:
        engine, began = alone(url), time.monotonic()
        line = rf"^none of {url} was healthy for 0.5 s \(engine.outage_timeout_s\); the last failure: {url}: "
        with pytest.raises(InfraTimeout, match=line + "/weight_info: no complete response within 0.3 s$"):
            engine.run(say(engine))
        engine.load_weights(iter(()), version=1)
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(("way", "what"), [("packed", r"is compressed \('gzip'\)"), ("endless", r"has more than \d+ bytes")])
def test_an_answer_without_end_is_not_read(way: str, what: str, alone: Callable[[str], ServerEngine]) -> None:
    with serve_hostile(way) as url:
        engine = alone(url)
        with pytest.raises(InfraTimeout, match=rf"the last failure: {url}: /\S+: the response {what}"):
            engine.run(say(engine))


@pytest.mark.parametrize("status", ["401", "403"])
def test_one_that_asks_for_a_key_is_no_outage(status: str, alone: Callable[[str], ServerEngine]) -> None:
    """The request fails at once, without waiting, and the error names the setting to change."""
    with serve_hostile(status) as url:
        engine = alone(url)
        line = rf"^engine.urls={url}: /\S+: {status}, no such key; the server rejects .*; set engine.token_file to .*$"
        with pytest.raises(AccessDenied, match=line):
            engine.run(say(engine))


def test_one_that_the_run_started_itself_has_no_token_of_the_users() -> None:
    with serve_hostile("401") as url:
        server = VllmServer(url, token="t" * 40, is_own=True)
        with pytest.raises(KeyRefused):
            server.call("/version")
    assert server.access_error.startswith(
        f"engine.urls={url}: /version: 401, no such key; this run started its own servers (engine.num_local_servers), and "
    )
    assert "engine.token_file" not in server.access_error


@pytest.mark.parametrize("how", ["500", "garbage", "other"])
def test_the_second_try_goes_to_another(how: str, two: list[Troubled], open_engine: Open) -> None:
    """The retry goes to the other server, although the first server reports to be healthy and is no
    busier.
    """
    two[0].how[GENERATE] = how
    engine = open_engine(two)
    assert engine.run(say(engine)).token_ids == [5, 5, 5]
    assert [len(each.asked) for each in two] == [1, 1]


@pytest.mark.parametrize("how", ["500", "garbage", "other"])
def test_tries_of_one_server_are_apart(how: str, two: list[Troubled], open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single server, each pause before a retry is twice the previous pause, minus at most
    half, also after an invalid reply with status 200. Then the request fails. `last_sampled_at`
    lies in the future, so that no probe marks the server unhealthy before.
    """
    monkeypatch.setattr(server_module, "MIN_BACKOFF_S", 0.1)
    two[0].how[GENERATE] = how
    engine = open_engine(two[:1])
    engine._servers[0].last_sampled_at = time.monotonic() + 1000
    with pytest.raises(InfraError, match=f"failed after {MAX_ATTEMPTS} attempts$"):
        engine.run(say(engine))
    gaps = [after - before for before, after in pairwise(two[0].asked)]
    assert len(gaps) == MAX_ATTEMPTS - 1 and all(gap >= 0.05 * 2**number for number, gap in enumerate(gaps)), gaps


def test_one_that_reads_its_weights_is_left_alone(two: list[Troubled], open_engine: Open) -> None:
    """A server that computes the checksums of its weights stays healthy, although it answers
    nothing for longer than engine.health_timeout_s. After the checksums, the same silence counts as
    a hang.
    """
    engine = open_engine(two)
    bad = engine._servers[0]

    async def main() -> None:
        bad.is_checksumming = True
        two[0].how |= dict.fromkeys(ALL, "hangs")
        await asyncio.sleep(POLL_S + 2 * PROBE_S)
        assert bad.is_healthy
        bad.is_checksumming = False
        began = time.monotonic()
        while bad.is_healthy:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < POLL_S + 2 * PROBE_S + SLACK_S

    engine.run(main())


@pytest.mark.parametrize(
    ("how", "paths", "within_s"),
    [
        ("dead", (), POLL_S),
        ("500", ALL, POLL_S),
        ("garbage", ALL, POLL_S),
        ("hangs", ALL, POLL_S + PROBE_S),
        (
            "hangs",
            (GENERATE,),
            2 * POLL_S + 2 * PROBE_S,
        ),  # a probe is sent after engine.health_timeout_s without tokens
    ],
)
def test_within_seconds_one_in_trouble_is_out(
    how: str, paths: tuple[str, ...], within_s: float, two: list[Troubled], open_engine: Open
) -> None:  # fmt: skip
    """A failing server becomes unhealthy within `within_s`, and its request is completed by the
    other server.
    """
    engine = open_engine(two)
    two[0].how[GENERATE] = "hangs"
    bad = engine._servers[0]

    async def main() -> tuple[float, float, Completion]:
        turn = asyncio.create_task(say(engine))
        while not two[0].asked:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        if how == "dead":
            await asyncio.to_thread(two[0].close)
        two[0].how |= dict.fromkeys(paths, how)
        while bad.is_healthy:
            await asyncio.sleep(0.01)
        is_out = time.monotonic()
        completion = await turn
        return is_out - began, time.monotonic() - is_out, completion

    out_s, elsewhere_s, completion = engine.run(main())
    assert out_s < within_s + SLACK_S and elsewhere_s < SLACK_S, (out_s, elsewhere_s)
    assert completion.token_ids == [5, 5, 5] and len(two[1].asked) == 1 and engine._servers[1].is_healthy


class CutOff(Troubled):
    """Server that aborts its first turn after two tokens.

    A stop text begins in these tokens and ends with the first token of the next request.
    """

    def sampled(self, body: dict, *, of: str) -> dict:
        if body["sampling_params"]["max_tokens"] == 1:
            return super().sampled(body, of=of)
        is_first = body["token_ids"] == [1, 2]
        ids = [5, 6] if is_first else [7, 8, 9]
        choice = {
            "finish_reason": "abort" if is_first else "length", "token_ids": ids,
            "logprobs": {"content": [{"logprob": -float(token)} for token in ids]},
            "weight_versions": [{"version": of, "start": 0, "end": len(ids)}],
        }  # fmt: skip
        return {"prompt_token_ids": body["token_ids"], "choices": [choice]}


def test_what_a_stop_text_cuts_off_leaves_nothing_behind(open_engine: Open) -> None:
    """If a stop text spans two requests, the tokens after it (8 and 9) are dropped. The stop text
    is 6, 7. Each remaining token keeps its logprob and version.
    """
    server = CutOff()
    try:
        engine = open_engine([server])
        turn = engine.generate([1, 2], [], SamplingSettings(5, 1.0, seed=0, stop=("6, 7",)))
        completion = engine.run(asyncio.wait_for(turn, 60))
    finally:
        server.close()
    assert (completion.token_ids, completion.logprobs, completion.weight_versions) == ([5, 6, 7], [-5.0, -6.0, -7.0], [0, 0, 0])
    assert completion.is_stopped
