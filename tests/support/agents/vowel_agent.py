"""Agent of the end-to-end tests: asks four times in two branches and a new prompt, with images, and
reports the fraction of vowels in the responses as its reward.

usage: vowel_agent.py [METRICS_FILE]

With the metrics file of the run, every second group of episodes waits after its first response
until the run has logged a step more. It uses only urllib and Pillow, because every episode starts
it.
"""

import base64
import io
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image

MAX_WAIT_S = 4.0
"""Seconds that an episode waits for a step at most; the first step needs the episode itself."""
example = json.loads(Path("example.json").read_text())
without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def image_part(color: str | None = None) -> dict:
    """Return the question's image, encoded anew each time, or an image of one color."""
    picture = Image.open(example["images"][0]) if color is None else Image.new("RGB", (84, 56), color)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG", compress_level=image_part.level)
    image_part.level = (image_part.level + 1) % 9
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"}}


image_part.level = 1


def ask(*messages: dict) -> dict:
    """Return the policy's response as the message of the next request."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )  # fmt: skip
    with without_proxy.open(request, timeout=300) as response:
        return {"role": "assistant", "content": json.load(response)["choices"][0]["message"]["content"]}


def question() -> dict:
    return {"role": "user", "content": [image_part(), {"type": "text", "text": example["question"]}]}


def count_steps() -> int:
    path = Path(sys.argv[1])
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_a_step(num_steps: int) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while count_steps() <= num_steps and time.monotonic() < deadline:
        time.sleep(0.02)


def play() -> None:
    waits = len(sys.argv) > 1 and int(os.environ["MEGATRON_RL_SEED"]) % 2 == 0
    num_steps = count_steps() if waits else 0
    first = ask(question())
    if waits:
        wait_for_a_step(num_steps)
    second = ask(question(), first, {"role": "user", "content": [image_part("blue"), {"type": "text", "text": "and this?"}]})
    third = ask(question(), first, {"role": "user", "content": [{"type": "text", "text": "why?"}, image_part("red")]})
    fourth = ask({"role": "user", "content": "one more word"})
    text = "".join(reply["content"] for reply in (first, second, third, fourth))
    print(json.dumps({"reward": sum(letter in "aeiou" for letter in text) / max(1, len(text))}))


play()
