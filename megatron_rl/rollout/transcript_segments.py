"""Splits a demonstration into observations and replies, as rendered by the chat template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.types import Message

RenderFn = Callable[..., str]
"""Takes (messages, *, add_generation_prompt) and returns the rendered text. With
add_generation_prompt=True, the text ends where the assistant's reply begins. Raises ValueError if
the template rejects the messages.
"""


@dataclass(slots=True, frozen=True)
class TranscriptSegment:
    r"""A reply and its observation, which is the text between the previous reply and this reply.

    Example: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n" is a single
    segment. The observation of the segment is everything before "Yes", and the reply is
    "Yes<|im_end|>".
    """

    observation: str
    reply: str
    messages: Sequence[Message]
    """Messages that are rendered in `observation`."""
    is_trained: bool
    """False if `loss` is False in the message that contains the reply."""


def split_transcript(messages: Sequence[Message], render: RenderFn) -> list[TranscriptSegment]:
    """Split the messages into one segment per assistant message.

    Raises:
        ValueError: The chat template rejects the messages or renders earlier messages differently
            when later messages follow, or an assistant message contains an image.
    """
    pieces, done, answered = [], "", -1
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], add_generation_prompt=True)
        after = render(messages[: index + 1], add_generation_prompt=False).removesuffix("\n")
        if not (before.startswith(done) and after.startswith(before)):
            remedy = "write one row per response, with the earlier responses as the template renders them (without <think>)"
            raise ValueError(f"messages[{index}]: the model's chat template rewrites messages before this response; {remedy}")
        content = message["content"]
        if not isinstance(content, str) and any(part["type"] == "image" for part in content):
            raise ValueError(
                f"messages[{index}]: the assistant message contains an image, which cannot be trained on; move the image to a user message"
            )
        learned = bool(message.get("loss", True))
        pieces.append(TranscriptSegment(before.removeprefix(done), after.removeprefix(before), messages[answered + 1 : index], learned))
        done, answered = after, index
    return pieces


def extract_images(messages: Sequence[Message]) -> list[Picture]:
    """Return the images of the messages in order."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]
