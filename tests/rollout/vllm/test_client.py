"""Tests the requests to a server and the validation of its replies, with a stand-in HTTP server,
and stop texts that span two requests.
"""

import asyncio
import base64
import io
import pickle
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image as pil

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.vllm.client import GenerateClient, GenerateRequest, PartialCompletion, find_stop
from megatron_rl.rollout.vllm.server_api import CONNECTION_HINT, VllmServer
from megatron_rl.types import Image, SpecialTokens
from megatron_rl_sandbox.bounded_http import BoundedClient
from tests.support.json_server import server_url, start_server, stop_server

WANTED = {"model": "abc", "tokenizer": "def", "weight transfer": "megatron_rl"}
NOTHING = Completion([], [], is_stopped=False, weight_versions=[])
Answers = dict[str, tuple[int, object]]


@pytest.fixture
def stand_in() -> Iterator[tuple[str, Answers, list]]:
    """Return the URL of a server, its reply per path, and the requests that it has received."""
    answers: Answers = {}
    asked: list[tuple[str, dict]] = []

    def answer(path: str, body: dict) -> tuple[int, object]:
        asked.append((path, body))
        return answers.get(path, (404, {"detail": "Not Found"}))

    server = start_server(answer)
    yield server_url(server), answers, asked
    stop_server(server)


def natures(**changes: str) -> tuple[int, object]:
    return 200, {"results": [WANTED | {name.replace("_", " "): value for name, value in changes.items()}]}


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ({}, "no vLLM server responds at this URL (/version: 404"),
        ({"/version": (200, {"release": "2"})}, "no vLLM server responds at this URL"),
        ({"/version": (200, b"<html>Welcome to nginx</html>")}, "no vLLM server responds at this URL"),
        ({"/version": (200, {"version": "0.32.0"}), "/collective_rpc": (200, b"<html>")}, "cannot be used as a rollout engine"),
        ({"/version": (200, {"version": "0.31.1"})}, "runs vLLM 0.31.1, but 0.32.0 is required; start a server of that version"),
        ({"/version": (200, {"version": "0.32.0"})}, "cannot be used as a rollout engine (/collective_rpc: 404"),
        (
            {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": (500, {"error": "no rl_fingerprint"})},
            "cannot be used as a rollout engine",
        ),
        (
            {"/version": (200, {"version": "0.32.0+cpu"}), "/collective_rpc": natures(model="xyz")},
            f"has model xyz, but this run has abc; {CONNECTION_HINT}",
        ),
        (
            {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures(tokenizer="x")},
            f"has tokenizer x, but this run has def; {CONNECTION_HINT}",
        ),
        (
            {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures(weight_transfer="none")},
            f"has weight transfer none, but this run has megatron_rl; {CONNECTION_HINT}",
        ),
    ],
)
def test_what_is_no_engine_of_this_run_is_told_in_a_line(stand_in: tuple, answers: Answers, line: str) -> None:
    url, answered, _ = stand_in
    answered |= answers
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        VllmServer(url).check(WANTED)
    assert str(error.value).startswith(f"engine.urls={url}: ") and "\n" not in str(error.value)


def test_where_nobody_listens(stand_in: tuple) -> None:
    url, answered, _ = stand_in
    with pytest.raises(ValueError, match=r"^engine.urls=http://127.0.0.1:1: no vLLM server responds at this URL \(/version: ConnectError"):
        VllmServer("http://127.0.0.1:1").check(WANTED)
    answered |= {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures()}
    VllmServer(url + "/").check(WANTED)


def reply(**changes: object) -> dict[str, object]:
    choice = {
        "finish_reason": "length", "token_ids": [8, 9], "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -0.5}]},
        "weight_versions": [{"version": "mine.3", "start": 0, "end": 2}],
    }  # fmt: skip
    return {"prompt_token_ids": [5, 6, 7], "choices": [choice | changes]}


def ask(url: str, *, said: Completion = NOTHING) -> PartialCompletion:
    async def main() -> PartialCompletion:
        async with BoundedClient() as http:
            asking = GenerateClient(http=http, special_tokens=SpecialTokens(image_token_id=99, stop_ids=[2]), limit_s=30.0, connect_s=30.0)
            turn = GenerateRequest([5, 6], [], SamplingSettings(4, 0.5, seed=7, stop=("x",)))
            return await asking.generate(VllmServer(url), turn, said, label="mine.3", salt="mine.3")

    return asyncio.run(main())


