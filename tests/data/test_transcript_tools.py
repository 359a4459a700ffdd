"""Tests transcripts with tools and tool calls. Oracles: the tokenizer's own chat template, and the
texts of the responses by hand. tests/tasks/test_agent_frameworks.py compares such a transcript with
a rollout of task=agent.
"""

import json
import tempfile
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.data.transcripts import load_transcripts
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Message
from tests.support.data_files import make_png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Arrow copies to a folder of the test."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


PARAMETERS = {"type": "object", "properties": {"box": {"type": "array", "items": {"type": "number"}}, "über": {"default": 0.50}}}
CROP = {"type": "function", "function": {"name": "crop", "description": 'Crops "é" <x>.', "parameters": PARAMETERS}}
ADD = {"type": "function", "function": {"name": "add.one", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [CROP, ADD]


def call(name: str, number: int, **arguments: object) -> dict:
    """Return a call with arguments as text, as OpenAI's API returns it."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(number: int, content: object) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


IMAGE = {"type": "image"}
CONVERSATION = [
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "Which?"}]},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("crop", 1, box=[1, 2.5, -3]), call("add.one", 2)]},
    result(1, [IMAGE, {"type": "text", "text": "a crop"}]),
    result(2, "7"),
    {"role": "assistant", "content": None, "tool_calls": [call("crop", 3, box=[], **{"über": {"k": [None, True, "ä\n"]}})]},
    result(3, "nothing"),
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "Red."},
]
TRAINED = [
    'I look.\n<tool_call>\n{"name": "crop", "arguments": {"box": [1, 2.5, -3]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add.one", "arguments": {}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "crop", "arguments": {"box": [], "über": {"k": [null, true, "ä\\n"]}}}\n</tool_call><|im_end|>',
    "Red.<|im_end|>",
]
"""Texts of the responses."""


def apply_template(renderer: Renderer, messages: list[dict], tools: list[dict]) -> list[int]:
    """Return the tokens of the tokenizer's chat template, which takes arguments as objects."""
    parsed = json.loads(json.dumps(messages))
    for function in (each["function"] for message in parsed for each in message.get("tool_calls", ())):
        function["arguments"] = json.loads(function["arguments"])
    for message in parsed:
        message["content"] = message["content"] or ""
    template = renderer.processor.chat_template
    return renderer.tokenizer.apply_chat_template(parsed, tools=tools, chat_template=template, return_dict=False)


def load(folder: Path, row: dict, suffix: str) -> list[Message]:
    images = [{"bytes": make_png("red")}, {"bytes": make_png("blue")}]
    (messages,) = load_transcripts([str(write_rows(folder / f"t{suffix}", [row | {"images": images}]))], images_root="")
    return messages


@pytest.mark.parametrize(("suffix", "as_text"), [(".jsonl", False), (".json", False), (".jsonl", True), (".parquet", True)])
def test_tokens_are_those_of_the_chat_template(suffix: str, as_text: bool, renderer: Renderer, tmp_path: Path) -> None:
    """Tools and calls in every file format, with the loss on the responses only."""
    row = {"messages": CONVERSATION, "tools": TOOLS}
    if as_text:
        row = {name: json.dumps(value) for name, value in row.items()}
    sequence = renderer.transcript(load(tmp_path, row, suffix))
    image_id = renderer.image_token_id
    ids = [token for place, token in enumerate(sequence.token_ids) if token != image_id or sequence.token_ids[place - 1] != image_id]
    assert ids == apply_template(renderer, CONVERSATION, TOOLS)[: len(ids)] and len(sequence.images) == 2
    assert renderer.tokenizer.decode(apply_template(renderer, CONVERSATION, TOOLS)[len(ids) :]) == "\n"
    spans: list[list[int]] = []
    for place, mask in enumerate(sequence.loss_mask):
        if mask and not sequence.loss_mask[place - 1]:
            spans.append([])
        if mask:
            spans[-1].append(sequence.token_ids[place])
    assert [renderer.tokenizer.decode(span) for span in spans] == TRAINED


def test_calls_of_a_masked_response_have_no_loss(renderer: Renderer, tmp_path: Path) -> None:
    first, asked, *rest = CONVERSATION
    masked = renderer.transcript(load(tmp_path, {"messages": [first, asked | {"loss": False}, *rest], "tools": TOOLS}, ".jsonl"))
    trained = renderer.transcript(load(tmp_path, {"messages": CONVERSATION, "tools": TOOLS}, ".jsonl"))
    left = [token for token, mask in zip(masked.token_ids, masked.loss_mask, strict=True) if mask]
    assert masked.token_ids == trained.token_ids
    assert renderer.tokenizer.decode(left) == "".join(TRAINED[1:])


def test_tools_without_calls_are_part_of_the_prompt(renderer: Renderer, tmp_path: Path) -> None:
    """Also in a row of another format, and with a system message in a column."""
    row = {"query": "<image><image>Which?", "response": "Red.", "system": "See.", "tools": json.dumps(TOOLS)}
    messages = [
        {"role": "system", "content": "See."}, {"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "Red."},
    ]  # fmt: skip
    expected = renderer.tokenizer.decode(apply_template(renderer, messages, TOOLS))
    found = renderer.tokenizer.decode(renderer.transcript(load(tmp_path, row, ".jsonl")).token_ids)
    assert found.replace("<|image_pad|>", "") + "\n" == expected.replace("<|image_pad|>", "") and "# Tools" in found


USER, REPLY = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Red."}


def calls_row(*calls: object, results: int = 1, tools: object = TOOLS, **keys: object) -> dict:
    """Return a row in which a response calls tools and receives results."""
    asked = {"role": "assistant", "content": "", "tool_calls": list(calls)} | keys
    return {"messages": [USER, asked, *({"role": "tool", "content": "7"} for _ in range(results)), REPLY], "tools": tools}


def function(**changed: object) -> dict:
    return {"type": "function", "function": {"name": "add.one", "arguments": "{}"} | changed}


def tools_row(*tools: object) -> dict:
    return {"messages": [USER, REPLY], "tools": list(tools)}


BAD = {
    # tools
    "no JSON": ({"messages": [USER, REPLY], "tools": "crop"}, r'tools: is text that is not valid JSON \(.*\); write a list of {"type"'),
    "an object": ({"messages": [USER, REPLY], "tools": CROP}, "tools: must be a list, not dict"),
    "a name": (tools_row("crop"), r"tools\[0\]: Input should be a valid dictionary .*; write a list of"),
    "a function without its tool": (tools_row(CROP, CROP["function"]), r"tools\[1\].type: Field required; write a list of"),
    "no name": (tools_row({"type": "function", "function": {}}), r"tools\[0\].function.name: Field required; write"),
    "a name with a space": (tools_row({"type": "function", "function": {"name": "a b"}}), r"tools\[0\].function.name: String should match"),
    "another type": (tools_row(CROP | {"type": "web_search"}), r"tools\[0\].type: Input should be 'function'"),
    "an unknown key": (tools_row(CROP | {"mood": "good"}), r"tools\[0\].mood: Extra inputs are not permitted"),
    "the same tool twice": (tools_row(CROP, CROP), "tools: has two tools with the name crop; keep one of them"),
    "too many tools": (tools_row(*[CROP] * 129), "tools: has 129 items; at most 128 are allowed"),
    "a special token": (
        tools_row({"type": "function", "function": {"name": "a", "parameters": {"<|im_end|>": 1}}}),
        r"tools: contains <\|im_end\|>",
    ),
    "functions": ({"messages": [USER, REPLY], "functions": [CROP["function"]]}, "functions: are not read; write them into"),
    # calls
    "no list": (calls_row(tool_calls={"name": "crop"}), r"messages\[1\].tool_calls: must be a list, not dict"),
    "no function": (calls_row({"id": "1"}), r"messages\[1\].tool_calls\[0\].function: Field required; write a list of"),
    "arguments that are no JSON": (
        calls_row(function(arguments="{x}")),
        r"messages\[1\].tool_calls: the arguments of add.one are not a JSON object: '{x}'; write an object, or JSON of one",
    ),
    "arguments that are a list": (calls_row(function(arguments="[1]")), r"messages\[1\].tool_calls: the arguments of add.one are not"),
    "arguments that are a number": (calls_row(function(arguments=1)), r"messages\[1\].tool_calls\[0\].function.arguments: "),
    "a vision marker in arguments": (
        calls_row(function(arguments={"x": ["<|image_pad|>"]})),
        r"messages\[1\].tool_calls: contains <\|image_pad\|>",
    ),
    "half a character in arguments": (calls_row(function(arguments='{"x": "\\ud800"}')), r"messages\[1\].tool_calls: the arguments of add"),
    "a tool that does not exist": (
        calls_row(function(name="subtract")),
        r"messages\[1\].tool_calls: calls subtract, which is not one of the tools crop, add.one",
    ),
    "calls of the user": (
        {"messages": [USER | {"tool_calls": [function()]}, REPLY]},
        r"messages\[0\].tool_calls: are in a message of another role, but only the assistant calls tools",
    ),
    "an old call": (calls_row(function(), function_call={"name": "a"}), r"messages\[1\].function_call: is not read; write tool_calls: "),
    "tools of a message": ({"messages": [USER | {"tools": TOOLS}, REPLY]}, r"messages\[0\].tools: is not read; write the tools into"),
    # results
    "no result": (calls_row(function(), results=0) | {}, r"messages: user and assistant messages must alternate"),
    "too few results": (calls_row(function(), function()), r"messages\[1\].tool_calls: 2 calls, but 1 results; write one message with the"),
    "too many results": (calls_row(function(), results=2), r"messages\[1\].tool_calls: 1 calls, but 2 results"),
    "results in another order": (
        {"messages": [*CONVERSATION[:2], CONVERSATION[3], CONVERSATION[2], REPLY]},
        r"messages\[2\].tool_call_id: is call_2, but the call at this place has the id call_1; write the results in the order",
    ),
    "an image in a response with calls": (
        calls_row(function(), content=[{"type": "image"}]),
        r"messages\[1\].content\[0\]: contains an image in a message with the role assistant",
    ),
    "neither text nor calls": (calls_row(results=1, tools=[]), r"messages\[1\]: the assistant message is empty and would be trained on"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_tools_are_named(name: str, tmp_path: Path) -> None:
    """One line with the row and the key."""
    row, message = BAD[name]
    path = write_rows(tmp_path / "t.jsonl", [{"messages": [USER, REPLY]}, row])
    with pytest.raises(ValueError, match=f"^t.jsonl row 1: {message}") as error:
        load_transcripts([str(path)], images_root="")
    assert "\n" not in str(error.value)


def test_calls_that_are_accepted(tmp_path: Path) -> None:
    """A last response without results, calls without ids, names that no column describes, and
    thoughts before a call.
    """
    last = {"messages": [USER, {"role": "assistant", "tool_calls": [function(name="any.thing", arguments={"x": 1})]}]}
    thinks = calls_row(function(), content="<think>x</think>")
    read = load_transcripts([str(write_rows(tmp_path / "t.jsonl", [last, thinks]))], images_root="")
    assert read.warnings == []
    assert read[0][1] == {
        "role": "assistant", "content": [], "tool_calls": [{"type": "function", "function": {"name": "any.thing", "arguments": {"x": 1}}}]
    }  # fmt: skip
    assert [message["role"] for message in read[1]] == ["user", "assistant", "tool", "assistant"] and read[1][0]["tools"] == TOOLS
