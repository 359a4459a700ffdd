"""Records of parsed replies and the interface of tool protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL.Image import Image as Picture

from megatron_rl.types import Message, ToolCall


@dataclass(slots=True, frozen=True)
class CodeAction:
    """Python source to run.

    The source is arbitrary text; errors in it are reported by the sandbox.
    """

    source: str


@dataclass(slots=True, frozen=True)
class ToolAction:
    """Call of an image tool by name (`zoom` or `rotate`).

    The arguments are numbers, strings or lists of those. The tool validates their values.
    """

    name: str
    arguments: Mapping[str, object]


@dataclass(slots=True, frozen=True)
class FinalAnswer:
    """Final answer, without the tags and the box that the protocol wraps it in."""

    text: str


@dataclass(slots=True, frozen=True)
class MalformedReply:
    """Reply that is neither code, tool call nor answer; `reason` is a message to the policy."""

    reason: str


ParsedReply = CodeAction | ToolAction | FinalAnswer | MalformedReply


class ToolProtocol(Protocol):
    """Text format of tool calls, observations and answers.

    `parse_reply(write_answer(text))` returns `FinalAnswer(text)` for every text that contains no
    tags and no surrounding whitespace. `write_code` round-trips to `CodeAction` in the same way.
    """

    name: str
    """Name of the protocol, a value of task.tool_format."""
    stop: tuple[str, ...]
    """Strings that end generation; the reply includes the one that ended it."""

    def write_prompt(self, question: str, pictures: Sequence[Picture]) -> list[Message]:
        """Return the first messages of an episode.

        Raises:
            ValueError: The number of `<image>` placeholders in the question is neither 0 nor the
                number of images.
        """
        ...

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply. Never raises; takes time linear in the length of the text."""
        ...

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return the messages that report the result of a call.

        Args:
            call: Call with its output text or error.
            pictures: Images that the call returned.
            num_previous_images: Number of images that the sequence contains already.
        """
        ...

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Map names to images. Code uses these names: variables, or file names with a suffix."""
        ...

    def write_code(self, source: str) -> str:
        """Return a reply that runs Python source."""
        ...

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        ...
