"""Tests the parser of chat completions and the search for the turn that a request continues."""

import base64
import io
import json
import random

import pytest
from PIL import Image as pil

from megatron_rl.data.tool_calls import ParsedResponse
from megatron_rl.tasks.agent.chat_request import MAX_IMAGES, RequestError, parse_request
from megatron_rl.tasks.agent.session import Continuation, SessionTree


def data_url(color: str, *, file_format: str = "PNG", size: tuple[int, int] = (8, 8)) -> str:
    encoded = io.BytesIO()
    pil.new("RGB", size, color).save(encoded, file_format)
    return f"data:image/{file_format.lower()};base64,{base64.b64encode(encoded.getvalue()).decode()}"


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def body(*messages: dict, **more: object) -> bytes:
    return json.dumps({"model": "policy", "messages": list(messages) or [{"role": "user", "content": "Hi"}], **more}).encode()


def call(name: str, arguments: str | dict, **more: object) -> dict:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.known_failure("agent-loses-images")
def test_equal_pixels_have_equal_keys_whatever_their_encoding() -> None:
    """The key of a message depends on pixels, not on the file that contains them; texts that are
    split into parts have the key of the whole text."""
    keys = [
        parse_request(body({"role": "user", "content": content})).keys
        for content in (
            [image(data_url("red")), {"type": "text", "text": "What?"}],
            [image(data_url("red", file_format="BMP")), {"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"}],
            [image(data_url("blue")), {"type": "text", "text": "What?"}],
            [{"type": "text", "text": "What?"}, image(data_url("red"))],
            [image(data_url("red", size=(4, 16))), {"type": "text", "text": "What?"}],
        )
    ]
    assert keys[0] == keys[1] and len({key for (key,) in keys}) == 4
    plain, parts = (parse_request(body({"role": "user", "content": each})).keys for each in ("Hi", [{"type": "text", "text": "Hi"}]))
    assert plain == parts != parse_request(body({"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"})).keys[:1]


