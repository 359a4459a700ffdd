"""A recorded context as the conversation that it was, in messages: the way back through a chat template of Qwen's kind.

What the way there (rollout/renderer.py) makes of the messages is held against the context, so that whatever cannot be told in messages
is noticed and not guessed.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from megatron_rl.data.records import CONTROL
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Message, TokenSequence

END = "<|im_end|>"
MESSAGE = re.compile(r"<\|im_start\|>(system|user|tool|assistant)\n(.*?)<\|im_end\|>\n?", re.DOTALL)
MIXED = "a message has tokens of the template in it"
RESIZED = "a picture would be resized again: of a size between two, or not seen with these model.min_pixels and model.max_pixels"
REWRITTEN = "the template would write it in another way"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


class Untold(ValueError):
    """A context that no list of messages stands for, and why."""


def messages_of(context: TokenSequence, renderer: Renderer, *, cut_at: int) -> list[Message]:
    """What was said up to the last reply, with pictures. A reply of `cut_at` tokens that the policy did not end is no whole one.

    Untold: the messages would not be rendered as this context.
    """
    if any(last - first >= cut_at and context.token_ids[last - 1] != renderer.end_id for first, last in _replies(context)):
        raise Untold("a reply was cut off by task.max_new_tokens")
    if any(image.pil is None for image in context.images):
        raise Untold("one of its pictures is not there")
    words, remaining, messages = _words(context, renderer), iter(context.images), []
    if "\ufffd" in "".join(_said(context, renderer)):
        raise Untold("a reply is no text")
    if "\0" in words:
        raise Untold("a message holds a NUL character, which files of transcripts may not")
    for found in MESSAGE.finditer(words):
        role, content = found.groups()
        if any(token in content.replace(PICTURE, "") for token in CONTROL):
            raise Untold(MIXED)
        if role == "assistant" and not content.strip():
            raise Untold("a reply says nothing")
        messages.append({"role": role, "content": content if role == "assistant" else list(_parts(content, remaining))})
    if "".join(found[0] for found in MESSAGE.finditer(words)) != words or next(remaining, None) is not None:
        raise Untold(MIXED)
    try:
        again = renderer.transcript(messages)
    except ValueError as error:
        raise Untold(REWRITTEN) from error
    if [image.key for image in again.images] != [image.key for image in context.images]:
        raise Untold(RESIZED)
    if _words(again, renderer) != words or _said(again, renderer) != _said(context, renderer):
        raise Untold(REWRITTEN)
    return messages


def _words(context: TokenSequence, renderer: Renderer) -> str:
    """Its text with one placeholder a picture. A last reply that ended at a word of the task's (Task.stop) is closed, as others are."""
    sizes, ids, place = iter(context.images), [], 0
    while place < len(context.token_ids):
        token = context.token_ids[place]
        ids.append(token)
        place += next(sizes).num_tokens if token == renderer.image_token_id else 1
    return renderer.tokenizer.decode(ids).removesuffix(END) + END


def _parts(content: str, images: Iterator[Image]) -> Iterator[dict[str, object]]:
    for number, text in enumerate(content.split(PICTURE)):
        if number:
            yield {"type": "image", "image": next(images).pil}
        if text:
            yield {"type": "text", "text": text}


def _replies(context: TokenSequence) -> list[tuple[int, int]]:
    """First and one-past-last token of what was sampled between two observations."""
    mask = [0, *context.loss_mask, 0]
    borders = [place for place, (before, now) in enumerate(pairwise(mask)) if before != now]
    return list(zip(borders[::2], borders[1::2], strict=True))


def _said(context: TokenSequence, renderer: Renderer) -> list[str]:
    """The replies as text: the same words may have other tokens, and their end need not have been sampled."""
    return [renderer.tokenizer.decode(context.token_ids[first:last]).removesuffix(END) for first, last in _replies(context)]
