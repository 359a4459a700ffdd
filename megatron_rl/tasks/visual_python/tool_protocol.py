"""Interface of tool protocols, and the types of parsed replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from PIL.Image import Image as Picture

from megatron_rl.types import Message, ToolCall


@dataclass(slots=True, frozen=True)
class CodeAction:
    """Python source to run.

    The source is arbitrary text. The sandbox reports errors in the source.
    """

    source: str


@dataclass(slots=True, frozen=True)
class ToolAction:
    """Call to the tool `name`, which is `zoom`, `rotate` or a tool of an MCP server.

    Arguments of zoom and rotate are null, numbers, strings, or lists of such values. The tool
    validates the arguments.
    """

    name: str
    arguments: Mapping[str, object]


@dataclass(slots=True, frozen=True)
class FinalAnswer:
    """Final answer, without the protocol's tags and box around the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class MalformedReply:
    """Reply without valid code, tool call or answer.

    `reason` is the error message that the policy receives.
    """

    reason: str


ParsedReply = CodeAction | ToolAction | FinalAnswer | MalformedReply


class ToolProtocol(Protocol):
    """Text format of tool calls, observations and answers.

    `parse_reply(write_answer(text))` returns `FinalAnswer(text)` for every text without tags and
    without surrounding whitespace. If the protocol runs code, `parse_reply(write_code(source))`
    returns `CodeAction(source)`.
    """

    name: str
    """Name of the protocol in task.tool_format."""
    stop: ClassVar[tuple[str, ...]]
    """Stop strings for generation. A generated stop string is kept at the end of the reply."""

    def write_prompt(self, question: str, pictures: Sequence[Picture], /) -> list[Message]:
        """Return the messages of the prompt at the start of an episode.

        Raises:
            ValueError: The number of `<image>` placeholders in the question is neither 0 nor the
                number of images.
        """
        ...

    def parse_reply(self, reply: str) -> ParsedReply:
        """Parse a reply without raising exceptions, in time linear in the reply's length."""
        ...

    def write_observation(self, call: ToolCall, pictures: Sequence[Picture], *, num_previous_images: int) -> list[Message]:
        """Return the messages that report the result of a call.

        Args:
            call: Call with its output text or error.
            pictures: Images that the call returned.
            num_previous_images: Number of images that are already in the sequence.
        """
        ...

    def name_images(self, pictures: Sequence[Picture]) -> dict[str, Picture]:
        """Return the images, keyed by the names that code uses for the images.

        A name is a variable name, or a file name with a suffix.
        """
        ...

    def write_code(self, source: str) -> str:
        """Return a reply that runs the given Python source."""
        ...

    def write_answer(self, text: str) -> str:
        """Return a reply that gives the final answer."""
        ...
