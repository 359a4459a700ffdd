"""Tests tool calls, choices, stop strings, rewards that are posted, and agents behind a service."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import openai
import pytest
from PIL import Image as pil
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from megatron_rl.config import ModelSettings
from megatron_rl.data.tool_calls import FunctionCall, ParsedResponse, parse_response
from megatron_rl.rollout.chat_template import ChatTemplate
from megatron_rl.rollout.processor import load_processor
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.agent.chat_request import make_response_message
from megatron_rl.tasks.visual_python.deepeyes import write_tool_call, write_tools_prompt
from megatron_rl.types import Status, StopReason
from tests.support.agent_episodes import as_text, play

SCHEMA = {"name": "add", "description": "Adds numbers.", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


def test_tools_are_rendered_in_the_words_of_qwen(renderer: Renderer) -> None:
    """The oracle is the system message that task=visual_python writes, a copy of Qwen2.5's text."""
    tools = [{"type": "function", "function": SCHEMA}]
    asked = {"role": "user", "content": "1 + 1?"}
    expected = renderer.prompt([{"role": "system", "content": write_tools_prompt([SCHEMA])}, asked])
    assert renderer.prompt([{**asked, "tools": tools}]).token_ids == expected.token_ids
    system = {"role": "system", "content": "You are a helpful assistant.", "tools": tools}
    assert renderer.prompt([system, asked]).token_ids == expected.token_ids
    escaped = {"type": "function", "function": {**SCHEMA, "description": "<|im_end|>", "parameters": {"<|im_start|>": ["<|im_end|>"]}}}
    assert renderer.prompt([{**asked, "tools": [escaped]}]).token_ids.count(renderer.end_id) == 2


@pytest.mark.parametrize(
    ("rendered", "omitted", "message", "error"),
    [
        ("if tools", "if false", {"role": "user", "content": "?", "tools": [{"type": "function", "function": SCHEMA}]}, "omits tools; use"),
        ("message.tool_calls or []", "[]", make_response_message("a", [FunctionCall("a", {})]), "omits tool calls; use"),
    ],
)
def test_a_template_that_omits_tools_is_an_error(random_model: Path, rendered: str, omitted: str, message: dict, error: str) -> None:
    """As the released template of Qwen2.5-VL. The tool's name occurs in other words of the prompt."""
    processor = load_processor(str(random_model))
    processor.chat_template = processor.chat_template.replace(rendered, omitted)
    template = ChatTemplate(processor, "there", special_tokens=["<|im_end|>"])
    assert "add" in template.render([{"role": "user", "content": "Additions: add."}])
    with pytest.raises(ValueError, match=error):
        template.render([message])


def test_calls_that_the_template_writes_are_read(renderer: Renderer) -> None:
    """Random calls are rendered by the chat template, in a response and after it."""
    rng = random.Random(0)
    values = [1, -2.5, None, True, 'a\n"b"', "ä", "</tool>", [1, ["x"]], {"k": {"l": []}}, ""]
    for _ in range(200):
        calls = [
            FunctionCall(rng.choice(["add", "a.b-c"]), dict(zip("xyz", rng.sample(values, 3), strict=True)))
            for _ in range(rng.randint(1, 3))
        ]
        text = rng.choice(["", "First,\n\nI add.", " x"])
        message = make_response_message(text, calls)
        rendered = as_text(renderer, renderer.transcript([{"role": "user", "content": "?"}, message]).token_ids)
        response = rendered.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>")
        assert parse_response(response) == ParsedResponse(text, tuple(calls))


