"""Row formats of transcripts: columns for conversations, columns for images, and rejected columns.

Supported formats:

- messages, conversations or conversation: a list of messages (OpenAI, ms-swift, TRL, ShareGPT,
  LLaMA-Factory, Qwen's fine-tuning script).
- instruction and output, optionally input and history (Alpaca, as read by LLaMA-Factory and
  ms-swift).
- query and response, optionally history (the old format of ms-swift).
- prompt and completion (TRL), each with a list of messages; responses in the prompt are not trained
  on.

In every format, a column `system` (or system_prompt) becomes the first message, a column `tools`
contains the tools that the policy may call, and images are in one of IMAGE_COLUMNS.
"""

import re
from collections.abc import Mapping

from megatron_rl.data.column_names import FILE_NAME_COLUMNS, IMAGE_COLUMNS, PICTURE_SUFFIXES
from megatron_rl.data.columns import existing_columns, unread_picture_keys
from megatron_rl.data.images import StoredImage
from megatron_rl.data.literals import parse_text_list
from megatron_rl.data.media import find_media, find_media_by_name
from megatron_rl.data.records import DataRecord
from megatron_rl.data.transcript_messages import LOSS_FLAGS, RawMessage, is_empty, read_messages

SYSTEM_COLUMNS = ("system", "system_prompt")
TOOLS_COLUMN = "tools"
FORMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "conversation": ("conversation",),
    "output": ("instruction", "output"),
    "response": ("query", "response"),
    "completion": ("prompt", "completion"),
}
"""Maps the column that contains the response to train on to all required columns of the format."""
OPTIONAL = {"output": ("input", "history"), "response": ("history",)}
"""Maps a format to the optional columns that are read in addition."""
_PREFERENCE = (
    "is preference data, but a warm start trains on one response; write the preferred response into messages, and remove this column"
)
REFUSED_COLUMNS = {
    "functions": "are not read; write them into the column tools, in OpenAI's format, and remove this column",
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "positive_messages", "negative_messages"),
        _PREFERENCE,
    ),
    "objects": "is not read, nor are <bbox> and <ref-object>; write boxes and names into the texts, and remove this column",
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking", "documents"),
        "is not read; write what the policy should read into the messages, and remove this column",
    ),
    "input_ids": "is not read: the messages are tokenized, and loss: false in a message masks a response; remove this column",
    "history": "is read only together with instruction or query; write the earlier turns as messages",
}
"""Maps a rejected column to its error message.

A row is rejected if such a column is not empty and the row's format does not read the column.
"""
_MEDIA = "images belong in the column images; remove this column, or the row if its text needs it (videos and audio are not supported)"
MASK_COLUMNS = (
    "mask", "masks", "weights", "loss_masks", "loss_weight", "loss_weights", "sample_weight", "token_weights", "train_mask", "label_mask",
    "assistant_mask", "assistant_masks", "completion_mask", "train_on_input", "train_on_inputs", "mask_history",
)  # fmt: skip
"""Rejected columns that would mask or weight the loss of the whole row.

Columns named in LOSS_FLAGS are rejected for the same reason, unless their value is 1.
"""
PROVENANCE_COLUMNS = re.compile(r"(.*_)?(id|ids|source|sources|url|dataset|split|license)|question|answer")
"""Matches names of columns that may name a missing file.

These columns contain the origin of a row, or the text of a question (export/sft_transcripts.py).
"""
EXPORT_COLUMNS = {"messages", "id", "source", "question", "answer", "step", "reward"}
"""Columns of the rows written by export/sft_transcripts.py.

All training content of these rows is in the column `messages`.
"""
_FORMS = "messages, conversations, instruction and output, query and response, or prompt and completion (two lists of messages)"


def read_conversation(record: DataRecord) -> tuple[str, list[RawMessage]]:
    """Return (column, messages), where `column` is the column with the response to train on.

    The column `system` becomes the conversation's first message.

    Raises:
        ValueError: the row matches no transcript format or several formats, or a column that is not
            read would change the training.
    """
    row = record.row
    forms = [name for name, columns in FORMS.items() if all(column in row for column in columns)]
    if not forms and not is_empty(row.get("chosen", "")):
        raise record.make_error("chosen", _PREFERENCE)
    if not forms:
        raise record.make_error("messages", f"is missing; a transcript must have {_FORMS}; this row has {', '.join(row) or 'no columns'}")
    if len(forms) > 1:
        raise record.make_error(" and ".join(forms), "each contain a conversation; keep one of them")
    (form,) = forms
    _check_columns(record, {*FORMS[form], *OPTIONAL.get(form, ())})
    messages = _READERS[form](record)
    systems = [column for column in SYSTEM_COLUMNS if not is_empty(row.get(column, ""))]
    if len(systems) + any(message.role == "system" for message in messages) > 1:
        raise record.make_error(systems[-1], "the system message is also given elsewhere; keep only one system message")
    return form, [RawMessage(column, "system", record.require_text(row[column], column)) for column in systems] + messages


