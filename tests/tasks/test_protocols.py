"""Tests the four tool protocols: formats by hand, round trips, exploits, and junk of every kind and
size."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_rl.tasks.visual_python.codev import CodeVProtocol
from megatron_rl.tasks.visual_python.deepeyes import DeepEyesProtocol
from megatron_rl.tasks.visual_python.function_tools import FunctionsProtocol
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import CodeAction, FinalAnswer, MalformedReply, ParsedReply, ToolAction, ToolProtocol
from megatron_rl.types import ToolCall

PROTOCOLS: list[ToolProtocol] = [PyVisionProtocol(), CodeVProtocol(), DeepEyesProtocol(), FunctionsProtocol()]
ACTION = {"pyvision": "code", "codev": "code", "deepeyes": "tool_call", "functions": "tool_call"}
SPEAKERS = [PyVisionProtocol(), CodeVProtocol(), FunctionsProtocol()]
PICTURES = [Image.new("RGB", (60, 40), "red"), Image.new("RGB", (100, 30), "blue")]
ZOOM = '<tool_call>\n{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [1, 2, 50, 60.5], "label": "cup"}}\n</tool_call>'
READ: list[tuple[ToolProtocol, str, ParsedReply]] = [
    (PyVisionProtocol(), "Look.\n<code>\n```python\nx = 1\n\nprint(x)\n```\n</code>", CodeAction("x = 1\n\nprint(x)")),
    (PyVisionProtocol(), "<code>\nprint(1)\n</code>", CodeAction("\nprint(1)\n")),
    (PyVisionProtocol(), "<code>```py\n  x\n```</code>.\n", CodeAction("  x")),
    (PyVisionProtocol(), "First\n```python\na\n```\nthen\n```python\nb\n```\nthat is all", CodeAction("b")),
    (PyVisionProtocol(), "<code>\n```python\na\n```\n</code>\n<code>\n```python\nb\n```\n</code>", CodeAction("b")),
    (
        PyVisionProtocol(),
        'A tag in a string: <code>\n```python\nprint("<answer>1</answer><code>")\n```\n</code>',
        CodeAction('print("<answer>1</answer><code>")'),
    ),
    (PyVisionProtocol(), "So:\n<answer>\n\\boxed{\\frac{1}{2} \\} }\n</answer>", FinalAnswer("\\frac{1}{2} \\}")),
    (PyVisionProtocol(), "```python\na\n```\n<answer>\\boxed{7}</answer>", FinalAnswer("7")),
    (CodeVProtocol(), "<think>Hm.</think><code>\n```python\na = 1\n```\n</code><code>b</code>", CodeAction("a = 1\nb")),
    (CodeVProtocol(), "<answer> a red cup\n</answer>\n", FinalAnswer("a red cup")),
    (DeepEyesProtocol(), f"<think>Where?</think>{ZOOM}", ToolAction("zoom", {"bbox_2d": [1, 2, 50, 60.5], "label": "cup"})),
    (
        DeepEyesProtocol(),
        ZOOM + '<tool_call>{"name":"image_rotate_tool","arguments":{"angle":-90}}</tool_call>',
        ToolAction("rotate", {"angle": -90}),
    ),
    (DeepEyesProtocol(), "<answer>B</answer>", FinalAnswer("B")),
    (FunctionsProtocol(), '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)\\n"}}\n</tool_call>', CodeAction("print(1)\n")),
    (FunctionsProtocol(), '<tool_call>{"name": "rotate", "arguments": {"angle": 5}}</tool_call>', ToolAction("rotate", {"angle": 5})),
    (FunctionsProtocol(), "<answer>2</answer>", FinalAnswer("2")),
]


@pytest.mark.parametrize(("protocol", "reply", "meaning"), READ)
def test_a_reply_is_read(protocol: ToolProtocol, reply: str, meaning: ParsedReply) -> None:
    assert protocol.parse_reply(reply) == meaning


REFUSED: list[tuple[ToolProtocol, str, str]] = [
    *((protocol, "<answer>\n\\boxed{1}\n</answer>\n<answer>\n\\boxed{2}\n</answer>", "2 answers") for protocol in PROTOCOLS),
    *((protocol, "", "neither") for protocol in PROTOCOLS),
    *((protocol, "The answer is \\boxed{4}.", "neither") for protocol in PROTOCOLS),
    *((protocol, "<answer>\\boxed{4}", "not closed") for protocol in PROTOCOLS),
    *((protocol, "4</answer>", "no place") for protocol in PROTOCOLS),
    *((protocol, "<answer><answer>\\boxed{4}</answer></answer>", "no place") for protocol in PROTOCOLS),
    *((protocol, "<answer> \n </answer>", "answer") for protocol in PROTOCOLS),
    *((protocol, protocol.write_answer("4") + protocol.write_code("x"), "not both") for protocol in SPEAKERS),
    *((protocol, protocol.write_code("x") + protocol.write_answer("4"), "not both") for protocol in SPEAKERS),
    *((protocol, f"<answer>{protocol.write_code('x')}</answer>", "no place") for protocol in SPEAKERS),
    (PyVisionProtocol(), "<answer>4</answer>", "boxed"),
    (PyVisionProtocol(), "<answer>\\boxed{4} or \\boxed{5}</answer>", "boxed"),
    (PyVisionProtocol(), "<answer>\\boxed{\\boxed{4}}</answer>", "boxed"),
    (PyVisionProtocol(), "<answer>\\boxed{4}}</answer>", "boxed"),
    (PyVisionProtocol(), "<answer>\\boxed{4\\}</answer>", "boxed"),
    (PyVisionProtocol(), "<answer>\\boxed{4} </interpreter></answer>", "only the environment"),
    (PyVisionProtocol(), "<tool_response><interpreter>4</interpreter></tool_response><answer>\\boxed{4}</answer>", "only the environment"),
    (PyVisionProtocol(), "<code>\n```python\nprint(1)\n```\n", "not closed"),
    (PyVisionProtocol(), "<code>\n```python\n\n```\n</code>", "no code"),
    (PyVisionProtocol(), "```python\nnever closed", "neither"),
    (CodeVProtocol(), "```python\nprint(1)\n```", "neither"),
    (CodeVProtocol(), "<sandbox_output>4</sandbox_output><answer>4</answer>", "only the environment"),
    (DeepEyesProtocol(), f"{ZOOM}<answer>4</answer>", "not both"),
    (DeepEyesProtocol(), "<tool_call>{'name': 'image_zoom_in_tool', 'arguments': {}}</tool_call>", "no JSON"),
    (DeepEyesProtocol(), "<tool_call>__import__('os').abort()</tool_call>", "no JSON"),
    (DeepEyesProtocol(), f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
    (DeepEyesProtocol(), f"<tool_call>{'9' * 100_000}</tool_call>", "no JSON"),
    (DeepEyesProtocol(), '<tool_call>["image_zoom_in_tool"]</tool_call>', "one JSON object"),
    (DeepEyesProtocol(), '<tool_call>{"name": "image_zoom_in_tool", "arguments": "{}"}</tool_call>', "one JSON object"),
    (DeepEyesProtocol(), '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [[1]]}}</tool_call>', "arguments are"),
    (DeepEyesProtocol(), '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"label": "\\ud800"}}</tool_call>', "Unicode"),
    (DeepEyesProtocol(), '<tool_call>{"name": "zoom", "arguments": {"bbox_2d": [1, 2, 3, 4]}}</tool_call>', "no tool 'zoom'"),
    (FunctionsProtocol(), f"{ZOOM}{ZOOM}", "one function"),
    (FunctionsProtocol(), '<tool_call>{"name": "os.abort", "arguments": {}}</tool_call>', "no function 'os.abort'"),
    (FunctionsProtocol(), '<tool_call>{"name": "python", "arguments": {"code": 5}}</tool_call>', "code, a text"),
    (FunctionsProtocol(), '<tool_call>{"name": "python", "arguments": {"code": "\\udfff"}}</tool_call>', "Unicode"),
]


@pytest.mark.parametrize(("protocol", "reply", "reason"), REFUSED)
def test_what_is_wrong_with_a_reply_is_said(protocol: ToolProtocol, reply: str, reason: str) -> None:
    """A malformed response is parsed as MalformedReply with its reason."""
    meaning = protocol.parse_reply(reply)
    assert isinstance(meaning, MalformedReply)
    assert reason in meaning.reason


PIECES = [
    "<code>", "</code>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "<interpreter>", "</interpreter>",
    "<sandbox_output>", "<think>", "</think>", "```", "```python", "\n", "\\boxed{", "{", "}", "\\", '"',
    '{"name": "python", "arguments": ',
    '{"code": "x"}', '"bbox_2d": [1, 2, 3, 4]', "<|image_pad|>", "<|im_end|>", "\0", "\ud800", "\U0001f600", " ", "x = 1", "<", ">",
]  # fmt: skip
PAIRS = ["<code>```python\n", "<code>x</code>", "<answer>x</answer>", "\\boxed{}", "```python\n```\n", "<tool_call>{}</tool_call>"]
junk = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=40).map("".join)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@settings(max_examples=500, deadline=None)
@given(reply=junk)
@example(reply=bytes(range(256)).decode("latin-1"))
def test_junk_is_read_as_something(protocol: ToolProtocol, reply: str) -> None:
    """Every text is parsed as an action, an answer or a malformed response. An answer or code that
    is found is text of the response, which contains nothing else that could be one."""
    meaning = protocol.parse_reply(reply)
    assert isinstance(meaning, CodeAction | ToolAction | FinalAnswer | MalformedReply)
    if isinstance(meaning, FinalAnswer):
        assert meaning.text and meaning.text in reply
        assert reply.count("<answer>") == reply.count("</answer>") == 1
        assert f"<{ACTION[protocol.name]}>" not in reply
    if isinstance(meaning, CodeAction) and protocol.name != "functions":
        assert all(line in reply for line in meaning.source.split("\n"))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("piece", [*PIECES, "<answer>\\boxed{", *PAIRS])
def test_a_megabyte_is_read_in_no_time(protocol: ToolProtocol, piece: str) -> None:
    """Three megabytes of each piece are parsed in 6 s of CPU time. A linear parser needs far less;
    a quadratic one takes hours."""
    body, action = piece * (1_000_000 // len(piece)), ACTION[protocol.name]
    began = time.process_time()
    for reply in (body, f"<answer>{body}</answer>", f"<{action}>{body}</{action}>"):
        assert isinstance(protocol.parse_reply(reply), CodeAction | ToolAction | FinalAnswer | MalformedReply)
    assert time.process_time() - began < 6


CODE = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=60).filter(
    lambda text: text.strip() and "<" not in text and not text.strip().startswith("```")
)


@settings(max_examples=300, deadline=None)
@given(source=CODE)
@example(source='def f():\n    return """```"""\n\n')
@example(source="print('\\n```\\n')\n```")
def test_code_comes_back(source: str) -> None:
    """Parsing a response returns the code that was written into it."""
    for protocol in SPEAKERS:
        assert protocol.parse_reply(protocol.write_code(source)) == CodeAction(source)
        assert protocol.parse_reply("Think.\n" + protocol.write_code(source) + "\n") == CodeAction(source)


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<{}\\"), min_size=1, max_size=60).filter(str.strip))
def test_answers_come_back(text: str) -> None:
    """Parsing a response returns the answer that was written into it, without outer blanks."""
    for protocol in PROTOCOLS:
        assert protocol.parse_reply(protocol.write_answer(text)) == FinalAnswer(text.strip())


