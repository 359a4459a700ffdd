"""Finds columns of questions that are not read although they change what is asked or learned: pictures, videos, audio, choices, loss masks.

A column is told by its type in the file's schema (`datasets` features), by its values, and by its name. What is not read otherwise travels
in the payload's `extra`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.data.chat_prompt import parse_messages
from megatron_rl.data.column_names import MESSAGE_COLUMNS, QUESTION_COLUMNS
from megatron_rl.data.images import StoredImage
from megatron_rl.data.literals import literal
from megatron_rl.data.media import Media, find_media, named_media
from megatron_rl.data.media_places import find_media_place, find_object_place
from megatron_rl.data.records import PLACE, Record
from megatron_rl.data.unread_names import is_empty
from megatron_rl.types import Example

CHOICE_NAMES = {
    "options", "choices", "option", "choice", "candidates", "answer_choices", "answer_options", "mc_options", "multiple_choice_options",
    "endings", "mc1_targets", "mc2_targets",
}  # fmt: skip
ANSWER_LISTS = {"answers", "aliases", "answer_aliases", "acceptable_answers", "direct_answers", "ground_truths", "gts", "labels"}
"""Lists of answers that are all right, as several annotators gave them."""
_LETTER_NAME = re.compile(r"([a-h]|(option|choice)_?([a-h]|\d))")
_LABEL = re.compile(r"^\s*\(?[A-Za-z0-9]{1,2}[).:]\s+")
_OTHER_MEANINGS = (
    (
        ("loss", "loss_mask", "loss_weight", "weight", "weights", "sample_weight", "sample_weights", "trainable", "train_on"),
        "weighs or masks what is learned",
        "every row counts alike, and its whole response is trained; remove the rows that are not to be learned, and this column",
    ),
    (
        ("tools", "functions", "tool_calls", "function_call"),
        "describes tools",
        "the policy has the tools of task.name alone; write others into the system message, or remove the column",
    ),
    (
        ("chosen", "rejected", "negative", "negatives", "rejected_response", "rejected_images"),
        "looks like one side of a preference",
        "rewards compare a response with the answer; remove the column",
    ),
    (
        ("input_ids", "labels", "attention_mask", "pixel_values"),
        "looks like tokens",
        "the question's text is tokenized when it is asked; remove the column",
    ),
    (
        ("reasoning_content",),
        "looks like a response's reasoning",
        "rewards compare a response with the answer alone; for a warm start write it into transcripts",
    ),
    (
        ("system_prompt", "system_message", "developer", "instruction", "instructions"),
        "looks like a part of the prompt",
        "call it system, or write it into the question",
    ),
    (
        ("objects",),
        "names objects or boxes for places in the text",
        "write them into the question and the answer, or remove the column",
    ),
    (
        ("chat_template_kwargs", "enable_thinking", "tool_choice", "response_format"),
        "looks like a setting of a request",
        "the settings of the run are used for all rows; remove the column",
    ),
    (
        ("context", "passage", "hint", "history", "conversations", "query", "input"),
        "looks like a part of the prompt, which the question does not contain",
        "write it into the question, or remove the column",
    ),
)
"""Names of columns, what they look like, and what to do about them."""
CHANGES = {name: (looks, remedy) for names, looks, remedy in _OTHER_MEANINGS for name in names}
NUMERIC = {"weight", "weights", "labels"}
"""Names that have another meaning where their values are words."""
NO_CHANGE = (1, "1", "1.0", True, "true")
"""Weights that change nothing."""
_MARKUP = re.compile(
    r"<img\b|data:image/|!\[[^\]]*\]\(|\\includegraphics\b|\[(?i:image|img|picture|photo|figure)\s*:|<\s+(?i:image)\s*/?>|<(?i:image)\s+/?>"
)
"""Pictures in HTML, Markdown, LaTeX and captions, and PLACE with a blank in it."""
READ_BY_TASKS = {"image_file_name", "bbox", "bboxes"}
"""Keys of `extra` that tasks and checks read of a row with pictures."""
_OPTION_KEYS = ("text", "content", "value", "option", "choice", "answer")
"""Keys of an option's words, beside its label."""
_REPLIES = ("assistant", "gpt")
"""Roles of replies."""
MOST_CHOICES, LONGEST_CHOICE = 26, 200


@dataclass(slots=True, frozen=True)
class Finding:
    """Something in a column of a row that is not read. Rows with equal findings share one line."""

    column: str
    looks: str
    """Example: `looks like paths of pictures that exist and is not read`."""
    remedy: str
    is_error: bool
    is_error_in_all: bool = False
    """True: it is an error where every row of a file has it."""


