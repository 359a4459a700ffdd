"""Agent of the end-to-end tests: asks five times in two branches and two new prompts, with images
and a tool call, and reports the fraction of vowels in the responses as its reward.

usage: vowel_agent.py [METRICS_FILE]

With the metrics file of the run, every second group of episodes waits after its first response
until the run has logged a step more. It uses only urllib and Pillow, because every episode starts
it.
"""

import base64
import io
import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from PIL import Image

MAX_WAIT_S = 4.0
"""Seconds that an episode waits for a step at most; the first step needs the episode itself."""
SCHEMA = {"name": "look", "description": "Shows a part.", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": SCHEMA}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}


def converse(question: str, picture: Image.Image, ask: Callable[..., str]) -> str:
    """Return the text of all responses. `ask` takes messages and `tools`, and returns a response.

    The picture is encoded anew each time.
    """
    levels, texts = itertools.cycle(range(1, 9)), []

    def image_part(image: Image.Image) -> dict:
        encoded = io.BytesIO()
        image.save(encoded, "PNG", compress_level=next(levels))
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"}}

    def say(*messages: dict, **more: object) -> dict:
        texts.append(ask(list(messages), **more))
        return {"role": "assistant", "content": texts[-1]}

    def first_message() -> dict:
        return {"role": "user", "content": [image_part(picture), {"type": "text", "text": question}]}

    def shown(color: str) -> dict:
        return image_part(Image.new("RGB", (84, 56), color))

    first = say(first_message())
    say(first_message(), first, {"role": "user", "content": [shown("blue"), {"type": "text", "text": "and this?"}]})
    say(first_message(), first, {"role": "user", "content": [{"type": "text", "text": "why?"}, shown("red")]})
    say({"role": "user", "content": "one more word"})
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    say(first_message(), called, {"role": "tool", "tool_call_id": "call_1", "content": [shown("green")]}, tools=TOOLS)
    return "".join(texts)


def complete(messages: list[dict], **more: object) -> str:
    """Return the policy's response."""
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps({"model": "policy", "messages": messages, **more}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )  # fmt: skip
    with without_proxy.open(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def count_steps(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def complete_and_wait(metrics: Path) -> Callable[..., str]:
    """Return `complete`, which waits after its first response until a step more has been logged."""
    num_steps, deadline = count_steps(metrics), time.monotonic() + MAX_WAIT_S

    def ask(messages: list[dict], **more: object) -> str:
        response = complete(messages, **more)
        while count_steps(metrics) <= num_steps and time.monotonic() < deadline:
            time.sleep(0.02)
        return response

    return ask


def play() -> None:
    example = json.loads(Path("example.json").read_text())
    waits = len(sys.argv) > 1 and int(os.environ["MEGATRON_RL_SEED"]) % 2 == 0
    ask = complete_and_wait(Path(sys.argv[1])) if waits else complete
    text = converse(example["question"], Image.open(example["images"][0]), ask)
    print(json.dumps({"reward": sum(letter in "aeiou" for letter in text) / max(1, len(text))}))


if __name__ == "__main__":
    play()