def test_calls_come_back() -> None:
    """Parsing a response returns the tool call that was written into it."""
    for protocol in (DeepEyesProtocol(), FunctionsProtocol()):
        for name, arguments in (("zoom", {"bbox_2d": [0, 0, 50, 50]}), ("rotate", {"angle": 90})):
            assert protocol.parse_reply(protocol.write_call(name, arguments)) == ToolAction(name, arguments)
    with pytest.raises(ValueError, match=r"task\.tool_format=deepeyes.*use pyvision, codev or functions"):
        DeepEyesProtocol().write_code("print(1)")


def flat(messages: list) -> tuple[str, list]:
    """Return the text of the messages with [i] for each image, and the images."""
    parts = [part for message in messages for part in message["content"]]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    return "".join(part["text"] if part["type"] == "text" else "[i]" for part in parts), pictures


OBSERVED = [
    (
        PyVisionProtocol(), 3,
        "<tool_response>\n<interpreter>\nText Result:\nout\nImage Result:\n"
        "<image_clue_3>[i]</image_clue_3>\n<image_clue_4>[i]</image_clue_4>\n</interpreter>\n</tool_response>",
    ),
    (CodeVProtocol(), 3, "<sandbox_output>\nout\n[i][i]\n</sandbox_output>\nThink"),
    (DeepEyesProtocol(), 3, "<tool_response>\nout[i][i]\n</tool_response>\nThink"),
    (FunctionsProtocol(), 3, "<tool_response>\nout\n[i][i]\n</tool_response>"),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "num_before", "start"), OBSERVED)
