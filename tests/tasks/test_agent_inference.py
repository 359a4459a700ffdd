"""Tests the endpoint of a trained policy with real agent processes, the real server and a scripted
engine. tests/e2e/test_agent_run.py tests it with the engine of a run."""

import asyncio
import base64
import io
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from PIL import Image as pil

from megatron_rl.config import ModelSettings
from megatron_rl.config.serve import ServeSettings
from megatron_rl.data.tool_calls import ParsedResponse
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.conversation import SequenceLimits
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.agent.chat_request import make_response_message, message_key
from megatron_rl.tasks.agent.chat_server import MAX_BODY_BYTES, ChatServer, OpenAccess
from megatron_rl.tasks.agent.inference import PolicyEndpoint
from megatron_rl.tasks.agent.launch import start_agent
from megatron_rl.tasks.agent.session_store import TURN_TOKENS, FoundSession, SessionStore
from megatron_rl.types import Image
from tests.support.agent_episodes import AGENT, SETTINGS, Counting, make_task, play_task

TOKEN = "t" * 20
MODES = ("tools", "choices", "stops", "branches", "linear", "streamed_calls")
CALLS = '<tool_call>{"arguments": {"x":1},"name":"add"}</tool_call> <tool_call> {"name": "add", "arguments": {"x": [2.0]}} </tool_call>'


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@dataclass
class Recording(Counting):
    """Engine that also records images and sampling settings, and fails after `num_good` responses."""

    pictures: list[list[str]] = field(default_factory=list)
    samplings: list[SamplingSettings] = field(default_factory=list)
    num_good: int = 1000

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.samplings.append(sampling)
        self.pictures.append([image.key for image in images])
        if len(self.samplings) > self.num_good:
            raise PermanentInfraError("the engine has failed: no memory")
        return await super().generate(token_ids, images, sampling)


