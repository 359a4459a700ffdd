"""Agent of the end-to-end test: asks four times in two branches and a new prompt, with images, and
reports the fraction of vowels in the responses as its reward.
"""

import base64
import io
import json
from pathlib import Path

import openai
from PIL import Image

example = json.loads(Path("example.json").read_text())
client = openai.OpenAI(max_retries=0, timeout=300)


def image_part(color: str | None = None) -> dict:
    """Return the question's image, encoded anew each time, or an image of one color."""
    picture = Image.open(example["images"][0]) if color is None else Image.new("RGB", (84, 56), color)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG", compress_level=image_part.level)
    image_part.level = (image_part.level + 1) % 9
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"}}


image_part.level = 1


def say(*messages: dict) -> dict:
    reply = client.chat.completions.create(model="policy", messages=list(messages)).choices[0].message
    return {"role": "assistant", "content": reply.content}


def question() -> dict:
    return {"role": "user", "content": [image_part(), {"type": "text", "text": example["question"]}]}


first = say(question())
second = say(question(), first, {"role": "user", "content": [image_part("blue"), {"type": "text", "text": "and this?"}]})
third = say(question(), first, {"role": "user", "content": [{"type": "text", "text": "why?"}, image_part("red")]})
fourth = say({"role": "user", "content": "one more word"})
text = "".join(reply["content"] for reply in (first, second, third, fourth))
print(json.dumps({"reward": sum(letter in "aeiou" for letter in text) / max(1, len(text))}))