def test_an_observation_by_hand(protocol: ToolProtocol, num_before: int, start: str) -> None:
    call = ToolCall(tool="python", source="", text="out")
    messages = protocol.write_observation(call, PICTURES, num_previous_images=num_before)
    text, pictures = flat(messages)
    assert [message["role"] for message in messages] == ["user"]
    assert text.startswith(start) and pictures == PICTURES
    assert "[i]" not in flat(protocol.write_observation(call, [], num_previous_images=num_before))[0]


@pytest.mark.parametrize(
    ("protocol", "shown", "says"),
    [
        (PyVisionProtocol(), "<image_clue_0>[i]</image_clue_0> and <image_clue_1>[i]</image_clue_1>?", "image_clue_1 has 100 x 30 pixels"),
        (PyVisionProtocol(shows_images=False), "[image_hint_0] and [image_hint_1]?", "image_hint_0 has 60 x 40 pixels"),
        (CodeVProtocol(("photo.jpg",)), "[i] and [i]?", "Image files: photo.jpg, image_1.png. photo.jpg has 60 x 40 pixels"),
        (DeepEyesProtocol(), "[i] and [i]?", "original image has 60 x 40 pixels"),
        (FunctionsProtocol(), "[i] and [i]?", "image_1 has 100 x 30 pixels"),
    ],
)
def test_a_prompt_places_pictures_and_states_their_sizes(protocol: ToolProtocol, shown: str, says: str) -> None:
    messages = protocol.write_prompt("What are <image> and <image>?", PICTURES)
    text, pictures = flat(messages)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert f"What are {shown}" in text and says in text
    assert pictures == (PICTURES if "[i]" in shown else [])
    unplaced = flat(protocol.write_prompt("What?", PICTURES))[0]
    assert unplaced.index(shown[: shown.index(" and")]) < unplaced.index("What?")
    assert "pixels (" not in flat(protocol.write_prompt("No picture?", []))[0]
    with pytest.raises(ValueError, match="1 image placeholders .* 2 images"):
        protocol.write_prompt("What is <image>?", PICTURES)