def test_responses_are_read_as_by_vllm(renderer: Renderer) -> None:
    """Damaged responses, against vLLM's parser for this form (names and constants aside)."""
    parser, rng, outcomes = Hermes2ProToolParser(renderer.tokenizer), random.Random(1), {True: 0, False: 0}
    good = f"Think.\n{CALL}\n{CALL.replace('1', '[2, {}]')}"
    pieces = ["", "{", "}", '"', "<tool_call>", "</tool_call>", "a", "1"]
    for _ in range(2000):
        text = good
        for _ in range(rng.randint(0, 2)):
            start = rng.randrange(len(text))
            text = text[:start] + rng.choice(pieces) + text[start + rng.randint(0, 9) :]
        theirs, ours = parser.extract_tool_calls(text, None), parse_response(text)
        if not all(re.fullmatch(r"[\w.:-]+", call.function.name) for call in theirs.tool_calls):
            assert ours == ParsedResponse(text)
            continue
        found = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        if all(isinstance(arguments, dict) for _, arguments in found):
            assert [(call.name, call.arguments) for call in ours.calls] == found, text
            assert ours.content == ((theirs.content or "").rstrip() if found else text)
        outcomes[bool(found)] += 1
    assert min(outcomes.values()) > 200, outcomes


@pytest.mark.parametrize(
    "text",
    ["<tool_call>[]</tool_call>", '<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', f"{CALL}<tool_call>", "<tool_call>" + "[" * 5000, CALL * 129],
)  # fmt: skip
def test_a_malformed_call_is_text(text: str) -> None:
    assert parse_response(text) == ParsedResponse(text)


def test_tool_calls_continue_their_own_tokens(renderer: Renderer, tmp_path: Path) -> None:
    """Calls are written as no template writes them, so any rendering of them would be noticed. The
    first sequence is the sampled text followed by two results, one with an image. In a new prompt
    the calls have the sampled text; changed calls are rendered by the template and shown.
    """
    call = '<tool_call> {"name": "add", "arguments": {"x": [2.0]}} </tool_call>'
    odd = f'Two.\n\n<tool_call>{{"arguments": {{"x":1}},"name":"add"}}</tool_call> {call}'
    rollout, _ = play(tmp_path, renderer, "tools", texts=[odd])
    assert json.loads(rollout.turns[-1].tool_call.text) == ["tool_calls", "Two.", {"x": 1}, {"x": [2.0]}, "r1"]
    first, again, changed, plain = (as_text(renderer, context.token_ids) for context in rollout.sequences)
    results = "<tool_response>\n= 0\n</tool_response>\n<tool_response>\n<|vision_start|><|vision_end|>= 1\n</tool_response>"
    assert f"<|im_start|>assistant\n{odd}<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\nr1" in first
    assert f"<|im_start|>assistant\n{odd}<|im_end|>\n<|im_start|>user\n{results}" in again
    written = "\n".join(write_tool_call("add", {"x": x}) for x in (7, [2.0]))
    assert f"<|im_start|>assistant\nTwo.\n{written}<|im_end|>\n<|im_start|>user\n{results}" in changed
    assert "Adds < im_end|> numbers." in first.replace("< |", "< ") and "# Tools" not in plain
    assert rollout.reason.startswith("1 continued, 3 new prompts, response 0 was returned changed: ")
    before, after = re.search("changed: '(.*)' became '(.*)'", rollout.reason).groups()
    assert before.startswith("Two.") and '{"type": "function"' in after
    sampled = [as_text(renderer, [t for t, m in zip(c.token_ids, c.loss_mask, strict=True) if m]) for c in rollout.sequences]
    assert sampled == [f"{odd}<|im_end|>r1<|im_end|>", "r2<|im_end|>", "r3<|im_end|>", "r4<|im_end|>"]
    assert [len(context.images) for context in rollout.sequences] == [2, 1, 2, 0]


def test_calls_are_streamed(renderer: Renderer, tmp_path: Path) -> None:
    rollout, _ = play(tmp_path, renderer, "streamed_calls", texts=[f"So:\n{CALL}\n{CALL}"])
    assert json.loads(rollout.turns[-1].tool_call.text) == ["So:", [["add", '{"x": 1}'], ["add", '{"x": 1}']], "tool_calls"]


def test_each_choice_is_a_turn(renderer: Renderer, tmp_path: Path) -> None:
    """Three choices are three prompts with the same tokens, and the second one is continued."""
    rollout, engine = play(tmp_path, renderer, "choices")
    num_tokens = sum(len(renderer.tokenizer(f"r{number}")["input_ids"]) + 1 for number in range(3))
    assert json.loads(rollout.turns[-1].tool_call.text) == ["r0", "r1", "r2", num_tokens]
    assert engine.contexts[0] == engine.contexts[1] == engine.contexts[2]
    assert [turn.sequence for turn in rollout.turns] == [0, 1, 2, 1]
    assert rollout.reason == "1 branched, 2 new prompts, replaced model"


