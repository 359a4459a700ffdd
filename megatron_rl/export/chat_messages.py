"""Conversion of a recorded token sequence to chat messages, for chat templates in Qwen's format.

The resulting messages are rendered again (rollout/renderer.py) and compared with the sequence. The
comparison detects sequences that messages cannot represent; these sequences are rejected.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from megatron_rl.data.records import SPECIAL_TOKENS
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Message, TokenSequence

END_OF_MESSAGE = "<|im_end|>"
MESSAGE_PATTERN = re.compile(r"<\|im_start\|>(system|user|tool|assistant)\n(.*?)<\|im_end\|>\n?", re.DOTALL)
TEMPLATE_TOKENS_ERROR = "a message contains special tokens of the chat template"
RESIZED_IMAGE_ERROR = (
    "an image would be resized again: a second resize changes its size, or model.min_pixels and model.max_pixels differ from the run"
)
TEMPLATE_MISMATCH_ERROR = "the chat template renders the messages differently"
IMAGE_TOKENS = "<|vision_start|><|image_pad|><|vision_end|>"


class NotConvertible(ValueError):
    """No list of messages can represent a sequence; the exception's message states the reason."""


def sequence_to_messages(context: TokenSequence, renderer: Renderer, *, max_new_tokens: int) -> list[Message]:
    """Convert a sequence, up to its last response, to messages with images.

    Raises:
        NotConvertible: The messages would be rendered differently, the sequence contains invalid
            text or lacks an image, or a response was truncated at `max_new_tokens`.
    """
    if any(last - first >= max_new_tokens and context.token_ids[last - 1] != renderer.end_id for first, last in _reply_spans(context)):
        raise NotConvertible("a response was truncated at task.max_new_tokens")
    if any(image.pil is None for image in context.images):
        raise NotConvertible("an image is missing")
    words, remaining, messages = _decode_text(context, renderer), iter(context.images), []
    if "\ufffd" in "".join(_decode_replies(context, renderer)):
        raise NotConvertible("a response is not valid text")
    if "\0" in words:
        raise NotConvertible("a message contains a NUL character, which transcript files must not contain")
    for found in MESSAGE_PATTERN.finditer(words):
        role, content = found.groups()
        if any(token in content.replace(IMAGE_TOKENS, "") for token in SPECIAL_TOKENS):
            raise NotConvertible(TEMPLATE_TOKENS_ERROR)
        if role == "assistant" and not content.strip():
            raise NotConvertible("a response is empty")
        messages.append({"role": role, "content": content if role == "assistant" else list(_split_parts(content, remaining))})
    if "".join(found[0] for found in MESSAGE_PATTERN.finditer(words)) != words or next(remaining, None) is not None:
        raise NotConvertible(TEMPLATE_TOKENS_ERROR)
    try:
        again = renderer.transcript(messages)
    except ValueError as error:
        raise NotConvertible(TEMPLATE_MISMATCH_ERROR) from error
    if [image.key for image in again.images] != [image.key for image in context.images]:
        raise NotConvertible(RESIZED_IMAGE_ERROR)
    if _decode_text(again, renderer) != words or _decode_replies(again, renderer) != _decode_replies(context, renderer):
        raise NotConvertible(TEMPLATE_MISMATCH_ERROR)
    return messages


def _decode_text(context: TokenSequence, renderer: Renderer) -> str:
    """Decode the sequence to text, with one placeholder per image.

    If the last response ended with a stop string (Task.stop), the missing end-of-message token is
    appended.
    """
    sizes, ids, place = iter(context.images), [], 0
    while place < len(context.token_ids):
        token = context.token_ids[place]
        ids.append(token)
        place += next(sizes).num_tokens if token == renderer.image_token_id else 1
    return renderer.tokenizer.decode(ids).removesuffix(END_OF_MESSAGE) + END_OF_MESSAGE


def _split_parts(content: str, images: Iterator[Image]) -> Iterator[dict[str, object]]:
    for number, text in enumerate(content.split(IMAGE_TOKENS)):
        if number:
            yield {"type": "image", "image": next(images).pil}
        if text:
            yield {"type": "text", "text": text}


def _reply_spans(context: TokenSequence) -> list[tuple[int, int]]:
    """Return the half-open range (start, stop) of each contiguous run of sampled tokens."""
    mask = [0, *context.loss_mask, 0]
    borders = [place for place, (before, now) in enumerate(pairwise(mask)) if before != now]
    return list(zip(borders[::2], borders[1::2], strict=True))


def _decode_replies(context: TokenSequence, renderer: Renderer) -> list[str]:
    """Decode the responses to text, without the end-of-message token.

    Responses are compared as text, because the same text can be tokenized differently and the
    end-of-message token may not have been sampled.
    """
    return [renderer.tokenizer.decode(context.token_ids[first:last]).removesuffix(END_OF_MESSAGE) for first, last in _reply_spans(context)]