@dataclass
class Served:
    """Running endpoint, its engine and the lines that it reported."""

    endpoint: PolicyEndpoint
    engine: Recording
    address: str
    lines: list[str]
    stops: list[bool]

    async def post(self, *messages: dict, key: str = TOKEN, **more: object) -> httpx.Response:
        body = {"model": "policy", "messages": list(messages) or [user("Hi")], **more}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return await client.post(f"{self.address}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    async def declare(self, size: int) -> httpx.Response:
        """Send the header of a request with a body of `size` bytes, and return the response."""
        url = httpx.URL(self.address)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        lines = ("POST /v1/chat/completions HTTP/1.1", f"Host: {url.host}", f"Authorization: Bearer {TOKEN}")
        more = ("Content-Type: application/json", f"Content-Length: {size}")
        writer.write("\r\n".join((*lines, *more, "", "")).encode())
        head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        writer.close()
        return httpx.Response(int(head.split()[1]), content=body)


def serve(
    renderer: Renderer, act: Callable[[Served], Awaitable[None]], *,
    texts: tuple[str, ...] = (), num_good: int = 1000, max_tokens: int = 4000, max_requests: int = 256, **given: object,
) -> None:  # fmt: skip
    """Start the endpoint, run `act` with it and close it."""

    async def run() -> None:
        settings = ServeSettings(**{"run": Path("run"), "temperature": 1.0, "model_names": ("gpt-4o",), **given})
        engine, lines, stops = Recording(renderer, texts, num_good=num_good), [], []
        endpoint = PolicyEndpoint(
            engine, renderer, settings, limits=SequenceLimits(max_sequence_tokens=max_tokens, max_images=8), max_new_tokens=8,
            report=lines.append, stop=lambda: stops.append(True),
        )  # fmt: skip
        access = OpenAccess(
            ask=endpoint.ask, token=TOKEN, models=("policy", *settings.model_names), max_requests=max_requests, max_images=8,
            ignore_setting="--ignore {name}",
        )  # fmt: skip
        server = ChatServer(access=access)
        await server.start()
        try:
            await act(Served(endpoint, engine, server.base_url, lines, stops))
        finally:
            await server.close()

    asyncio.run(run())


def user(*parts: str | pil.Image) -> dict:
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        encoded = io.BytesIO()
        part.save(encoded, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": content}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_an_agent_has_the_prompts_of_training(renderer: Renderer, tmp_path: Path) -> None:
    """The same agent with pictures, sampled tool calls, choices, stop strings, branches and new
    prompts: the engine receives the same token ids and images, in the same order, as in an episode."""
    texts = (CALLS, *(f"r{number}" for number in range(1, 8)), "go()</code>")
    task = make_task(tmp_path, "", command=[sys.executable, str(AGENT), *MODES])
    trained = Recording(renderer, texts)
    rollout = play_task(task, trained, settings=replace(SETTINGS, max_turns=40))
    assert "continued" in rollout.reason and "branched" in rollout.reason, rollout.reason

    async def act(served: Served) -> None:
        (example,) = task.examples("train")
        agent = await start_agent(task.launch, example, base_url=served.address, keys=[TOKEN], seed=0)
        ended = await agent.wait()
        await agent.stop()
        assert not ended.is_failed, ended.description
        assert served.engine.contexts == trained.contexts
        assert (served.engine.stops, served.engine.pictures) == (trained.stops, trained.pictures)
        assert ended.result == rollout.turns[-1].tool_call.text
        assert served.endpoint.counts.keys() == {"new", "continued"}

    serve(renderer, act, texts=texts)
    assert len(trained.contexts) > 15


def test_a_dropped_session_is_rendered_from_its_messages(renderer: Renderer) -> None:
    """The response "the" is sampled as three tokens, where the tokenizer has one."""
    red = pil.new("RGB", (60, 60), "red")

    async def act(served: Served) -> None:
        pieces = [*(renderer.tokenizer(letter)["input_ids"][0] for letter in "the"), renderer.end_id]
        assert len(renderer.tokenizer("the")["input_ids"]) == 1

        async def generate(token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
            served.engine.contexts.append(list(token_ids))
            return Completion(pieces, [-0.5] * 4, is_stopped=True, weight_versions=[0] * 4)

        served.engine.generate = generate
        first = [user(red, "What?")]
        second = [*first, assistant("the"), user("Sure?")]
        third = [*second, assistant("the"), user(red, "And now?")]
        histories = [(await served.post(*messages)).headers["X-History"] for messages in (first, second, [user("Other.")], third, third)]
        assert histories == ["new", "continued", "new", "dropped", "dropped"]
        start, continued, _, rendered, _ = served.engine.contexts
        assert continued[: len(start) + 4] == [*start, *pieces]
        picture = {"type": "image", "image": red}
        spelled = [
            {"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}, {"role": "assistant", "content": "the"},
            {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "the"},
            {"role": "user", "content": [picture, {"type": "text", "text": "And now?"}]},
        ]  # fmt: skip
        assert rendered == renderer.prompt(spelled).token_ids
        assert [line for line in served.lines if "rendered from their messages" in line] == served.lines and len(served.lines) == 2
        assert served.endpoint.describe() == "5 requests answered: 1 continued a session, 2 new prompts, 2 continued a dropped session"

    serve(renderer, act, max_sessions=1)


@pytest.mark.parametrize("seed", range(10))
def test_sessions_are_found_by_their_contents(seed: int) -> None:
    """Random conversations. The oracle keeps the message lists of every response and the order in
    which sessions were used."""
    rng = random.Random(seed)
    store = SessionStore(max_sessions=3)
    known: list[tuple[tuple[str, ...], list[int], FoundSession]] = []
    order: list[object] = []
    for number in range(60):
        base = rng.choice([(), *(keys for keys, _, _ in known)])
        keys = (*base, f"question {rng.randrange(3)}")
        found = store.find(keys)
        alive = [entry for entry in known if entry[2].session in order]
        best = max((len(entry[0]) for entry in alive if entry[0] == keys[: len(entry[0])]), default=0)
        gone = max((len(entry[0]) for entry in known if entry[0] == keys[: len(entry[0])]), default=0)
        assert (found.continuation.num_known, found.is_dropped) == (best, gone > best)
        turn = found.continuation.turn
        before = [] if turn is None else found.session.read_tokens(turn)
        if best:
            holders = [entry for entry in alive if entry[0] == keys[:best]]
            used_last = max(order.index(entry[2].session) for entry in holders)
            assert order[used_last] is found.session
            assert before == [tokens for _, tokens, each in holders if each.session is found.session][-1]
        else:
            assert found.session not in order
        added = [number, number + 1]
        response = f"text {rng.randrange(2)}"
        store.add(found, keys, added, text=response, forms=[ParsedResponse(response)])
        known.append(((*keys, message_key(make_response_message(response))), [*before, *added], found))
        order = [*(each for each in order if each is not found.session), found.session][-3:]
        assert len(store) == len(order)


def test_tokens_are_bounded() -> None:
    """A session above the limit is dropped, although it is the only one."""
    store = SessionStore(max_sessions=5, max_tokens=2 * (TURN_TOKENS + 10))
    for number, left in enumerate((1, 2, 2, 0)):
        found = store.find((f"question {number}",))
        store.add(found, (f"question {number}",), [1] * (10 if number < 3 else 300), text="a", forms=[ParsedResponse("a")])
        assert len(store) == left
    assert store.num_dropped == 4


def test_a_request_sets_temperature_length_and_seed(renderer: Renderer) -> None:
    async def act(served: Served) -> None:
        await served.post()
        answer = await served.post(temperature=0, max_tokens=3, seed=7, top_p=0.5, n=2, model="gpt-4o")
        await served.post(max_completion_tokens=5000, seed=-1)
        assert answer.headers["X-Ignored"] == "top_p" and answer.json()["model"] == "policy"
        default, first, second, longest = served.engine.samplings
        assert (default.temperature, default.max_tokens) == (1.0, 8)
        assert (first.temperature, first.max_tokens, first.seed) == (0.0, 3, 7)
        assert second == replace(first, seed=second.seed) and second.seed != 7
        assert longest.max_tokens == 4000 - len(served.engine.contexts[-1]) and 0 <= longest.seed < 1 << 31
        assert served.lines == ["top_p in a request has no effect: the policy is sampled as in training"]

    serve(renderer, act)


def test_errors_have_the_form_of_openai(renderer: Renderer) -> None:
    red = pil.new("RGB", (60, 60), "red")
    template = {"role": "user", "content": "?", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}

    async def act(served: Served) -> None:
        found = [
            await served.post(key="wrong"), await served.post(model="gpt-5"), await served.post(temperature=3),
            await served.post(max_tokens="many"), await served.post(logprobs=True), await served.post(user(*[red] * 9)),
            await served.post(user("long " * 200)), await served.post(template),
        ]  # fmt: skip
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            found.append(await client.post(f"{served.address}/chat/completions", content=b"{", headers=headers))
            found.append(await served.declare(MAX_BODY_BYTES + 1))
            models = await client.get(f"{served.address}/models", headers=headers)
            assert [model["id"] for model in models.json()["data"]] == ["policy", "gpt-4o"]
            assert (await client.get(f"{served.address}/models")).status_code == 401
        errors = [answer.json()["error"] for answer in found]
        assert [(answer.status_code, error["code"], error["param"]) for answer, error in zip(found, errors, strict=True)] == [
            (401, "invalid_api_key", None), (404, "model_not_found", "model"), (400, "invalid_value", "temperature"),
            (400, "invalid_value", "max_tokens"), (400, "unsupported_value", "logprobs"), (400, "unsupported_value", "messages"),
            (400, "context_length_exceeded", "messages"), (400, "unsupported_value", "messages[0]"),
            (400, "invalid_value", "body"), (413, "request_too_large", None),
        ]  # fmt: skip
        assert "use policy or gpt-4o, or start the server with --model-name" in errors[1]["message"]
        assert "--ignore logprobs" in errors[4]["message"] and "--max-model-len" in errors[6]["message"]
        assert all(error["type"] == "invalid_request_error" and "\n" not in error["message"] for error in errors)
        assert not served.engine.contexts and not served.stops

    serve(renderer, act, max_tokens=120)


def test_requests_above_the_limit_are_told_to_wait(renderer: Renderer) -> None:
    async def act(served: Served) -> None:
        answers = await asyncio.gather(*(served.post() for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["Retry-After"] == "1" and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await served.post()).status_code == 200

    serve(renderer, act, max_requests=2)


def test_a_failed_engine_stops_the_endpoint(renderer: Renderer) -> None:
    async def act(served: Served) -> None:
        assert (await served.post()).status_code == 200 and not served.stops
        answer = await served.post()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert served.stops == [True] and "no memory" in str(served.endpoint.failure)

    serve(renderer, act, num_good=1)


def test_a_slow_request_ends(renderer: Renderer) -> None:
    async def act(served: Served) -> None:
        answer = await served.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout") and not served.stops

    serve(renderer, act, request_timeout_s=0.01)
