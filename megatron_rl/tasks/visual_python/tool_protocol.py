"""How an agent's replies are read and how it is answered: the records, and what every protocol of tools can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL.Image import Image as Picture

from megatron_rl.types import Message, ToolCall


@dataclass(slots=True, frozen=True)
class CodeAction:
    """Python to be run. Any text: what is wrong with it the sandbox will say."""

    source: str


@dataclass(slots=True, frozen=True)
class ToolAction:
    """A tool by name, `zoom` or `rotate`, and arguments that are numbers, texts or lists of those. Their values are not checked yet."""

    name: str
    arguments: Mapping[str, object]


@dataclass(slots=True, frozen=True)
class FinalAnswer:
    """The final answer, without the tags and the box that the protocol wraps it in."""

    text: str


@dataclass(slots=True, frozen=True)
class MalformedReply:
    """None of these; the reason is a sentence for the policy."""

    reason: str


ParsedReply = CodeAction | ToolAction | FinalAnswer | MalformedReply


class ToolProtocol(Protocol):
    """One way of speaking about tools. `read(write_answer(text)) == Answer(text)` for every text that has no tags in it; so for code."""

    name: str
    stop: tuple[str, ...]
    """A reply ends behind one of these."""

    def write_prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        """The first messages. Raises ValueError when the question places more pictures (`<image>`) than there are."""
        ...

    def parse_reply(self, reply: str) -> ParsedReply:
        """Never raises, in time linear in the length, whatever the text."""
        ...

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """What came of a call: its text or error and the pictures it returned; `num_previous_images` pictures stand in the context
        already."""
        ...

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """The names by which code finds the pictures: variables, or files with a suffix."""
        ...

    def write_code(self, source: str) -> str: ...

    def write_answer(self, text: str) -> str: ...
