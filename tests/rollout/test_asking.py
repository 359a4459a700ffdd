"""What is said to a server and believed of its answers, with an HTTP server in the place of vLLM's; and stop texts that are cut in two."""

import asyncio
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from PIL import Image as pil

from megatron_rl.rollout.asking import ABORTED, Asking, Part, Turn, stop_place
from megatron_rl.rollout.engine import Completion, Sampling
from megatron_rl.rollout.server import HOW, Server
from megatron_rl.servers import ServerFault
from megatron_rl.types import Image
from tests.support.json_server import address_of, serve, stop

WANTED = {"model": "abc", "tokenizer": "def", "weight transfer": "megatron_rl"}
NOTHING = Completion([], [], finished=False, versions=[])
Answers = dict[str, tuple[int, object]]


@pytest.fixture
def stand_in() -> Iterator[tuple[str, Answers, list]]:
    """Its address, what it answers by path, and what it was asked."""
    answers: Answers = {}
    asked: list[tuple[str, dict]] = []

    def answer(path: str, body: dict) -> tuple[int, object]:
        asked.append((path, body))
        return answers.get(path, (404, {"detail": "Not Found"}))

    server = serve(answer)
    yield address_of(server), answers, asked
    stop(server)


def natures(**changes: str) -> tuple[int, object]:
    return 200, {"results": [WANTED | {name.replace("_", " "): value for name, value in changes.items()}]}


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ({}, "no server of vLLM answers there (/version: 404"),
        ({"/version": (200, {"release": "2"})}, "no server of vLLM answers there"),
        ({"/version": (200, b"<html>Welcome to nginx</html>")}, "no server of vLLM answers there"),
        ({"/version": (200, {"version": "0.32.0"}), "/collective_rpc": (200, b"<html>")}, "is no engine of a run"),
        ({"/version": (200, {"version": "0.31.1"})}, "is a server of vLLM 0.31.1, this is for 0.32.0; start one of that version"),
        ({"/version": (200, {"version": "0.32.0"})}, "is no engine of a run (/collective_rpc: 404"),
        ({"/version": (200, {"version": "0.32.0"}), "/collective_rpc": (500, {"error": "no rl_nature"})}, "is no engine of a run"),
        ({"/version": (200, {"version": "0.32.0+cpu"}), "/collective_rpc": natures(model="xyz")}, f"has model xyz, this run abc; {HOW}"),
        ({"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures(tokenizer="x")}, f"has tokenizer x, this run def; {HOW}"),
        (
            {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures(weight_transfer="none")},
            f"has weight transfer none, this run megatron_rl; {HOW}",
        ),
    ],
)
def test_what_is_no_engine_of_this_run_is_told_in_a_line(stand_in: tuple, answers: Answers, line: str) -> None:
    url, answered, _ = stand_in
    answered |= answers
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        Server(url).check(WANTED)
    assert str(error.value).startswith(f"engine.urls={url}: ") and "\n" not in str(error.value)


def test_where_nobody_listens(stand_in: tuple) -> None:
    url, answered, _ = stand_in
    with pytest.raises(ValueError, match=r"^engine.urls=http://127.0.0.1:1: no server of vLLM answers there \(/version: ConnectError"):
        Server("http://127.0.0.1:1").check(WANTED)
    answered |= {"/version": (200, {"version": "0.32.0"}), "/collective_rpc": natures()}
    Server(url + "/").check(WANTED)


def reply(**changes: object) -> dict[str, object]:
    choice = {
        "finish_reason": "length", "token_ids": [8, 9], "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -0.5}]},
        "weight_versions": [{"version": "mine.3", "start": 0, "end": 2}],
    }  # fmt: skip
    return {"prompt_token_ids": [5, 6, 7], "choices": [choice | changes]}


def ask(url: str, *, said: Completion = NOTHING) -> Part:
    async def main() -> Part:
        async with httpx.AsyncClient(trust_env=False) as http:
            asking = Asking(http=http, image_token_id=99, stop_ids=[2])
            turn = Turn([5, 6], [], Sampling(4, 0.5, seed=7, stop=("x",)))
            return await asking.ask(Server(url), turn, said, label="mine.3", salt="mine.3")

    return asyncio.run(main())


