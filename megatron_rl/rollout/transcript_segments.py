"""Splits a demonstration into observations and replies, as the chat template writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.types import Message

RenderFn = Callable[..., str]
"""(messages, *, add_generation_prompt) -> text of the messages. With add_generation_prompt it ends
where the assistant's reply begins. Raises ValueError if the template rejects the messages.
"""


@dataclass(slots=True, frozen=True)
class TranscriptSegment:
    r"""A reply and the text before it, from the end of the previous reply on.

    Example: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n" is a single
    segment. Its observation is everything before "Yes", and its reply is "Yes<|im_end|>".
    """

    observation: str
    reply: str
    messages: Sequence[Message]
    """Messages that `observation` renders."""
    is_trained: bool
    """False for a reply with "loss": False."""


def split_transcript(messages: Sequence[Message], render: RenderFn) -> list[TranscriptSegment]:
    """Return one segment for each message of the assistant.

    Raises:
        ValueError: The chat template rejects the messages or writes earlier ones differently when
            later ones follow, or a message of the assistant has an image.
    """
    pieces, done, answered = [], "", -1
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], add_generation_prompt=True)
        after = render(messages[: index + 1], add_generation_prompt=False).removesuffix("\n")
        if not (before.startswith(done) and after.startswith(before)):
            remedy = "write a row for each reply, with the earlier replies as the template leaves them (without <think>)"
            raise ValueError(f"messages[{index}]: the model's chat template rewrites messages before this reply; {remedy}")
        content = message["content"]
        if not isinstance(content, str) and any(part["type"] == "image" for part in content):
            raise ValueError(f"messages[{index}]: the assistant's message shows a picture, which cannot be learned; move it to the user")
        learned = bool(message.get("loss", True))
        pieces.append(TranscriptSegment(before.removeprefix(done), after.removeprefix(before), messages[answered + 1 : index], learned))
        done, answered = after, index
    return pieces


def extract_images(messages: Sequence[Message]) -> list[Picture]:
    """Return the images of the messages in order."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]