@dataclass(slots=True, frozen=True)
class Examined:
    """An example and what else its row holds."""

    example: Example
    findings: tuple[Finding, ...]
    columns: tuple[str, ...]
    """Names of the row's columns as they are in the file."""
    unread: Mapping[str, object]
    """The values that nothing reads, by column; keys of structs as `extra_info.KEY`."""
    pictured_by: str
    """The column of its pictures, or of its video; empty where it has none."""


def find_unread(record: Record, payload: Mapping[str, object], *, unread: Mapping[str, object], asked_in: str) -> Iterator[Finding]:
    """Yield what a row holds that its payload does not.

    Args:
        unread: the values that are not read, by column; keys of extra_info as `extra_info.KEY`.
        asked_in: the column that gave the question.
    """
    for name, value in unread.items():
        if is_empty(value):
            continue
        media = find_media(value, record, name) or named_media(name, value)
        finding = _media_finding(media, name, value, payload, record) if media else _text_finding(name, value, payload)
        yield from [finding] if finding else []
    yield from _letter_columns(unread, payload)
    yield from _other_questions(record, payload, asked_in=asked_in)
    question = str(payload["question"])
    mark = find_media_place(question) or find_object_place(question) or next(iter(_MARKUP.findall(question)), "")
    if mark and not payload["videos"]:
        remedy = "the policy reads it as a word; write <image> where a picture is, name videos in mm_hint, or remove it"
        yield Finding(asked_in, f"has {mark} in its text, which shows nothing here", remedy, False)


def _unread(name: str, looks: str, remedy: str, *, is_error: bool) -> Finding:
    return Finding(name, f"{looks} and is not read", remedy, is_error)


def _media_finding(media: Media, name: str, value: object, payload: Mapping[str, object], record: Record) -> Finding | None:
    images: Sequence[StoredImage] = payload["images"]
    if media.kind == "videos":
        remedy = "name videos in mm_hint: {hint_type: video, hint_path: clip.mp4}, or remove the column"
        return _unread(name, media.looks, remedy, is_error=True)
    if media.kind == "audio":
        return _unread(name, media.looks, "audio cannot be used for training; remove the column", is_error=True)
    if not images:
        return _unread(name, media.looks, _picture_remedy(name, media, value), is_error=True)
    if media.is_there and not _is_read(value, images, record):
        remedy = f"the row's other pictures are read; write all into one list, or choose: {_choose(name, value)}"
        return _unread(name, media.looks, remedy, is_error=False)
    return None


def _picture_remedy(name: str, media: Media, value: object) -> str:
    if "web addresses" in media.looks:
        return "download them and give their paths, or remove the column"
    where = "" if media.is_there else "; task.data.images is the folder that relative paths start from"
    return f"{_choose(name, value)}{where}"


def _choose(name: str, value: object) -> str:
    is_mapping = isinstance(value, Mapping) and not value.keys() & {"bytes", "path"}
    if name.startswith(("extra_info.", "mm_hint.", "reward_model.")) or name in MESSAGE_COLUMNS or is_mapping:
        return "write them into a column images"
    return f"'task.data.columns={{images: {name}}}'"


def _is_read(value: object, images: Sequence[StoredImage], record: Record) -> bool:
    """Return True if a column names pictures that another one names too."""
    names = value if isinstance(value, list) else [value]
    read = {os.path.realpath(image.source) for image in images if not isinstance(image.source, bytes)}
    return all(isinstance(name, str) and "\0" not in name and os.path.realpath(record.folder / name) in read for name in names)


def _text_finding(name: str, value: object, payload: Mapping[str, object]) -> Finding | None:
    """Recognize choices by name or by the answer among them, and columns that change what is learned by name."""
    plain, question = name.removeprefix("extra_info.").casefold(), str(payload["question"])
    options = option_texts(value)
    is_choice = plain in CHOICE_NAMES or (plain not in ANSWER_LISTS and _has_answer(value, options, str(payload["answer"])))
    if is_choice and options:
        return None if _are_shown(options, question) else _unread(name, *_CHOICES, is_error=False)
    if plain not in CHANGES or (isinstance(value, str) and value.strip().casefold() in question.casefold()):
        return None
    is_word = isinstance(value, str) and not re.fullmatch(r"[-+.\d\s,\[\]]+|true|false", value.casefold())
    if (plain in NUMERIC and is_word) or ("weight" in plain and value in NO_CHANGE):
        return None
    return _unread(name, *CHANGES[plain], is_error=False)


_CHOICES = ("looks like the choices of the answer, which the question does not contain", "write them into the question")


