"""Tests the client of the listeners over real HTTP, with servers that die and restart: no score is
lost or wrong, and no failure is cached as a score."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megatron_rl.config import ListenerSettings
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.tasks.lewis.listener_client import ImageFile, ListenerClient
from megatron_rl.tasks.lewis.listener_protocol import make_listener_score
from tests.support.fake_listener import FakeEngineHolder
from tests.support.listener_clients import ENCODED_PICTURES, expected_probabilities, listener_settings, serve_listener


def held(chosen: ListenerSettings, use: Callable[[ListenerClient], Awaitable[object]]) -> ListenerClient:
    client = ListenerClient(chosen)

    async def main() -> None:
        await client.start()
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(main())
    return client


def test_the_order_of_candidates_changes_nothing_but_the_order() -> None:
    """Two orders of the same candidates at once share one request, and a third order later is
    cached. Each result is in the order of its own candidates."""
    room = FakeEngineHolder(delay_s=0.05)

    async def use(client: ListenerClient) -> None:
        orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
        first = await asyncio.gather(*(client.score_images([ENCODED_PICTURES[index] for index in order], "This?") for order in orders[:2]))
        answers = [*first, await client.score_images([ENCODED_PICTURES[index] for index in orders[2]], "This?")]
        for order, answer in zip(orders, answers, strict=True):
            assert answer.yes_probabilities == pytest.approx(expected_probabilities(order, "This?"))
            assert order[answer.predicted_index] == max((0, 1, 2), key=lambda index: expected_probabilities((index,), "This?"))

    with serve_listener(room) as url:
        client = held(listener_settings(url), use)
    assert client.endpoints.requests == 1 and client.cache_hits == 2 and len(room.requests) == 3


def test_descriptions_travel_in_chunks_and_pictures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten concurrent descriptions of the same images, with four per request, are sent in three
    requests. Images are sent once."""
    bodies: list[int] = []
    post = ListenerClient._post

    async def watched(self: ListenerClient, endpoint: object, chunk: list, *, known_hashes: set[str]) -> object:
        bodies.append(len(chunk))
        return await post(self, endpoint, chunk, known_hashes=known_hashes)

    monkeypatch.setattr(ListenerClient, "_post", watched)

    async def use(client: ListenerClient) -> None:
        answers = await asyncio.gather(*(client.score_images(ENCODED_PICTURES[:3], f"Is it {number}?") for number in range(10)))
        for number, answer in enumerate(answers):
            assert answer.yes_probabilities == pytest.approx(expected_probabilities((0, 1, 2), f"Is it {number}?"))
        assert sorted(bodies) == [2, 4, 4]
        sent = client._sent_hashes[url]
        assert sent == {shown.sha256 for shown in ENCODED_PICTURES[:3]}

    with serve_listener(FakeEngineHolder()) as url:
        held(listener_settings(url, chunk_size=4), use)


def seconds_of(chosen: ListenerSettings, fault: str) -> tuple[float, ListenerClient]:
    """Return the seconds after which a question fails with this fault, and the client."""
    took: list[float] = []

    async def use(client: ListenerClient) -> None:
        began = time.monotonic()
        with pytest.raises(InfraError, match=fault):
            await client.score_images(ENCODED_PICTURES[:2], "This?")
        took.append(time.monotonic() - began)

    client = held(chosen, use)
    return took[0], client


def test_a_timeout_tries_and_rests_are_those_that_are_set() -> None:
    """LISTENER_TIMEOUT, LISTENER_MAX_RETRIES and LISTENER_BACKOFF_FACTOR: a response after 1 s
    exceeds a timeout of 0.2 s, and there are as many requests as attempts. Backoffs of 0.4 and 0.8
    s, each shortened by at most a half, take at least 0.6 s."""
    with serve_listener(FakeEngineHolder(delay_s=1.0)) as url:
        assert seconds_of(listener_settings(url, timeout_s=0.2, max_attempts=1), "TimeoutError")[0] < 1.0
        held(listener_settings(url, timeout_s=20.0, max_attempts=1), lambda client: client.score_images(ENCODED_PICTURES[:2], "This?"))
    with serve_listener(FakeEngineHolder(logprobs_fn=lambda p: [float("nan")] * 3)) as url:
        for tries in (1, 4):
            assert (
                seconds_of(listener_settings(url, max_attempts=tries), f"failed after {tries} of {tries} attempts")[1].endpoints.requests
                == tries
            )
        assert seconds_of(listener_settings(url, max_attempts=3, backoff_s=0.4, outage_timeout_s=60.0), "no finite logprob")[0] >= 0.6


