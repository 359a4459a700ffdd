"""Conversations for supervised fine-tuning before RL, from JSON lines, JSON lists or Parquet.

The columns of a row are read in transcript_forms.py, the keys of a message in
transcript_messages.py, tools and tool calls in transcript_tools.py, and the contents of a message
in transcript_parts.py. After an optional system message, user (or tool) and assistant messages
alternate, and the last message comes from the assistant. A response is masked if its message has a
key in LOSS_FLAGS, such as loss, with the value 0 or false. All other responses are trained on,
including their tool calls.
"""

from collections.abc import Sequence
from typing import overload

import numpy as np

from megatron_rl.config import ColumnSettings, DataSettings, require
from megatron_rl.data.records import DataRecord, RecordFiles
from megatron_rl.data.transcript_forms import TOOLS_COLUMN, find_unread_columns, read_conversation, read_images
from megatron_rl.data.transcript_messages import RawMessage, check_calls, check_turns, is_empty
from megatron_rl.data.transcript_parts import ContentPart, read_parts
from megatron_rl.data.transcript_survey import CheckLength, ParsedTranscript, TranscriptSurvey
from megatron_rl.data.transcript_tools import read_tools
from megatron_rl.data.unread_names import UnreadColumns
from megatron_rl.errors import InfraError
from megatron_rl.types import Demonstration, Message

TRANSCRIPTS_SPLIT, ANSWERS_SPLIT = "transcripts", "answers"
"""Names of the demonstration splits (sft.splits) for user data: the files in
task.data.demonstrations, and the questions in task.data.train with their reference answers.
"""


class TranscriptDataset(Sequence[list[Message]]):
    """Conversations in data files.

    Conversations are read and their images are decoded on access. Slicing returns a view.
    """

    def __init__(self, records: RecordFiles, *, row_indices: range | None = None, warnings: Sequence[str] = ()) -> None:
        self.records, self.warnings = records, warnings
        self._row_indices = range(len(records)) if row_indices is None else row_indices

    def __len__(self) -> int:
        return len(self._row_indices)

    @overload
    def __getitem__(self, index: int) -> list[Message]: ...

    @overload
    def __getitem__(self, index: slice) -> "TranscriptDataset": ...

    def __getitem__(self, index: int | slice) -> "list[Message] | TranscriptDataset":
        """Return the messages of a conversation; for a slice, return a view.

        Raises:
            ValueError: an image cannot be decoded.
        """
        if isinstance(index, slice):
            return TranscriptDataset(self.records, row_indices=self._row_indices[index], warnings=self.warnings)
        return self.load_demonstration(index).messages

    def load_demonstration(self, index: int) -> Demonstration:
        """Return a conversation with decoded images, together with its file and row.

        Raises:
            ValueError: an image cannot be decoded.
        """
        record = self.records[self._row_indices[index]]
        try:
            return Demonstration([_decode_images(message) for message in read_transcript(record).messages], where=record.where)
        except InfraError as fault:
            raise ValueError(str(fault)) from fault

    def parse(self, index: int) -> ParsedTranscript:
        """Return a conversation with its images as StoredImage objects, without decoding them."""
        return read_transcript(self.records[self._row_indices[index]])

    def locate(self, index: int) -> str:
        """Return the file and row of a conversation without reading the conversation."""
        return self.records.locate(self._row_indices[index])


def open_transcripts(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), ignored: Sequence[str] = ()
) -> TranscriptDataset:  # fmt: skip
    """Return a data set of the conversations in the files, which are read on access.

    Columns listed in `ignored` cause no warnings.

    Raises:
        ValueError: there are no files, or the files have no rows.
    """
    columns = ColumnSettings(ignored=list(ignored))
    return TranscriptDataset(
        RecordFiles(paths, images_root=images_root, image_roots=image_roots, key="task.data.demonstrations", columns=columns)
    )


def load_transcripts(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), ignored: Sequence[str] = ()
) -> TranscriptDataset:  # fmt: skip
    """Return the conversations in the files after surveying every row and image.

    Raises:
        ValueError: a row cannot be used; the message names the file and row.
    """
    opened = open_transcripts(paths, images_root=images_root, image_roots=image_roots, ignored=ignored)
    found = survey_transcripts(opened)
    found.raise_on_errors()
    return TranscriptDataset(opened.records, warnings=found.warnings)


def survey_transcripts(opened: TranscriptDataset, *, check_length: CheckLength | None = None) -> TranscriptSurvey:
    """Survey every conversation.

    The survey also reads the first and last bytes of every image. `check_length` raises ValueError
    for a conversation that is too long.
    """
    found = TranscriptSurvey(num_rows=len(opened), unread=UnreadColumns(opened.records.ignored_columns))
    for place in range(len(opened)):
        try:
            found.add_transcript(opened.parse(place), where=opened.locate(place), check_length=check_length)
        except ValueError as error:
            found.add_error(str(error))
    for line in found.unread.errors(found.columns):
        found.add_error(line)
    return found


