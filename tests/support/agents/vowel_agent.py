"""Agent of the end-to-end test: asks five times in two branches and two new prompts, with images
and a tool call, and reports the fraction of vowels in the responses as its reward.
"""

import base64
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from PIL import Image

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


if __name__ == "__main__":
    import openai

    example = json.loads(Path("example.json").read_text())
    client = openai.OpenAI(max_retries=0, timeout=300)

    def complete(messages: list[dict], **more: object) -> str:
        return client.chat.completions.create(model="policy", messages=messages, **more).choices[0].message.content or ""

    text = converse(example["question"], Image.open(example["images"][0]), complete)
    print(json.dumps({"reward": sum(letter in "aeiou" for letter in text) / max(1, len(text))}))
