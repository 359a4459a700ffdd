"""Finds columns that the loader does not read but that may affect the question or the training.

Examples are columns with images, videos, audio, choices or loss masks. A column is recognized by
its type in the file's schema (`datasets` features), by its values, or by its name. Values that are
not read are stored under the key `extra` of the payload.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.chat_prompt import parse_messages
from megatron_rl.data.column_names import MESSAGE_COLUMNS, QUESTION_COLUMNS
from megatron_rl.data.images import StoredImage
from megatron_rl.data.literals import parse_literal
from megatron_rl.data.media import Media, find_media, find_media_by_name
from megatron_rl.data.media_places import find_media_placeholder, find_object_placeholder
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord
from megatron_rl.data.unread_names import is_empty
from megatron_rl.types import Example

CHOICE_NAMES = {
    "options", "choices", "option", "choice", "candidates", "answer_choices", "answer_options", "mc_options", "multiple_choice_options",
    "endings", "mc1_targets", "mc2_targets",
}  # fmt: skip
ANSWER_LISTS = {"answers", "aliases", "answer_aliases", "acceptable_answers", "direct_answers", "ground_truths", "gts", "labels"}
"""Columns with lists of correct answers, such as the answers of several annotators."""
_LETTER_NAME = re.compile(r"([a-h]|(option|choice)_?([a-h]|\d))")
_LABEL = re.compile(r"^\s*\(?[A-Za-z0-9]{1,2}[).:]\s+")
_OTHER_MEANINGS = (
    (
        ("loss", "loss_mask", "loss_weight", "weight", "weights", "sample_weight", "sample_weights", "trainable", "train_on"),
        "weights or masks the loss",
        "all rows have equal weight, and the whole response is trained; remove the rows that should not be trained, and this column",
    ),
    (
        ("tools", "functions", "tool_calls", "function_call"),
        "describes tools",
        "the policy has only the tools of task.name; describe others in the system message, or remove the column",
    ),
    (
        ("chosen", "rejected", "negative", "negatives", "rejected_response", "rejected_images"),
        "looks like one side of a preference",
        "rewards compare a response with the answer; remove the column",
    ),
    (
        ("input_ids", "labels", "attention_mask", "pixel_values"),
        "looks like tokens",
        "the text of the question is tokenized instead; remove the column",
    ),
    (
        ("reasoning_content",),
        "looks like a response's reasoning",
        "rewards compare a response only with the answer; for a warm start, write it into transcripts",
    ),
    (
        ("system_prompt", "system_message", "developer", "instruction", "instructions"),
        "looks like a part of the prompt",
        "rename it to system, or write it into the question",
    ),
    (
        ("objects",),
        "names objects or boxes for placeholders in the text",
        "write them into the question and the answer, or remove the column",
    ),
    (
        ("chat_template_kwargs", "enable_thinking", "tool_choice", "response_format"),
        "looks like a request setting",
        "the settings of the run are used for all rows; remove the column",
    ),
    (
        ("context", "passage", "hint", "history", "conversations", "query", "input"),
        "looks like a part of the prompt, which the question does not contain",
        "write it into the question, or remove the column",
    ),
)
"""Groups of column names, each with the columns' likely meaning and the fix."""
SUSPECT_COLUMNS = {name: (looks, remedy) for names, looks, remedy in _OTHER_MEANINGS for name in names}
NUMERIC_NAMES = {"weight", "weights", "labels"}
"""Names of suspicious columns that are not reported if their values are words."""
NEUTRAL_WEIGHTS = (1, "1", "1.0", True, "true")
"""Weights that have no effect."""
_MARKUP = re.compile(
    r"<img\b|data:image/|!\[[^\]]*\]\(|\\includegraphics\b|\[(?i:image|img|picture|photo|figure)\s*:|<\s+(?i:image)\s*/?>|<(?i:image)\s+/?>"
)
"""Matches images in HTML, Markdown, LaTeX and captions.

IMAGE_PLACEHOLDER with a space in it is matched too.
"""
TASK_EXTRA_KEYS = {"image_file_name", "bbox", "bboxes"}
"""Keys of `extra` that tasks and checks use in rows with images."""
_OPTION_KEYS = ("text", "content", "value", "option", "choice", "answer")
"""Keys under which an option given as a mapping may contain its text."""
_REPLIES = ("assistant", "gpt")
"""Roles of messages that are responses."""
MAX_CHOICES, MAX_CHOICE_CHARS = 26, 200


@dataclass(slots=True, frozen=True)
class UnreadFinding:
    """Finding about a column of a row; rows with equal findings share one line."""

    column: str
    description: str
    """Description of the column, such as `contains decoded audio and is not read`."""
    remedy: str
    is_error: bool
    is_error_in_all: bool = False
    """True if the finding counts as an error when every row of a file has the finding."""