def test_settings_are_replaced_and_counted() -> None:
    asked = parse_request(body(temperature=0.3, max_tokens=5, n=1, tools=[], user="me", logprobs=False, stop=None, top_p=None))
    assert asked.replaced == ("max_tokens", "temperature") and not asked.is_streamed and (asked.num_choices, asked.stop) == (1, ())
    asked = parse_request(body(tool_choice="required", parallel_tool_calls=True, logprobs=True, n=3, stop="x"), ignored=("logprobs",))
    assert asked.replaced == ("logprobs", "tool_choice") and (asked.num_choices, asked.stop, asked.has_tools) == (3, ("x",), False)
    assert parse_request(body(tool_choice="auto", parallel_tool_calls=False)).replaced == ("parallel_tool_calls",)
    assert parse_request(body(model="gpt-4o", stream=True, stream_options={"include_usage": True})).has_usage_chunk
    assert parse_request(body(model="gpt-4o")).replaced == ("model",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "Invalid JSON"),
        (b"[]", "body: Input should be an object"),
        (b'{"model": "policy", "messages": []}', "at least 1 item"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "model": "a"}', "Invalid JSON"),
        (body(n=0), "n: Input should be greater than or equal to 1"),
        (body(logprobs=True), "logprobs: true is not supported; remove this setting, or add it to task.options.ignore="),
        (body(stop=["a", ""]), "stop: at most 4 strings with 1 to 64 characters"),
        (body(stop=list("abcde")), "stop: at most 4 strings"),
        (body(tools=[{"type": "function"}]), "tools.0.function: Field required"),
        (body(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools.0.function.name: String should match pattern"),
        (body(magic=1), "magic: unknown setting"),
        (body({"role": "critic", "content": "4"}), "'critic' is not supported"),
        (body({"role": "user", "content": "Hi", "tool_calls": [call("add", "{}")]}), "only assistant messages have calls"),
        (body({"role": "assistant", "tool_calls": [call("add", "[1]")]}, {"role": "user", "content": "?"}), "are not a JSON object"),
        (
            body({"role": "assistant", "tool_calls": [call("add", '{"a": "<|image_pad|>"}')]}, {"role": "user", "content": "?"}),
            "vision marker",
        ),
        (body({"role": "user", "content": "Hi", "audio": {"id": 1}}), "audio: is not supported"),
        (body({"role": "user", "content": [{"type": "input_audio"}]}), "messages.0.content.0.type: Input should be 'text' or 'image_url'"),
        (body({"role": "user", "content": [{"type": "text", "text": "a", "magic": 1}]}), "messages.0.content.0.magic: Extra inputs"),
        (body({"role": "assistant", "content": "Hi"}), "the last message is the assistant's"),
        (body({"role": "assistant", "content": "<|image_pad|>"}, {"role": "user", "content": "?"}), "vision marker"),
        (body({"role": "system", "content": [image(data_url("red"))]}), "an image in a message of the system"),
        (body({"role": "user", "content": [image("https://example.org/a.png")]}), "only data: URLs"),
        (body({"role": "user", "content": [image("file:///etc/passwd")]}), "only data: URLs"),
        (body({"role": "user", "content": [image("data:image/png;base64,AAAA")]}), "image_url|not|image"),
        (body({"role": "user", "content": [image(data_url("red", size=(1, 500)))]}), "aspect ratio"),
        (body({"role": "user", "content": [image(data_url("red"))] * (MAX_IMAGES + 1)}), "at most 256"),
    ],
)
def test_a_bad_request_is_one_error(given: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        parse_request(given)
    error = raised.value.to_json()["error"]
    assert raised.value.status == 400 and error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert len(error["message"]) < 400


def test_mutilated_requests_raise_no_other_error() -> None:
    """2,000 requests with random bytes replaced, removed or repeated are parsed or rejected."""
    rng = random.Random(0)
    good = body(
        {"role": "user", "content": [image(data_url("red")), {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "red"}, {"role": "user", "content": "Sure?"}, temperature=1, stream=False,
    )  # fmt: skip
    outcomes = {"parsed": 0, "rejected": 0}
    for _ in range(2000):
        given = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(given))
            stop = min(len(given), start + rng.randint(0, 8))
            given[start:stop] = rng.choice([b"", bytes(rng.randrange(256) for _ in range(3)), given[start:stop] * 2, b'"', b"[", b"null"])
        try:
            parse_request(bytes(given))
            outcomes["parsed"] += 1
        except RequestError:
            outcomes["rejected"] += 1
    assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_known_history_is_continued(seed: int) -> None:
    """Random conversations over few texts, so that histories coincide. The oracle compares the
    whole message lists of all earlier turns."""
    rng = random.Random(seed)
    tree, histories = SessionTree(), []
    for _ in range(30):
        base = rng.choice([[], *histories])
        messages = [
            *base[: rng.randint(0, len(base))],
            *((rng.choice(["user", "assistant"]), rng.choice(["a", "b", " a"])) for _ in range(rng.randint(0, 2))),
        ]
        messages.append(("user", rng.choice("ab")))
        keys = parse_request(body(*({"role": role, "content": text} for role, text in messages))).keys
        best = Continuation(None, 0)
        for turn, history in enumerate(histories):
            if messages[: len(history)] == history and len(history) < len(messages) and len(history) >= best.num_known:
                best = Continuation(turn, len(history))
        found = tree.find(keys)
        assert (found.turn, found.num_known) == (best.turn, best.num_known)
        asked = [
            len(history) - 1 for history in histories if messages[: len(history) - 1] == history[:-1] and len(history) <= len(messages)
        ]
        shortest = min((size for size in asked if size > best.num_known), default=None)
        assert (found.edited is None) == (shortest is None) and (found.edited is None or found.edited[1] == shortest)
        response = rng.choice(["a", "b", "", " a"])
        tree.add(keys, response, [ParsedResponse(response)])
        histories.append([*messages, ("assistant", response)])
    assert tree.num_turns == 30