def test_a_request_waits_for_others_as_long_as_is_set() -> None:
    """LISTENER_CHUNK_DELAY: a question that comes 0.1 s later shares the request of the first one
    if requests wait for a second."""

    async def use(client: ListenerClient) -> None:
        first = asyncio.create_task(client.score_images(ENCODED_PICTURES[:2], "a?"))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, client.score_images(ENCODED_PICTURES[:2], "b?"))

    with serve_listener(FakeEngineHolder()) as url:
        assert [held(listener_settings(url, chunk_delay_s=delay), use).endpoints.requests for delay in (1.0, 0.0)] == [1, 2]


def test_a_listener_that_forgot_is_sent_the_pictures_again() -> None:
    """A listener that no longer has the images receives them again. Its cache has room for two of
    four images, which alternate."""

    async def use(client: ListenerClient) -> None:
        for number in range(3):
            answer = await client.score_images(ENCODED_PICTURES[:2], f"Is it {number}?")
            assert answer.yes_probabilities == pytest.approx(expected_probabilities((0, 1), f"Is it {number}?"))
            await client.score_images(ENCODED_PICTURES[2:4], f"Is it {number}?")

    with serve_listener(FakeEngineHolder(), cache_bytes=len(ENCODED_PICTURES[0].content) * 5 // 2) as url:
        held(listener_settings(url, chunk_size=1), use)


def test_who_sees_the_same_disk_sends_paths(tmp_path: Path) -> None:
    """With send=paths, the listener reads the files below its root and receives none. Sending them
    as files would exceed its body limit."""
    shown = []
    for index in range(3):
        path = tmp_path / f"{index}.png"
        path.write_bytes(ENCODED_PICTURES[index].content)
        shown.append(ImageFile(path.read_bytes(), str(path)))

    async def use(client: ListenerClient) -> None:
        assert (await client.score_images(shown, "This?")).yes_probabilities == pytest.approx(expected_probabilities((0, 1, 2), "This?"))

    with serve_listener(FakeEngineHolder(), tmp_path, body_bytes=1500) as url:
        held(listener_settings(url, send="paths"), use)
        with pytest.raises(PermanentInfraError, match="413"):
            held(listener_settings(url, send="files"), use)


def test_one_bad_question_takes_no_other_with_it() -> None:
    """An invalid image in a chunk of four questions fails only its own question. The three others
    are answered."""

    async def use(client: ListenerClient) -> None:
        bad = [ENCODED_PICTURES[0], ImageFile(b"no picture")]
        asked = [
            client.score_images(ENCODED_PICTURES[:2], "a?"),
            client.score_images(bad, "b?"),
            client.score_images(ENCODED_PICTURES[2:4], "c?"),
            client.score_images(ENCODED_PICTURES[4:6], "d?"),
        ]
        one, two, three, four = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(two, PermanentInfraError) and "HTTP 422" in str(two) and "candidate 1" in str(two)
        for answer, indices, question in ((one, (0, 1), "a?"), (three, (2, 3), "c?"), (four, (4, 5), "d?")):
            assert answer.yes_probabilities == pytest.approx(expected_probabilities(indices, question))

    with serve_listener(FakeEngineHolder()) as url:
        held(listener_settings(url, chunk_size=4), use)


def test_a_failure_is_a_fault_and_is_not_kept(tmp_path: Path) -> None:
    """If the engine returns no number, a question raises an InfraError after all attempts. Once the
    engine works again, the same question is answered, so the failure was not cached."""
    room = FakeEngineHolder(logprobs_fn=lambda p: [float("nan")] * 3)
    cache = tmp_path / "heard.sqlite"

    async def use(client: ListenerClient) -> None:
        with pytest.raises(
            InfraError, match=r"^listener: failed after 3 of 3 attempts; the last failure: http.* HTTP 503: .*no finite logprob"
        ):
            await client.score_images(ENCODED_PICTURES[:2], "This?")
        room.logprobs_fn = FakeEngineHolder.logprobs_fn
        client.endpoints.endpoints[0].backoff_until = 0
        assert (await client.score_images(ENCODED_PICTURES[:2], "This?")).yes_probabilities == pytest.approx(
            expected_probabilities((0, 1), "This?")
        )

    with serve_listener(room) as url:
        held(listener_settings(url, cache=str(cache), outage_timeout_s=5), use)


def test_what_was_heard_is_kept_between_runs_by_version(tmp_path: Path) -> None:
    """Scores are cached in a file by version: a second client makes no request, a client of another
    listener does. The cache in memory evicts the least recently used score, the file does not."""
    cache = str(tmp_path / "heard.sqlite")

    async def use(client: ListenerClient) -> None:
        for indices in ((0, 1), (2, 3), (0, 1)):
            answer = await client.score_images([ENCODED_PICTURES[index] for index in indices], "This?")
            assert answer == make_listener_score(answer.yes_logprobs) and answer.yes_probabilities == pytest.approx(
                expected_probabilities(indices, "This?")
            )

    with serve_listener(FakeEngineHolder()) as url:
        clients = [
            held(listener_settings(url, **more), use)
            for more in ({"cache": cache}, {"cache": cache, "cache_entries": 1}, {"cache_entries": 2})
        ]
        assert [client.endpoints.requests for client in clients] == [2, 0, 3]
    with serve_listener(FakeEngineHolder(version="two")) as url:
        assert held(listener_settings(url, cache=cache), use).endpoints.requests == 2


def test_listeners_must_be_the_same_one() -> None:
    """All listeners must have the same version, at the start and after one of them restarts. Scores
    of another version are rejected."""

    async def nothing(client: ListenerClient) -> None: ...

    with (
        serve_listener(FakeEngineHolder()) as one,
        serve_listener(FakeEngineHolder(version="two")) as two,
        pytest.raises(InfraError, match="the listeners have different versions"),
    ):
        held(listener_settings(one, two), nothing)
    room = FakeEngineHolder()

    async def use(client: ListenerClient) -> None:
        room.version = "two"
        with pytest.raises(InfraError, match="is a different listener: its version is two instead of one"):
            await client.score_images(ENCODED_PICTURES[:2], "This?")

    with serve_listener(room) as url:
        held(listener_settings(url), use)


def test_no_listener_is_told_at_the_start(tmp_path: Path) -> None:
    """An unreachable listener, a missing token and a failed engine fail the start, each with its
    own error."""

    async def nothing(client: ListenerClient) -> None: ...

    with pytest.raises(InfraError, match=r"^task.listener.urls=\['http://127.0.0.1:9'\]: no listener is available .*start one, or correct"):
        held(listener_settings("http://127.0.0.1:9"), nothing)
    word = tmp_path / "word"
    word.write_text("a-word-of-many-letters\n")
    with serve_listener(FakeEngineHolder(), token="a-word-of-many-letters") as url:
        with pytest.raises(InfraError, match="requires a valid token; set task.listener.token_file=FILE"):
            held(listener_settings(url), nothing)
        held(listener_settings(url, token_file=str(word)), nothing)
    with (
        serve_listener(FakeEngineHolder(is_healthy=False)) as url,
        pytest.raises(InfraError, match="EndpointError: HTTP 503: .*the engine has failed; restart"),
    ):
        held(listener_settings(url), nothing)


@pytest.mark.parametrize("uses", [False, True])
def test_a_listener_on_this_machine_needs_no_proxy(uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener on this machine is reached although HTTP_PROXY points to a closed port.
    tests/clients/test_proxies.py tests listeners elsewhere."""

    async def nothing(client: ListenerClient) -> None: ...

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serve_listener(FakeEngineHolder()) as url:
        assert held(listener_settings(url, proxy=uses), nothing).endpoints.failures == 0


def test_a_file_of_nonsense_is_named(tmp_path: Path) -> None:
    """If the cache file contains a log-probability above 0, the rollout fails permanently, with an
    error that advises removing the file."""

    cache = tmp_path / "heard.sqlite"

    async def ask(client: ListenerClient) -> None:
        await client.score_images(ENCODED_PICTURES[:2], "This?")

    with serve_listener(FakeEngineHolder()) as url:
        held(listener_settings(url, cache=str(cache)), ask)
        with sqlite3.connect(cache) as file:
            file.execute("UPDATE verdicts SET verdict = 0.5")
        with pytest.raises(PermanentInfraError, match="not a log probability; remove the file"):
            held(listener_settings(url, cache=str(cache)), ask)