@dataclass(slots=True, frozen=True)
class ExaminedRow:
    """An example, the findings about its row, and the values of the row that are not read."""

    example: Example
    findings: tuple[UnreadFinding, ...]
    columns: tuple[str, ...]
    """Names of the row's columns as written in the file."""
    unread_values: Mapping[str, object]
    """Values that are not read, keyed by column; keys of structs are named `extra_info.KEY`."""
    image_column: str
    """Name of the column with the row's images or video; "" if the row has neither."""


def find_unread(
    record: DataRecord, payload: Mapping[str, object], *, unread_values: Mapping[str, object], question_column: str
) -> Iterator[UnreadFinding]:
    """Yield findings about the values of a row that are not read.

    Args:
        record: the row.
        payload: payload of the row's example.
        unread_values: values that are not read, keyed by column; keys of extra_info are named
            `extra_info.KEY`.
        question_column: column with the question.
    """
    for name, value in unread_values.items():
        if is_empty(value):
            continue
        media = find_media(value, record, name) or find_media_by_name(name, value)
        finding = _media_finding(media, name, value, payload, record) if media else _text_finding(name, value, payload)
        yield from [finding] if finding else []
    yield from _find_letter_columns(unread_values, payload)
    yield from _find_other_questions(record, payload, question_column=question_column)
    question = str(payload["question"])
    mark = find_media_placeholder(question) or find_object_placeholder(question) or next(iter(_MARKUP.findall(question)), "")
    if mark and not payload["videos"]:
        remedy = "the policy reads it as plain text; write <image> at the position of an image, name videos in mm_hint, or remove it"
        yield UnreadFinding(question_column, f"contains {mark} in its text, which is not a placeholder here", remedy, False)


def _make_finding(name: str, description: str, remedy: str, *, is_error: bool) -> UnreadFinding:
    return UnreadFinding(name, f"{description} and is not read", remedy, is_error)


def _media_finding(media: Media, name: str, value: object, payload: Mapping[str, Any], record: DataRecord) -> UnreadFinding | None:
    images: Sequence[StoredImage] = payload["images"]
    if media.kind == "videos":
        remedy = "name videos in mm_hint: {hint_type: video, hint_path: clip.mp4}, or remove the column"
        return _make_finding(name, media.description, remedy, is_error=True)
    if media.kind == "audio":
        return _make_finding(name, media.description, "audio cannot be used for training; remove the column", is_error=True)
    if not images:
        return _make_finding(name, media.description, _picture_remedy(name, media, value), is_error=True)
    if media.exists and not _is_read(value, images, record):
        remedy = f"other images of the row are read; write all into one list, or choose: {_column_remedy(name, value)}"
        return _make_finding(name, media.description, remedy, is_error=False)
    return None


def _picture_remedy(name: str, media: Media, value: object) -> str:
    if "web addresses" in media.description:
        return "download them and give their paths, or remove the column"
    where = "" if media.exists else "; task.data.images is the folder that relative paths start from"
    return f"{_column_remedy(name, value)}{where}"


def _column_remedy(name: str, value: object) -> str:
    is_mapping = isinstance(value, Mapping) and not value.keys() & {"bytes", "path"}
    if name.startswith(("extra_info.", "mm_hint.", "reward_model.")) or name in MESSAGE_COLUMNS or is_mapping:
        return "write them into a column images"
    return f"'task.data.columns={{images: {name}}}'"


def _is_read(value: object, images: Sequence[StoredImage], record: DataRecord) -> bool:
    """Return True if all values in a column are names of image files that the row already uses."""
    names = value if isinstance(value, list) else [value]
    read = {os.path.realpath(image.source) for image in images if not isinstance(image.source, bytes)}
    return all(isinstance(name, str) and "\0" not in name and os.path.realpath(record.folder / name) in read for name in names)


def _text_finding(name: str, value: object, payload: Mapping[str, object]) -> UnreadFinding | None:
    """Return the finding about a text column, or None if there is none.

    A column of choices is recognized by its name or by its values (`_contains_answer`). A column
    that changes the training is recognized by its name.
    """
    plain, question = name.removeprefix("extra_info.").casefold(), str(payload["question"])
    options = parse_options(value)
    is_choice = plain in CHOICE_NAMES or (plain not in ANSWER_LISTS and _contains_answer(value, options, str(payload["answer"])))
    if is_choice and options:
        return None if _are_in_question(options, question) else _make_finding(name, *_CHOICES, is_error=False)
    if plain not in SUSPECT_COLUMNS or (isinstance(value, str) and value.strip().casefold() in question.casefold()):
        return None
    is_word = isinstance(value, str) and not re.fullmatch(r"[-+.\d\s,\[\]]+|true|false", value.casefold())
    if (plain in NUMERIC_NAMES and is_word) or ("weight" in plain and value in NEUTRAL_WEIGHTS):
        return None
    return _make_finding(name, *SUSPECT_COLUMNS[plain], is_error=False)


_CHOICES = ("looks like the answer choices, which the question does not contain", "write them into the question")


