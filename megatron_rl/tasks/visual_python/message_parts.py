"""Messages from texts and pictures. What a text holds is data: the renderer keeps the names of special tokens in it from being tokens."""

from collections.abc import Callable, Sequence

from PIL.Image import Image as Picture

from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.types import Message

MessagePart = str | Picture


def make_message(role: str, *parts: MessagePart) -> Message:
    """Texts in a row become one part: what the renderer looks at, it sees whole."""
    content: list[dict[str, object]] = []
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
    """The question with each picture, as `wrap_image` shows it, where its `<image>` stands; pictures without a place come first.

    Raises ValueError when the question has places, but not one for each picture.
    """
    framed = [wrap_image(index, picture) for index, picture in enumerate(pictures)]
    first, *rest = question.split(IMAGE_PLACEHOLDER)
    if not rest:
        return [*(part for parts in framed for part in [*parts, "\n"]), question]
    if len(rest) != len(pictures):
        raise ValueError(f"the question has {len(rest)} places for pictures ({IMAGE_PLACEHOLDER}) and {len(pictures)} pictures")
    return [first, *(part for parts, text in zip(framed, rest, strict=True) for part in [*parts, text])]


def describe_sizes(names: Sequence[str], pictures: Sequence[Picture]) -> str:
    """Example: `image_clue_0 has 640 x 480 pixels (width x height).`"""
    return " ".join(
        f"{name} has {picture.width} x {picture.height} pixels (width x height)." for name, picture in zip(names, pictures, strict=True)
    )


def write_code_block(source: str) -> str:
    """How PyVision and CodeV write code: fenced, in the tags."""
    return f"<code>\n```python\n{source}\n```\n</code>"