def test_the_rest_of_a_turn_is_asked_for(stand_in: tuple) -> None:
    url, answers, asked = stand_in
    answers["/inference/v1/generate"] = 200, reply()
    part = ask(url, said=Completion([7], [-0.1], finished=False, versions=[2]))
    assert (part.token_ids, part.logprobs, part.reason) == ([8, 9], [-1.5, -0.5], "length")
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
    """Tokens of other weights than those that were asked for, too: it has come back, or serves somebody else."""
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = answer
    with pytest.raises(ServerFault):
        ask(url, said=Completion([7], [-0.1], finished=False, versions=[2]))


def test_what_vllm_does_not_take_is_the_askers_fault(stand_in: tuple) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 400, {"error": {"message": "temperature must be at most 2"}}
    with pytest.raises(ValueError, match="temperature must be at most 2"):
        ask(url)


def test_ids_that_were_expanded_otherwise_stop_the_run(stand_in: tuple) -> None:
    url, answers, _ = stand_in
    answers["/inference/v1/generate"] = 200, reply() | {"prompt_token_ids": [5, 6, 6, 7]}
    with pytest.raises(RuntimeError, match="the engine read 4 tokens, and was sent 3"):
        ask(url, said=Completion([7], [-0.1], finished=False, versions=[2]))


def shown(key: str) -> Image:
    return Image(pil.new("RGB", (28, 28)), None, grid=(1, 2, 2), key=key, merge=2)


def test_who_waits_for_a_picture_brings_it_where_the_first_one_failed(stand_in: tuple) -> None:
    """Given up, answered with 500, and answered: of three who show it the third is asked for one token; then keys alone go."""
    url, answers, asked = stand_in
    whole = {"prompt_token_ids": [5, 99, 7]}
    answers["/inference/v1/generate"] = 500, {"error": "EngineCore encountered an issue"}
    server = Server(url)

    async def main() -> list[Part | BaseException]:
        async with httpx.AsyncClient(trust_env=False) as http:
            asking = Asking(http=http, image_token_id=99, stop_ids=[2])
            turns = [Turn([5, 99, 7], [shown("a")], Sampling(4, 0.5, seed=seed)) for seed in range(4)]
            asks = [asyncio.create_task(asking.ask(server, turn, NOTHING, label="mine.3", salt="mine.3")) for turn in turns]
            await asyncio.sleep(0)
            asks[0].cancel()
            await asyncio.wait([asks[1]])
            answers["/inference/v1/generate"] = 200, reply() | whole
            return await asyncio.gather(*asks, return_exceptions=True)

    given_up, failed, brought, told = asyncio.run(main())
    assert isinstance(given_up, asyncio.CancelledError) and isinstance(failed, ServerFault)
    assert (brought.reason, told.reason) == (ABORTED, "length"), "one was cut short by us"
    bodies = [(body["sampling_params"]["extra_args"]["megatron_rl_seed"], body) for _, body in asked]
    last = {seed: body for seed, body in bodies}
    assert last[2]["sampling_params"]["max_tokens"] == 1 and last[2]["content_parts"][0]["url"].startswith("data:image/png;base64,")
    assert last[3]["sampling_params"]["max_tokens"] == 4 and last[3]["content_parts"] == [{"type": "image_url", "url": None, "uuid": "a"}]
    assert not server.coming and server.known == {"a"}


def test_a_server_that_forgets_every_picture_is_at_fault(stand_in: tuple) -> None:
    url, answers, asked = stand_in
    answers["/inference/v1/generate"] = 400, {"error": {"message": "data is not provided and the item is not cached"}}

    async def main() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            asking = Asking(http=http, image_token_id=99, stop_ids=[2])
            await asking.ask(Server(url), Turn([5, 99, 7], [shown("a")], Sampling(4, 0.5, seed=0)), NOTHING, label="mine.3", salt="mine.3")

    with pytest.raises(ServerFault, match="has forgotten a picture 3 times"):
        asyncio.run(main())
    assert len(asked) == 3


def letters(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


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
    assert stop_place([ord(letter) for letter in before + after], len(before), stop, decode) == place