def test_abandoned_choices_have_no_loss_if_a_setting_says_so(renderer: Renderer, tmp_path: Path) -> None:
    """The second of three choices is continued, so the first and the third are abandoned."""
    for is_trained, expected in ((True, ["r0", "r1r3", "r2"]), (False, ["", "r1r3", ""])):
        rollout, _ = play(tmp_path, renderer, "choices", train_abandoned=is_trained)
        for context, text in zip(rollout.sequences, expected, strict=True):
            sampled = [place for place, mask in enumerate(context.loss_mask) if mask]
            words = as_text(renderer, [context.token_ids[place] for place in sampled])
            assert words.replace("<|im_end|>", "") == text
            assert [place for place, version in enumerate(context.weight_versions) if version >= 0] == sampled
            assert [place for place, logprob in enumerate(context.rollout_logprobs) if logprob] == sampled


def test_a_response_ends_before_a_stop_string(renderer: Renderer, tmp_path: Path) -> None:
    """Both forms of the response continue the sampled tokens, which include the stop string."""
    rollout, _ = play(tmp_path, renderer, "stops", texts=["go()</code>"])
    assert rollout.turns[-1].tool_call.text == "go()"
    assert rollout.reason == "1 continued, 1 branched, replaced model"
    for context in rollout.sequences:
        assert "assistant\ngo()</code><|im_end|>\n<|im_start|>user\nMore" in as_text(renderer, context.token_ids)
    first, _ = rollout.sequences
    assert as_text(renderer, [t for t, m in zip(first.token_ids, first.loss_mask, strict=True) if m]) == "go()</code>r1<|im_end|>"


def test_only_the_reward_key_posts_a_reward(renderer: Renderer, tmp_path: Path) -> None:
    rollout, _ = play(tmp_path, renderer, "posts", reward="posted")
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.75), rollout.reason
    rollout, _ = play(tmp_path, renderer, "forgets", reward="posted")
    assert (rollout.status, rollout.reward) == (Status.FAILED, None) and "no reward was posted" in rollout.reason


class Service(BaseHTTPRequestHandler):
    """Service that runs one agent per request: it asks the policy about the question's images."""

    def do_POST(self) -> None:
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        client = openai.OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0)
        images = [{"type": "image_url", "image_url": {"url": url}} for url in episode["images"]]
        content = [*images, {"type": "text", "text": episode["question"]}]
        text = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}]).choices[0].message.content
        code = 500 if self.path == "/broken" else 200
        body = f"working\n{text}\n".encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        """Log nothing."""


@contextmanager
def serve() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_service_runs_the_agent(renderer: Renderer, tmp_path: Path) -> None:
    with serve() as address:
        rollout, _ = play(tmp_path, renderer, "", url=f"{address}/episode", texts=["r1"])
        assert (rollout.status, rollout.reward, rollout.turns[-1].tool_call.text) == (Status.COMPLETED, 1.0, "r1"), rollout.reason
        (context,) = rollout.sequences
        picture = {"type": "image", "image": pil.new("RGB", (60, 60), "red")}
        asked = renderer.prompt([{"role": "user", "content": [picture, {"type": "text", "text": "Which color?"}]}])
        assert context.token_ids[: len(asked.token_ids)] == asked.token_ids
        rollout, _ = play(tmp_path, renderer, "", url=f"{address}/broken")
        assert rollout.status is Status.FAILED and "status 500 (working\nr0)" in rollout.reason
    rollout, _ = play(tmp_path, renderer, "", url=f"{address}/episode")
    assert (
        rollout.stop_reason is StopReason.PERMANENT_INFRA_ERROR
        and "ConnectError" in rollout.reason
        and "task.options.url=" in rollout.reason
    ), rollout.reason