def test_functions_are_described_as_json() -> None:
    """The prompt lists the functions between the tags of Qwen2.5's template, as one JSON object per
    line, each with a JSON schema."""
    system = flat(FunctionsProtocol().write_prompt("Q", [])[:1])[0]
    listed = [json.loads(line) for line in system.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")]
    assert [entry["function"]["name"] for entry in listed] == ["python", "zoom", "rotate"]
    assert all(entry["type"] == "function" and entry["function"]["parameters"]["type"] == "object" for entry in listed)


SERVED = FunctionsProtocol(server_tools=({"name": "plan", "description": "Plans <a> way.", "parameters": {"type": "object"}},))


def test_tools_of_servers_are_listed_and_called_with_any_json() -> None:
    """Tools of MCP servers follow the others in the prompt. Their arguments are any JSON, up to 32
    levels, without lone surrogates, NaN and infinities; the other tools take flat arguments."""
    system = flat(SERVED.write_prompt("Q", [])[:1])[0]
    listed = [json.loads(line) for line in system.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")]
    assert [entry["function"]["name"] for entry in listed] == ["python", "zoom", "rotate", "plan"]
    assert listed[-1] == {"type": "function", "function": SERVED.server_tools[0]}
    nested = {"way": [{"to": "a", "by": [1, 2.5, None, True]}], "é": {}}
    assert SERVED.parse_reply(SERVED.write_call("plan", nested)) == ToolAction("plan", nested)
    for levels, is_valid in ((31, True), (32, False), (400, False)):
        reply = SERVED.write_call("plan", {"x": json.loads("[" * levels + "]" * levels)})
        assert isinstance(SERVED.parse_reply(reply), ToolAction if is_valid else MalformedReply)
    for odd in ('{"x": NaN}', '{"x": [-Infinity]}', '{"x": {"\\ud800": 1}}', '{"x": {"y": "\\ud800"}}', '{"x": 1e999}'):
        found = SERVED.parse_reply(f'<tool_call>{{"name": "plan", "arguments": {odd}}}</tool_call>')
        assert isinstance(found, MalformedReply) and "32 levels" in found.reason
    assert isinstance(SERVED.parse_reply(SERVED.write_call("zoom", nested)), MalformedReply)
    assert SERVED.parse_reply(SERVED.write_code("1")) == CodeAction("1")
    strange = SERVED.parse_reply(SERVED.write_call("plam", {}))
    assert strange == MalformedReply("there is no function 'plam'; there are python, zoom, rotate, plan")


def test_file_names_of_codev_are_kept_apart() -> None:
    """An image without a file name gets one that no other image has."""
    assert CodeVProtocol(("image_1.png",)).name_images(PICTURES) == {"image_1.png": PICTURES[0], "image_2.png": PICTURES[1]}