def _contains_answer(value: object, options: Sequence[str], answer: str) -> bool:
    """Return True for a mapping keyed by letters, or a list of short texts including the answer."""
    if isinstance(value, Mapping) and len(value) >= 2 and all(_LETTER_NAME.fullmatch(name.casefold()) for name in value):
        return True
    is_list = isinstance(value, list) and 2 <= len(value) <= MAX_CHOICES and all(isinstance(item, str) for item in value)
    short = len({*options}) == len(options) and is_list and all(len(option) <= MAX_CHOICE_CHARS for option in options)
    return short and answer.strip().casefold() in (option.casefold() for option in options)


def _are_in_question(options: Sequence[str], question: str) -> bool:
    """Return True if the question contains all options.

    A single-letter option counts as contained, because its text is in the image.
    """
    text = " ".join(question.casefold().split())
    return all((len(option) == 1 and option.isalpha()) or " ".join(option.casefold().split()) in text for option in options)


def parse_options(value: object) -> list[str]:
    """Return the texts of the options without their labels.

    The value is a list, a mapping with a list of texts, or a text that represents such a value.
    """
    if isinstance(value, str):
        value = (parse_literal(value) if value.lstrip().startswith(("[", "{")) else None) or re.split(r"\n|;|\|", value)
    if isinstance(value, Mapping):
        lists = [item for name, item in value.items() if isinstance(item, list) and name in ("text", "choices", "options")]
        value = lists[0] if lists else list(value.values())
    if isinstance(value, list | tuple):
        found = [_option_words(item) if isinstance(item, Mapping) else item for item in value]
        return [text for item in found if isinstance(item, str | int | float) and (text := _LABEL.sub("", str(item)).strip())]
    return []


def _option_words(option: Mapping[str, object]) -> object:
    """Return the text of an option: {"label": "A", "text": "cat"} -> cat."""
    return next((option[key] for key in _OPTION_KEYS if key in option), next(iter(option.values()), ""))


def _find_letter_columns(names: Mapping[str, object], payload: Mapping[str, object]) -> Iterator[UnreadFinding]:
    """Yield a finding if choices are in columns such as A, B, C, D or option_a, option_b."""
    letters = [name for name in names if _LETTER_NAME.fullmatch(name.casefold()) and isinstance(names[name], str | int | float)]
    first = {name.casefold()[-1] for name in letters}
    if not ({"a", "b"} <= first or {"1", "2"} <= first):
        return
    if not _are_in_question([str(names[name]).strip() for name in letters], str(payload["question"])):
        yield _make_finding(f"{letters[0]} to {letters[-1]}", *_CHOICES, is_error=False)


def _find_other_questions(record: DataRecord, payload: Mapping[str, object], *, question_column: str) -> Iterator[UnreadFinding]:
    """Yield findings about other columns that could also contain the question.

    A finding reports images in such a column, or text that differs from the question.
    """
    for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS):
        if name == question_column or name not in record.row:
            continue
        value = record.row[name]
        media = find_media(value, record, name)
        finding = _media_finding(media, name, value, payload, record) if media and isinstance(value, list) else None
        if finding:
            yield finding
        elif question_column in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) and not _is_same_question(value, record.row[question_column]):
            remedy = f"the question is read from {question_column}; choose one: 'task.data.columns={{question: {name}}}'"
            yield _make_finding(name, f"is a question in addition to {question_column}", remedy, is_error=False)


def find_unread_prompts(record: DataRecord, payload: Mapping[str, object], *, question_column: str) -> dict[str, object]:
    """Return the prompts and responses of a row that are not read, keyed by column.

    If the question comes from extra_info.question, the result contains the prompts in other columns
    that do not contain the question's text. If the question comes from messages, the result
    contains the last response in the messages, unless this response contains the answer.
    """
    if question_column == "extra_info.question":
        asked = _extract_words(payload["question"]).casefold()
        others = {name: record.row[name] for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) if name in record.row}
        return {name: value for name, value in others.items() if asked not in _all_words(value).casefold()}
    messages = parse_messages(record, record.row[question_column], question_column)
    last = messages[-1] if isinstance(messages, list) else {}
    reply = _extract_words([last]) if last.get("role", last.get("from")) in _REPLIES else ""
    return {} if str(payload["answer"]).casefold() in reply.casefold() or not reply else {f"{question_column}.assistant": reply}


def _all_words(value: object) -> str:
    return " ".join(_extract_words([message]) for message in value) if isinstance(value, list) else _extract_words(value)


def _is_same_question(value: object, asked: object) -> bool:
    """Return True if two columns have the same text, ignoring image placeholders.

    Each of the two values is text or a list with a single message.
    """
    words = [_extract_words(each) for each in (value, asked)]
    return value == asked or (words[0] == words[1] != "")


def _extract_words(value: object) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content", value[0].get("value", ""))
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = " ".join(str(part.get("text", "")) for part in value)
    return " ".join(value.replace(IMAGE_PLACEHOLDER, " ").split()) if isinstance(value, str) else ""