def test_the_rest_of_a_turn_is_asked_for(stand_in: tuple) -> None:
    url, answers, asked = stand_in
    answers["/inference/v1/generate"] = 200, reply()
    part = ask(url, said=Completion([7], [-0.1], is_stopped=False, weight_versions=[2]))
    assert (part.token_ids, part.logprobs, part.finish_reason) == ([8, 9], [-1.5, -0.5], "length")
    ((_, body),) = asked
    assert body["token_ids"] == [5, 6, 7] and body["cache_salt"] == "mine.3" and body["content_parts"] is None
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop"]) == (3, 0.5, ["x"])
    assert sampling["extra_args"] == {"megatron_rl_seed": 7, "megatron_rl_first": 1} and sampling["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    "answer",
    [
        (500, {"error": "EngineCore encountered an issue"}),
        (200, b"not JSON"),
        (200, {"choices": []}),
        (200, reply(weight_versions=[{"version": "mine.2", "start": 0, "end": 2}])),
        (200, reply(weight_versions=[{"version": "default", "start": 0, "end": 2}])),
        (200, reply(weight_versions=[{"version": "theirs.3", "start": 0, "end": 2}])),
        (200, reply(weight_versions=[{"version": "mine.3", "start": 0, "end": 1}])),
        (200, reply(weight_versions=None)),
        (200, reply(logprobs={"content": [{"logprob": -1.5}]})),
        (200, reply(logprobs=None)),
    ],
)
def test_an_answer_that_cannot_be_believed_is_the_servers_fault(stand_in: tuple, answer: tuple[int, object]) -> None:
    """Tokens of weights other than the requested ones are refused, too: the server has been
    restarted, or serves another run.
    """
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = answer
    with pytest.raises(EndpointError):
        ask(url, said=Completion([7], [-0.1], is_stopped=False, weight_versions=[2]))


def test_what_vllm_does_not_take_is_the_askers_fault(stand_in: tuple) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 400, {"error": {"message": "temperature must be at most 2"}}
    with pytest.raises(ValueError, match="temperature must be at most 2"):
        ask(url)


@pytest.mark.known_failure("placeholders-expanded-otherwise")
def test_ids_that_were_expanded_otherwise_stop_the_run(stand_in: tuple) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 200, reply() | {"prompt_token_ids": [5, 6, 6, 7]}
    with pytest.raises(RuntimeError, match="the engine received 4 tokens, but 3 were sent"):
        ask(url, said=Completion([7], [-0.1], is_stopped=False, weight_versions=[2]))
    for other in ([5, 6, 8], [5, 7, 6], [4, 6, 7]):  # a different tokenizer or processor
        answers["/inference/v1/generate"] = 200, reply() | {"prompt_token_ids": other}
        with pytest.raises(RuntimeError):
            ask(url, said=Completion([7], [-0.1], is_stopped=False, weight_versions=[2]))


def shown(key: str) -> Image:
    return Image(pil.new("RGB", (28, 28)), None, grid=(1, 2, 2), key=key, merge=2)


