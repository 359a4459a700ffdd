"""Surveys all transcripts before training, and returns counts and one line per kind of error."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.config import Settings
from megatron_rl.data.problem_lines import MAX_LINES
from megatron_rl.data.survey import Size
from megatron_rl.data.unread_names import ImageColumnCounts, UnreadColumns
from megatron_rl.types import Message

CheckLength = Callable[[Sequence[Message], Sequence[Size]], None]
"""Function that raises ValueError if a conversation is too long.

Its arguments are the messages and the size (width, height) of each image.
"""


class TranscriptMeasurer(Protocol):
    """Part of the renderer's interface that the checks of transcripts need."""

    max_positions: int
    """Maximum sequence length of the model in tokens."""

    def transcript_length(self, messages: Sequence[Message], sizes: Sequence[Size]) -> int:
        """Return the number of tokens in a conversation."""
        ...


def make_length_check(settings: Settings, measurer: TranscriptMeasurer) -> CheckLength:
    """Return a function that rejects conversations too long for the model or the planned memory.

    Conversations are never truncated. Each conversation is one sequence in one micro-batch, even if
    it is longer than batch.micro_batch_tokens. Memory is planned for the larger of
    batch.micro_batch_tokens and engine.max_model_len (memory_plan/gpu_memory.py).
    """
    planned = max(settings.batch.micro_batch_tokens, settings.engine.max_model_len)

    def check(messages: Sequence[Message], sizes: Sequence[Size]) -> None:
        length = measurer.transcript_length(messages, sizes)
        if length > measurer.max_positions:
            raise ValueError(f"{length} tokens, but the model supports {measurer.max_positions}; shorten the conversation")
        if length > planned:
            raise ValueError(
                f"{length} tokens, but memory is planned for {planned}; "
                f"raise batch.micro_batch_tokens={settings.batch.micro_batch_tokens}, lower model.max_pixels, or shorten the conversation"
            )

    return check


_WHERE = re.compile(r"^(.+? row \d+: )")
_READS = "only messages are trained, and loss: false in a message masks a response"


_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(slots=True, frozen=True)
class ParsedTranscript:
    """The conversation in a row, and the values of the row that are not read."""

    messages: list[Message]
    """Messages whose contents are lists of parts; images are StoredImage objects.

    A message with the key loss and the value False is a masked response.
    """
    unread_values: Mapping[str, object]
    """Values of the row that are not read, keyed by column."""
    columns: tuple[str, ...]
    """Names of the row's columns."""
    image_column: str
    """Name of the column with the row's images; "" if the row has no images."""


@dataclass(slots=True)
class TranscriptSurvey:
    """Counts of rows, and errors grouped by kind.

    Errors are of the same kind if their messages differ only in the file, the row and numbers.
    """

    num_rows: int
    num_images: int = 0
    num_replies: int = 0
    num_masked: int = 0
    """Number of masked responses, which are part of the sequences but are not trained on."""
    num_only_thinking: int = 0
    """Number of conversations in which a response to train on contains only `<think>` blocks."""
    first_only_thinking: str = ""
    first_lines: dict[str, str] = field(default_factory=dict)
    """Maps a kind of error to the first message of this kind, which names the file and the row."""
    num_rows_of: dict[str, int] = field(default_factory=dict)
    """Maps a kind of error to the number of rows with this error."""
    columns: dict[str, None] = field(default_factory=dict)
    """Names of the columns in usable rows."""
    unread: UnreadColumns = field(default_factory=UnreadColumns)
    pictured: ImageColumnCounts = field(default_factory=ImageColumnCounts)

    def add_transcript(self, row: ParsedTranscript, *, where: str, check_length: CheckLength | None = None) -> None:
        """Count a conversation.

        Raises:
            ValueError: an image is damaged, or the conversation is too long.
        """
        messages = row.messages
        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        sizes = [image.size() for image in images]
        for image in images:
            image.check_complete()
        if check_length is not None:
            try:
                check_length(messages, sizes)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        replies = [message for message in messages if message["role"] == "assistant"]
        self.num_images += len(images)
        self.num_replies += len(replies)
        self.num_masked += sum("loss" in reply for reply in replies)
        if any("loss" not in reply and _only_thinks(reply) for reply in replies):
            self.num_only_thinking += 1
            self.first_only_thinking = self.first_only_thinking or where
        self.columns |= dict.fromkeys(row.columns)
        self.unread.add(row.unread_values, where)
        self.pictured.add(row.image_column, where)

    @property
    def warnings(self) -> list[str]:
        """Warnings about columns that are not read, missing images, and missing answers."""
        return [*self.pictured.format_lines(), *self._thinking_lines(), *self.unread.format_lines(_READS)]

    def _thinking_lines(self) -> list[str]:
        if not self.num_only_thinking:
            return []
        count = f"{self.num_only_thinking} of {self.num_rows} conversations have a response without text after its <think>"
        return [
            f"{self.first_only_thinking}: {count}, and this response is trained on: add an answer, or write loss: false into the message"
        ]

    def add_error(self, line: str) -> None:
        """Count a row that cannot be used."""
        kind = re.sub(r"\d+", "0", _WHERE.sub("", line))
        self.first_lines.setdefault(kind, line)
        self.num_rows_of[kind] = self.num_rows_of.get(kind, 0) + 1

    @property
    def errors(self) -> list[str]:
        """Error lines, one for each of the first MAX_LINES kinds of error, with the number of rows.

        If there are more kinds of error, a last line reports the number of rows with errors of the
        remaining kinds.
        """
        lines = [line + self._describe_count(kind) for kind, line in self.first_lines.items()]
        rest = sum(list(self.num_rows_of.values())[MAX_LINES:])
        return lines[:MAX_LINES] + ([f"and {rest} more rows"] if rest else [])

    def raise_on_errors(self) -> None:
        """Raise ValueError if there are errors.

        The message contains the first error and the number of rows with errors.
        """
        if not self.first_lines:
            return
        (kind, line), *others = self.first_lines.items()
        num = sum(self.num_rows_of[other] for other, _ in others)
        raise ValueError(
            line + self._describe_count(kind) + (f" (and {num} rows with other errors; launch/doctor.py lists them)" if others else "")
        )

    def _describe_count(self, kind: str) -> str:
        num = self.num_rows_of[kind]
        if num == 1:
            return ""
        return f" (in all {num} rows)" if num == self.num_rows else f" (in {num} of {self.num_rows} rows)"


def _only_thinks(reply: Message) -> bool:
    """Return True if a response consists of `<think>` blocks, of which the last may be unclosed.

    A response with tool calls does not.
    """
    text = "".join(str(part["text"]) for part in reply["content"] if part["type"] == "text")
    return "<think>" in text and "tool_calls" not in reply and not _THOUGHTS.sub("", text).strip()
