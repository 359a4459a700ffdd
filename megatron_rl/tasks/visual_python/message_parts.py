"""Builds chat messages from texts and images.

Texts are treated as data: if a text contains the name of a special token, the renderer does not
turn the name into that token.
"""

from collections.abc import Callable, Sequence
from typing import Any

from PIL.Image import Image as Picture

from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.types import Message

MessagePart = str | Picture


def make_message(role: str, *parts: MessagePart) -> Message:
    """Return a message with the given texts and images.

    Consecutive texts are merged into one part, because the renderer checks each part separately.
    """
    content: list[dict[str, Any]] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        content += [{"type": "text", "text": text}] if text else []
        content.append({"type": "image", "image": part})
        text = ""
    content += [{"type": "text", "text": text}] if text else []
    return {"role": role, "content": content}


def insert_images(question: str, pictures: Sequence[Picture], wrap_image: Callable[[int, Picture], list[MessagePart]]) -> list[MessagePart]:
    """Return the question as message parts, with each image in place of its `<image>` placeholder.

    If the question has no placeholders, the images precede the text.

    Args:
        question: Text of the question.
        pictures: Images, in the order of the placeholders.
        wrap_image: Function that returns the message parts for an image. Its arguments are the
            index of the image and the image.

    Raises:
        ValueError: The number of placeholders is neither 0 nor the number of images.
    """
    framed = [wrap_image(index, picture) for index, picture in enumerate(pictures)]
    first, *rest = question.split(IMAGE_PLACEHOLDER)
    if not rest:
        return [*(part for parts in framed for part in [*parts, "\n"]), question]
    if len(rest) != len(pictures):
        raise ValueError(f"the question has {len(rest)} image placeholders ({IMAGE_PLACEHOLDER}) but {len(pictures)} images")
    return [first, *(part for parts, text in zip(framed, rest, strict=True) for part in [*parts, text])]


def describe_sizes(names: Sequence[str], pictures: Sequence[Picture]) -> str:
    """Return a text that states the size of each image.

    For an image of 640 x 480 pixels, the text is `image_clue_0 has 640 x 480 pixels (width x
    height).`
    """
    return " ".join(
        f"{name} has {picture.width} x {picture.height} pixels (width x height)." for name, picture in zip(names, pictures, strict=True)
    )


def write_code_block(source: str) -> str:
    """Return a fenced Python block in <code> tags, the format of PyVision and CodeV."""
    return f"<code>\n```python\n{source}\n```\n</code>"