class Album:
    """Server that returns the tokens 7, 8, 9 ... for every request and caches the images that it
    receives.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[str]]] = []
        """For each request: the turn's seed, the number of requested tokens, and the key of each
        image, in capitals if the image itself was sent.
        """
        self.known: set[str] = set()
        self.faults: list[int] = []
        """HTTP status codes of the next replies, which are errors."""
        self.forgets = False
        """If True, the server drops all images after each reply."""

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        parts, sampling = body["content_parts"] or [], body["sampling_params"]
        told = [part["uuid"].upper() if part["url"] else part["uuid"] for part in parts]
        self.asked.append((sampling["extra_args"]["megatron_rl_seed"], sampling["max_tokens"], told))
        if self.faults:
            return self.faults.pop(0), {"error": "EngineCore encountered an issue"}
        self.known |= {part["uuid"] for part in parts if part["url"]}
        if not {part["uuid"] for part in parts} <= self.known:
            return 400, {"error": {"message": "data is not provided and the item is not cached"}}
        if self.forgets:
            self.known.clear()
        num = sampling["max_tokens"]
        return 200, reply(
            token_ids=[7 + sampling["extra_args"]["megatron_rl_first"] + place for place in range(num)],
            logprobs={"content": [{"logprob": -1.0}] * num}, weight_versions=[{"version": "mine.3", "start": 0, "end": num}],
        ) | {"prompt_token_ids": body["token_ids"]}  # fmt: skip


@pytest.fixture
def album() -> Iterator[tuple[VllmServer, Album]]:
    album = Album()
    served = start_server(album.answer)
    yield VllmServer(server_url(served)), album
    stop_server(served)


def turn_of(seed: int, keys: str, *, most: int = 4) -> GenerateRequest:
    ids = [id for _ in keys for id in (99, 5)]
    return GenerateRequest(ids, [shown(key) for key in keys], SamplingSettings(most, 0.5, seed=seed))


def asking_all(
    server: VllmServer, turns: list[GenerateRequest], *, cancelled: int | None = None
) -> list[PartialCompletion | BaseException]:
    """Start all requests together, in this order, and return their results or exceptions."""

    async def main() -> list[PartialCompletion | BaseException]:
        async with BoundedClient() as http:
            asking = GenerateClient(http=http, special_tokens=SpecialTokens(image_token_id=99, stop_ids=[2]), limit_s=30.0, connect_s=30.0)
            asks = [asyncio.create_task(asking.generate(server, turn, NOTHING, label="mine.3", salt="mine.3")) for turn in turns]
            await asyncio.sleep(0)
            if cancelled is not None:
                asks[cancelled].cancel()
            return await asyncio.gather(*asks, return_exceptions=True)

    return asyncio.run(main())


def test_a_picture_is_sent_once_by_turns_that_begin_together(album: tuple[VllmServer, Album]) -> None:
    """Turns that start together send each image once. The turn that sends the image requests one
    token first and then the rest. A turn with two images waits for one of them and sends the
    other.
    """
    server, seen = album
    parts = asking_all(server, [turn_of(0, "a"), turn_of(1, "a"), turn_of(2, "ab"), turn_of(3, "a", most=1)])
    assert [(part.token_ids, part.finish_reason, part.num_from_first_request) for part in parts] == [
        ([7, 8, 9, 10], "length", 1), ([7, 8, 9, 10], "length", 0), ([7, 8, 9, 10], "length", 1), ([7], "length", 0),
    ]  # fmt: skip
    sent = [key for _, _, keys in seen.asked for key in keys if key.isupper()]
    assert sorted(sent) == ["A", "B"] and not server.pending_images
    assert [(num, keys) for seed, num, keys in seen.asked if seed == 0] == [(1, ["A"]), (3, ["a"])]
    assert [(num, keys) for seed, num, keys in seen.asked if seed == 1] == [(4, ["a"])]


def test_a_turn_of_one_token_is_asked_for_once(album: tuple[VllmServer, Album]) -> None:
    """A turn of one token takes a single request. The rest of a partial turn is sent with its
    images in one request, because its server may be another one.
    """
    server, seen = album
    (part,) = asking_all(server, [turn_of(0, "a", most=1)])
    assert (part.token_ids, part.finish_reason, part.num_from_first_request) == ([7], "length", 0) and seen.asked == [(0, 1, ["A"])]

    async def rest() -> PartialCompletion:
        async with BoundedClient() as http:
            asking = GenerateClient(http=http, special_tokens=SpecialTokens(image_token_id=99, stop_ids=[2]), limit_s=30.0, connect_s=30.0)
            said = Completion([7], [-1.0], is_stopped=False, weight_versions=[2])
            return await asking.generate(server, turn_of(1, "b"), said, label="mine.3", salt="mine.3")

    assert asyncio.run(rest()).token_ids == [8, 9, 10] and seen.asked[1:] == [(1, 3, ["B"])]


def test_who_waits_for_a_picture_brings_it_where_the_first_was_given_up(album: tuple[VllmServer, Album]) -> None:
    server, seen = album
    given_up, brought, told = asking_all(server, [turn_of(0, "a"), turn_of(1, "a"), turn_of(2, "a")], cancelled=0)
    assert isinstance(given_up, asyncio.CancelledError) and (brought.num_from_first_request, told.num_from_first_request) == (1, 0)
    assert [keys for seed, _, keys in seen.asked if seed] == [["A"], ["a"], ["a"]] and not server.pending_images


def test_who_waits_for_a_picture_that_fails_to_come_goes_elsewhere(album: tuple[VllmServer, Album]) -> None:
    """If the request that sends an image fails, all turns that wait for the image fail at once. The
    server is asked only once and then backs off.
    """
    server, seen = album
    seen.faults = [500]
    faults = asking_all(server, [turn_of(seed, "a") for seed in range(3)])
    assert [type(fault) for fault in faults] == [EndpointError] * 3 and len(seen.asked) == 1 and server.endpoint.backoff_until > 0


def test_a_picture_that_was_forgotten_is_sent_again(album: tuple[VllmServer, Album]) -> None:
    """If the server drops its images, they are sent again with the whole next request, both for the
    rest of the same turn and for the next turn. Each costs at most one extra request.
    """
    server, seen = album
    seen.forgets = True
    parts = [part for seed in range(2) for part in asking_all(server, [turn_of(seed, "a")])]
    assert [part.token_ids for part in parts] == [[7, 8, 9, 10]] * 2
    assert [(num, keys) for _, num, keys in seen.asked] == [(1, ["A"]), (3, ["a"]), (3, ["A"]), (4, ["a"]), (4, ["A"])]


def test_more_tokens_than_were_asked_for_are_not_believed(stand_in: tuple) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 200, reply() | {"prompt_token_ids": [5, 6, 7, 7, 7]}
    with pytest.raises(EndpointError, match="returned 2 tokens, but at most 1 were requested"):
        ask(url, said=Completion([7, 7, 7], [-0.1] * 3, is_stopped=False, weight_versions=[2] * 3))


def letters(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.mark.known_failure("stop-text-missed")
@pytest.mark.parametrize(
    ("before", "after", "stop", "place"),
    [
        ("ab<st", "op>cd", ("<stop>",), 8),
        ("ab", "<stop>cd", ("<stop>",), 8),
        ("ab<sto", "x", ("<stop>",), None),
        ("a", "bcabc", ("zz", "bc"), 3),
        ("b", "c", ("zz", "bc"), 2),
    ],
)
@pytest.mark.parametrize("decode", [letters])
def test_a_stop_text_that_was_cut_in_two(before: str, after: str, stop: tuple[str, ...], place: int | None, decode: Callable) -> None:
    assert find_stop([ord(letter) for letter in before + after], len(before), stop, decode) == place


@pytest.mark.parametrize("text", ["\u505c\u6b62\u8bf4\u8bdd", "\U0001f6d1" * 5, "</\u00e9>"])
def test_a_stop_text_of_many_bytes_is_found_wherever_it_was_cut(text: str) -> None:
    """Each token is one byte of the text, with other words before and after it. The text is found
    wherever the two requests split it, from its first byte to its last.
    """

    def decode(token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    ahead, whole = b"words before it, ", text.encode()
    token_ids = [*ahead, *whole, *b" and behind"]
    for cut in range(1, len(whole)):
        assert find_stop(token_ids, len(ahead) + cut, (text,), decode) == len(ahead) + len(whole)
    assert find_stop([*ahead, *whole[:-1], *b" and behind"], len(ahead) + 2, (text,), decode) is None


def as_text(experts: np.ndarray) -> str:
    """Encode experts as vLLM does."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def test_experts_of_the_tokens_that_lack_them_are_asked_for(stand_in: tuple) -> None:
    """The rest of a turn returns the experts from the first token without them to the last but
    one.
    """
    url, answers, asked = stand_in
    experts = np.arange(16, dtype=np.uint8).reshape(2, 4, 2)
    answers["/inference/v1/generate"] = 200, reply(routed_experts=as_text(experts))
    said = Completion([7], [-0.1], is_stopped=False, weight_versions=[2], routed_experts=[b"12345678"] * 2)
    assert ask(url, said=said).routed_experts == [bytes(range(8)), bytes(range(8, 16))]
    assert asked[0][1]["sampling_params"]["routed_experts_prompt_start"] == 2


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (as_text(np.zeros((2, 4, 2), np.uint8)), "returned the experts of 2 tokens, expected 4"),
        (as_text(np.zeros((4, 8), np.uint8)), r"routed_experts: returned uint8 numbers of shape \(4, 8\)"),
        (as_text(np.zeros((4, 4, 2), np.float32)), "routed_experts: returned float32 numbers"),
        ("not base64!", "routed_experts: "),
        (base64.b64encode(pickle.dumps([1])).decode(), "routed_experts: "),
    ],
)
def test_experts_that_do_not_fit_are_a_fault_of_the_server(stand_in: tuple, given: str, line: str) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 200, reply(routed_experts=given)
    with pytest.raises(EndpointError, match=f"^{line}") as fault:
        ask(url, said=Completion([7], [-0.1], is_stopped=False, weight_versions=[2]))
    assert "\n" not in str(fault.value)
