"""A demonstration cut into what the policy observes and what it replies, as the chat template writes both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL.Image import Image as Picture

from megatron_rl.types import Message

RenderFn = Callable[..., str]
"""(messages, *, speak) -> their text; with `speak` it ends where the assistant's reply begins. ValueError: the template refuses them."""


@dataclass(slots=True, frozen=True)
class TranscriptSegment:
    """A reply and the text before it, behind the reply of the piece before.

    Example: of "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nYes<|im_end|>\\n" the one piece observes all up to "Yes", and its
    reply is "Yes<|im_end|>".
    """

    observation: str
    reply: str
    messages: Sequence[Message]
    """Return the pieces whose text is `observed`."""
    is_trained: bool


def split_transcript(messages: Sequence[Message], render: RenderFn) -> list[TranscriptSegment]:
    """Return a piece for each message of the assistant.

    Raises:
        ValueError: the chat template refuses the messages, or writes earlier ones in another way when later ones follow.
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
    """Return the pictures of messages in order."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]