def _has_answer(value: object, options: Sequence[str], answer: str) -> bool:
    """Return True for a mapping of letters, and for a list of short texts of which one is the answer."""
    if isinstance(value, Mapping) and len(value) >= 2 and all(_LETTER_NAME.fullmatch(name.casefold()) for name in value):
        return True
    is_list = isinstance(value, list) and 2 <= len(value) <= MOST_CHOICES and all(isinstance(item, str) for item in value)
    short = len({*options}) == len(options) and is_list and all(len(option) <= LONGEST_CHOICE for option in options)
    return short and answer.strip().casefold() in (option.casefold() for option in options)


def _are_shown(options: Sequence[str], question: str) -> bool:
    """Return True if the question contains all options, or if they are letters, whose choices stand in the picture."""
    text = " ".join(question.casefold().split())
    return all((len(option) == 1 and option.isalpha()) or " ".join(option.casefold().split()) in text for option in options)


def option_texts(value: object) -> list[str]:
    """Return the options of a list, a mapping with a list of texts, or a text of one of these, without their letters."""
    if isinstance(value, str):
        value = (literal(value) if value.lstrip().startswith(("[", "{")) else None) or re.split(r"\n|;|\|", value)
    if isinstance(value, Mapping):
        lists = [item for name, item in value.items() if isinstance(item, list) and name in ("text", "choices", "options")]
        value = lists[0] if lists else list(value.values())
    if isinstance(value, list | tuple):
        found = [_option_of(item) if isinstance(item, Mapping) else item for item in value]
        return [text for item in found if isinstance(item, str | int | float) and (text := _LABEL.sub("", str(item)).strip())]
    return []


def _option_of(option: Mapping[str, object]) -> object:
    """Return the words of an option: {"label": "A", "text": "cat"} -> cat."""
    return next((option[key] for key in _OPTION_KEYS if key in option), next(iter(option.values()), ""))


def _letter_columns(names: Mapping[str, object], payload: Mapping[str, object]) -> Iterator[Finding]:
    """Columns A, B, C, D or option_a, option_b, as tables have them."""
    letters = [name for name in names if _LETTER_NAME.fullmatch(name.casefold()) and isinstance(names[name], str | int | float)]
    first = {name.casefold()[-1] for name in letters}
    if not ({"a", "b"} <= first or {"1", "2"} <= first):
        return
    if not _are_shown([str(names[name]).strip() for name in letters], str(payload["question"])):
        yield _unread(f"{letters[0]} to {letters[-1]}", *_CHOICES, is_error=False)


def _other_questions(record: Record, payload: Mapping[str, object], *, asked_in: str) -> Iterator[Finding]:
    """Columns that would be the question if another one were not: pictures in them, and other words."""
    for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS):
        if name == asked_in or name not in record.row:
            continue
        value = record.row[name]
        media = find_media(value, record, name)
        finding = _media_finding(media, name, value, payload, record) if media and isinstance(value, list) else None
        if finding:
            yield finding
        elif asked_in in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) and not _asks_the_same(value, record.row[asked_in]):
            remedy = f"the question is read from {asked_in}; choose one: 'task.data.columns={{question: {name}}}'"
            yield _unread(name, f"is a question beside {asked_in}", remedy, is_error=False)


def unread_prompts(record: Record, payload: Mapping[str, object], *, asked_in: str) -> dict[str, object]:
    """Return questions that do not hold that of extra_info, which is read, and a reply behind the question without its answer."""
    if asked_in == "extra_info.question":
        asked = _words_of(payload["question"]).casefold()
        others = {name: record.row[name] for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) if name in record.row}
        return {name: value for name, value in others.items() if asked not in _words_of_all(value).casefold()}
    messages = parse_messages(record, record.row[asked_in], asked_in)
    last = messages[-1] if isinstance(messages, list) else {}
    reply = _words_of([last]) if last.get("role", last.get("from")) in _REPLIES else ""
    return {} if str(payload["answer"]).casefold() in reply.casefold() or not reply else {f"{asked_in}.assistant": reply}


def _words_of_all(value: object) -> str:
    return " ".join(_words_of([message]) for message in value) if isinstance(value, list) else _words_of(value)


def _asks_the_same(value: object, asked: object) -> bool:
    """Return True if two columns have the same words, places of pictures aside; one of them may be a single message of the user."""
    words = [_words_of(each) for each in (value, asked)]
    return value == asked or (words[0] == words[1] != "")


def _words_of(value: object) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content", value[0].get("value", ""))
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = " ".join(str(part.get("text", "")) for part in value)
    return " ".join(value.replace(PLACE, " ").split()) if isinstance(value, str) else ""