class ShuffledDemonstrations(Sequence[Demonstration]):
    """Demonstrations from shuffled passes over all conversations, read on access.

    With the same seed, a smaller `num` selects a prefix of the demonstrations that a larger `num`
    selects.
    """

    def __init__(self, dataset: TranscriptDataset, *, num: int, seed: int) -> None:
        self._dataset, self.warnings = dataset, dataset.warnings
        draw = np.random.default_rng(seed)
        rounds = -(-num // len(dataset))
        self._row_indices = np.concatenate([draw.permutation(len(dataset)) for _ in range(rounds)])[:num].tolist()

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> Demonstration:
        return self._dataset.load_demonstration(self._row_indices[index])

    def check_lengths(self, check_length: CheckLength) -> None:
        """Raise ValueError if `check_length` rejects a conversation.

        The message names the file and row of the first rejected conversation.
        """
        found = TranscriptSurvey(num_rows=len(set(self._row_indices)))
        for place in sorted(set(self._row_indices)):
            try:
                found.add_transcript(self._dataset.parse(place), where=self._dataset.locate(place), check_length=check_length)
            except ValueError as error:
                found.add_error(str(error))
        found.raise_on_errors()


def load_demonstrations(data: DataSettings, split: str, *, num: int, seed: int) -> ShuffledDemonstrations:
    """Return the demonstrations in user files for supervised fine-tuning before RL.

    Raises:
        ValueError: no files are given, or a row cannot be used.
    """
    words = f"'sft.splits=[{TRANSCRIPTS_SPLIT}]' 'sft.steps=[N]' 'task.data.demonstrations=[FILE.jsonl]'"
    require(split == TRANSCRIPTS_SPLIT, "sft.splits", split, f"this task supports only transcript files: {words}")
    remedy = "set the transcript files: JSON lines, JSON lists or Parquet"
    require(bool(data.demonstrations), "task.data.demonstrations", data.demonstrations, remedy)
    roots = {"images_root": data.images, "image_roots": data.image_roots}
    return ShuffledDemonstrations(load_transcripts(data.demonstrations, **roots, ignored=data.columns.ignored), num=num, seed=seed)


def read_transcript(record: DataRecord) -> ParsedTranscript:
    """Return the conversation in a row, and the values of the row that are not read.

    Raises:
        ValueError: the row is not a conversation, or has fields that are not read but could change
            the training example. The message names the file, row and field.
    """
    column, given = read_conversation(record)
    check_turns(record, given, column=column)
    given_tools = record.row.get(TOOLS_COLUMN, "")
    tools = [] if is_empty(given_tools) else read_tools(record, given_tools, TOOLS_COLUMN)
    check_calls(record, given, tools=[tool["function"]["name"] for tool in tools])
    image_column, images = read_images(record)
    contents = read_parts(record, given, images, column=image_column)
    for message, parts in zip(given, contents, strict=True):
        text = "".join(str(part["text"]) for part in parts if part["type"] == "text")
        has_words = any(character.isprintable() and not character.isspace() for character in text)
        if message.role == "assistant" and message.is_learned and not has_words and not message.calls:
            raise record.make_error(message.location, "the assistant message is empty and would be trained on; add text or remove the row")
        if message.role == "user" and not has_words and all(part["type"] == "text" for part in parts):
            raise record.make_error(message.location, "the user message has neither text nor images; add text or remove the row")
    messages = [_make_message(message, parts) for message, parts in zip(given, contents, strict=True)]
    if tools:
        messages[0] = {**messages[0], "tools": tools}
    shows = any(part["type"] == "image" for parts in contents for part in parts)
    pictured_by = (image_column or column) if shows else ""
    unread = find_unread_columns(record, form=column, images=image_column)
    return ParsedTranscript(messages, unread_values=unread, columns=record.columns, image_column=pictured_by)


def _make_message(message: RawMessage, parts: Sequence[ContentPart]) -> Message:
    calls = {"tool_calls": [call.to_message() for call in message.calls]} if message.calls else {}
    flag = {} if message.is_learned or message.role != "assistant" else {"loss": False}
    return {"role": message.role, "content": list(parts), **calls, **flag}


def _decode_images(message: Message) -> Message:
    parts = [part if part["type"] == "text" else {"type": "image", "image": part["image"].open()} for part in message["content"]]
    return {**message, "content": parts}