def find_unread_columns(record: DataRecord, *, form: str, images: str) -> dict[str, object]:
    """Return the columns that are not read, with their values.

    Args:
        record: the row.
        form: name of the column that contains the response to train on.
        images: name of the image column, or "" if there is none.
    """
    read = {*FORMS[form], *OPTIONAL.get(form, ()), *SYSTEM_COLUMNS, TOOLS_COLUMN, *LOSS_FLAGS, images}
    if record.row.keys() == EXPORT_COLUMNS:
        return {}
    unread = {name: value for name, value in record.row.items() if name not in read}
    return unread | unread_picture_keys(record, [images] if images else [])


def read_images(record: DataRecord) -> tuple[str, list[StoredImage]]:
    """Return (column, images), where `column` is the image column, or "" if there is none."""
    given = [column for column in record.row if _holds_pictures(record, column)]
    if len(given) > 1:
        given = existing_columns(record, given) or given
    if len(given) > 1:  # as for questions, file names count only if no other column has images
        given = [column for column in given if column.casefold() not in FILE_NAME_COLUMNS] or given
    if len(given) > 1:
        raise record.make_error(" and ".join(given), "each name images; keep one of these columns")
    if not given:
        return "", []
    (column,) = given
    value = parse_text_list(record.row[column])
    if isinstance(value, list):
        return column, [record.load_image(image, f"{column}[{number}]") for number, image in enumerate(value)]
    return column, [record.load_image(value, column)]


def _holds_pictures(record: DataRecord, column: str) -> bool:
    value, name = record.row[column], column.casefold()
    is_name = name in FILE_NAME_COLUMNS and str(value).casefold().endswith(PICTURE_SUFFIXES)
    return not is_empty(value) and (name in IMAGE_COLUMNS or is_name)


def _check_columns(record: DataRecord, read: set[str]) -> None:
    """Raise ValueError if a column outside `read` contains media or would change the training."""
    row = record.row
    for column, told in REFUSED_COLUMNS.items():
        if column not in read and not is_empty(row.get(column, "")):
            raise record.make_error(column, told)
    for column in (*LOSS_FLAGS, *MASK_COLUMNS):
        if column in row and not (row[column] == 1 and column in LOSS_FLAGS):
            raise record.make_error(
                column, "cannot be set for a whole row; set loss: true or loss: false in each message, or remove the row"
            )
    for column in ("label", "kto_tag"):
        if row.get(column, "") in (0, 1):
            raise record.make_error(column, "marks a response as good or bad; keep only rows with good responses, and remove this column")
    rest = {column: value for column, value in row.items() if column not in {*read, *SYSTEM_COLUMNS, TOOLS_COLUMN} and not is_empty(value)}
    shown = {column for column in rest if _holds_pictures(record, column)}
    for column in rest.keys() - shown:
        media = find_media(rest[column], record, column) or find_media_by_name(column, rest[column])
        is_origin = bool(shown) and media is not None and media.kind == "pictures" and not media.exists
        if media and not is_origin and (media.exists or not PROVENANCE_COLUMNS.fullmatch(column.casefold())):
            raise record.make_error(column, f"{media.description} and is not read; {_MEDIA}")


def _read_alpaca(record: DataRecord) -> list[RawMessage]:
    """Return the messages of an Alpaca row.

    The user message is the instruction and the input, joined by a line break if both have text. The
    output is the response.
    """
    row = record.row
    asked = [record.require_text(row.get(column, ""), column) for column in ("instruction", "input")]
    text = "\n".join(words for words in asked if words)
    return [
        *_read_history(record),
        RawMessage("instruction", "user", text),
        RawMessage("output", "assistant", record.require_text(row["output"], "output")),
    ]


def _read_query(record: DataRecord) -> list[RawMessage]:
    row = record.row
    asked, answered = (record.require_text(row[column], column) for column in ("query", "response"))
    return [*_read_history(record), RawMessage("query", "user", asked), RawMessage("response", "assistant", answered)]


def _read_history(record: DataRecord) -> list[RawMessage]:
    """Convert the column history, a list of pairs of user and assistant texts, to messages.

    The assistant texts are trained on, as in LLaMA-Factory.
    """
    messages = []
    for number, pair in enumerate(record.require_list(record.row.get("history", []), "history")):
        name = f"history[{number}]"
        if len(record.require_list(pair, name)) != 2:
            raise record.make_error(name, f"must be a pair of a question and an answer, but has {len(pair)} items")
        for place, role in enumerate(("user", "assistant")):
            messages.append(RawMessage(f"{name}[{place}]", role, record.require_text(pair[place], f"{name}[{place}]")))
    return messages


def _read_prompt_and_completion(record: DataRecord) -> list[RawMessage]:
    for column in ("prompt", "completion"):
        if not isinstance(record.row[column], list):
            remedy = "TRL does not apply the chat template to text, but this trainer always does; write messages"
            raise record.make_error(column, f"must be a list of messages, not {type(record.row[column]).__name__}: {remedy}")
    return read_messages(record, "prompt", is_learned=False) + read_messages(record, "completion")


_READERS = {
    "messages": lambda record: read_messages(record, "messages"),
    "conversations": lambda record: read_messages(record, "conversations"),
    "conversation": lambda record: read_messages(record, "conversation"),
    "output": _read_alpaca,
    "response": _read_query,
    "completion": _read_prompt_and_completion,
}
"""Maps a format to the function that reads the messages of a row."""
