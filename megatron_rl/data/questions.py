r"""Reads questions with images and answers from rows in several formats (docs/data.md).

Supported formats:

- Training files of agents: prompt, data_source, ability, env_name, reward_model {ground_truth},
  extra_info {question, answer, index, ...}, and images in `images` (bytes, paths or hashes) or in
  mm_hint {hint_path, hint_type}, which may also name videos.
- Raw validation records: {id, question, answer, ability, data_source, image_path}.
- User files: {question, answer}, with `image`, `images` or neither. The question may also be in
  `problem` (R1-V), `prompt` (TRL: text or messages) or `messages` (ms-swift), and the answer in
  `solution`. column_names.py lists the names of image columns; task.data.columns selects other
  names.

The payload of an example has the same keys for every format:

- question: text; <image> is the placeholder for an image; images without a placeholder come first.
- system: text of the column system, or of the system messages before the question.
- answer: reference answer without <answer> tags and \boxed.
- images: tuple of StoredImage.
- videos: tuple of StoredVideo.
- data_source, ability, env_name, index: values of the row.
- extra: every other column, and every other key of extra_info.
- official: scoring information, for published benchmarks only (data/benchmarks/items.py).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import overload

from megatron_rl.config import ColumnSettings, DataSettings, require
from megatron_rl.data.answers import extract_answer, given_answer, reference_answer
from megatron_rl.data.chat_prompt import ChatPrompt, parse_messages, read_chat
from megatron_rl.data.clips import StoredVideo, find_stored_videos
from megatron_rl.data.column_names import ANSWER_COLUMNS, MESSAGE_COLUMNS, QUESTION_COLUMNS, is_picture_column
from megatron_rl.data.columns import MissingColumn, picture_columns, unread_picture_keys
from megatron_rl.data.decimal_forms import decimal_text
from megatron_rl.data.doubtful_answers import find_doubts
from megatron_rl.data.images import StoredImage
from megatron_rl.data.literals import parse_text_list
from megatron_rl.data.media_places import PARTS_AS_TEXT
from megatron_rl.data.records import IMAGE_PLACEHOLDER, ConvertRecord, DataRecord, RecordFiles
from megatron_rl.data.survey import survey_questions
from megatron_rl.data.unread import TASK_EXTRA_KEYS, ExaminedRow, find_unread, find_unread_prompts
from megatron_rl.types import Example

READ_COLUMNS = {
    "id", "data_source", "ability", "env_name", "reward_model", "extra_info", "mm_hint", "system",
    *QUESTION_COLUMNS, *MESSAGE_COLUMNS, *ANSWER_COLUMNS,
}  # fmt: skip
READ_EXTRA_KEYS = {"question", "answer", "index"}
VIDEO_SUPPORT_TEXT = "is available only to the code of task=visual_python task.tool_format=pyvision"


class QuestionDataset(Sequence[Example]):
    """Examples in data files, each read on access; slicing returns a view."""

    def __init__(
        self, records: RecordFiles, *, name: str, row_indices: range | None = None, warnings: Sequence[str] = (),
        sources: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.records, self.name = records, name
        self.sources = sources
        """Data sources of all rows of the files, available if every row was surveyed."""
        self.warnings = warnings
        """Warnings about columns that are not read, available if every row was surveyed."""
        self._row_indices = range(len(records)) if row_indices is None else row_indices

    def __len__(self) -> int:
        return len(self._row_indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> "QuestionDataset": ...

    def __getitem__(self, index: int | slice) -> "Example | QuestionDataset":
        if isinstance(index, slice):
            chosen = self._row_indices[index]
            return QuestionDataset(self.records, name=self.name, row_indices=chosen, warnings=self.warnings, sources=self.sources)
        return self._example(self._row_indices[index])[0]

    @property
    def column_mapping(self) -> Mapping[str, str]:
        """Maps the trainer's column names to the names given in task.data.columns."""
        return self.records.column_mapping

    @property
    def ignored_columns(self) -> Sequence[str]:
        """Columns that never cause a warning."""
        return self.records.ignored_columns

    def locate(self, index: int) -> str:
        """Return an example's location, such as `train.jsonl row 17`, without reading the row."""
        return self.records.locate(self._row_indices[index])

    def examine_row(self, index: int) -> ExaminedRow:
        """Return an example, the findings about its row, and the ignored values of the row."""
        example, record = self._example(self._row_indices[index])
        unread = _unread_values(record) | _unread_keys(record) | _other_answers(record, str(example.payload["answer"]))
        unread |= find_unread_prompts(record, example.payload, question_column=_question_column(record))
        if example.payload["images"]:
            unread = {name: value for name, value in unread.items() if name.removeprefix("extra_info.") not in TASK_EXTRA_KEYS}
        found = find_unread(record, example.payload, unread_values=unread, question_column=_question_column(record))
        findings = [finding for finding in found if finding.is_error or not {*finding.column.split(" to ")} <= {*self.ignored_columns}]
        if not record.benchmark_info:
            given = given_answer(record, record.require_mapping(record.row.get("extra_info", {}), "extra_info"))
            findings += find_doubts(given, example.payload, unread=unread)
        place = "" if record.benchmark_info else _image_column(record, example.payload)
        return ExaminedRow(example, tuple(findings), record.columns, unread, self.column_mapping.get(place, place))

    def _example(self, place: int) -> tuple[Example, DataRecord]:
        record = self.records[place]
        payload = build_payload(record, row_index=place)
        return Example(id=f"{self.name}/{place}", payload=payload, where=record.where, source=str(payload["data_source"])), record


def open_questions(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), name: str, columns: ColumnSettings | None = None,
    convert_record: ConvertRecord | None = None,
) -> QuestionDataset:  # fmt: skip
    """Return the questions in the files without surveying them."""
    records = RecordFiles(
        paths, images_root=images_root, image_roots=image_roots, key=f"task.data.{name}", columns=columns, convert_record=convert_record
    )
    return QuestionDataset(records, name=name)


def load_questions(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), name: str, columns: ColumnSettings | None = None,
    convert_record: ConvertRecord | None = None, allow_videos: bool = False,
) -> QuestionDataset:  # fmt: skip
    """Return the questions in the files after surveying every row.

    Raises:
        ValueError: a row cannot be used; the message names the first such row and its file. Rows
            with videos are errors unless `allow_videos` is set.
    """
    opened = open_questions(
        paths, images_root=images_root, image_roots=image_roots, name=name, columns=columns, convert_record=convert_record
    )
    found = survey_questions(opened)
    found.raise_on_errors()
    require(allow_videos or not found.first_video, f"task.data.{name}", list(paths), f"{found.first_video}, which {VIDEO_SUPPORT_TEXT}")
    chosen = opened.column_mapping.get("images")
    require(
        not chosen or found.num_images > 0, "task.data.columns.images", chosen, f"no row of {', '.join(paths)} has images in this column"
    )
    warnings = [*found.column_warnings, *found.unread_columns]
    return QuestionDataset(opened.records, name=name, warnings=warnings, sources=[*found.sources])


def load_split(
    data: DataSettings, split: str, *, convert_record: ConvertRecord | None = None, allow_videos: bool = False
) -> QuestionDataset:
    """Return the questions of the split "train" or "eval".

    If data.max_eval is not 0, the eval split is limited to its first data.max_eval questions.

    Raises:
        ValueError: no files are given, or a row cannot be used. Rows with videos are errors unless
            `allow_videos` is set.
    """
    paths = {"train": data.train, "eval": data.eval}[split]
    require(bool(paths), f"task.data.{split}", paths, "set the question files (docs/data.md)")
    chosen = load_questions(
        paths,
        images_root=data.images,
        image_roots=data.image_roots,
        name=split,
        columns=data.columns,
        convert_record=convert_record,
        allow_videos=allow_videos,
    )
    return chosen[: data.max_eval] if split == "eval" and data.max_eval else chosen


def build_payload(record: DataRecord, *, row_index: int) -> dict[str, object]:
    """Return the payload of a row's example; the module docstring lists its keys.

    Raises:
        ValueError: a value is missing, of the wrong type, or inconsistent. The message names the
            file, row and field.
    """
    row = record.row
    extra = record.require_mapping(row.get("extra_info", {}), "extra_info")
    asked = _question(record, extra)
    videos = _videos(record)
    images = () if videos else _fill_placeholders(record, asked, _images(record))
    index = extra.get("index", row.get("id", row_index))
    if not isinstance(index, str | int):
        raise record.make_error("index", f"must be text or a whole number, not {type(index).__name__}")
    _require_answer(record, extra)
    return {
        "question": _add_placeholders(record, asked.question, num_images=len(images)),
        "system": asked.system,
        "answer": reference_answer(record, extra),
        "images": images,
        "videos": videos,
        **{key: record.require_text(row.get(key, ""), key) for key in ("data_source", "ability", "env_name")},
        "index": index,
        "extra": {name.removeprefix("extra_info."): value for name, value in _unread_values(record).items()},
        **({"official": record.benchmark_info} if record.benchmark_info else {}),
    }


def _unread_values(record: DataRecord) -> dict[str, object]:
    """Return the values of a row that are not read, keyed by column or by `extra_info.KEY`."""
    extra = record.require_mapping(record.row.get("extra_info", {}), "extra_info")
    pictures = picture_columns(record)
    empty = [key for key, value in record.row.items() if is_picture_column(key) and value in ("", [], {})]
    own = {key: value for key, value in record.row.items() if key not in (*READ_COLUMNS, *pictures, *empty)}
    return own | {f"extra_info.{key}": value for key, value in extra.items() if key not in READ_EXTRA_KEYS}


def _unread_keys(record: DataRecord) -> dict[str, object]:
    """Return the values in mm_hint, reward_model and image mappings that the loader ignores."""
    read = {"mm_hint": ("hint_type",) if picture_columns(record) else ("hint_type", "hint_path"), "reward_model": ("ground_truth", "style")}
    held = {column: record.require_mapping(record.row.get(column, {}), column) for column in read}
    keys = {f"{column}.{key}": value for column, struct in held.items() for key, value in struct.items() if key not in read[column]}
    return keys | unread_picture_keys(record, picture_columns(record))


def _other_answers(record: DataRecord, answer: str) -> dict[str, object]:
    """Return the values of answer columns that differ from the reference answer `answer`."""
    model, extra = (record.require_mapping(record.row.get(column, {}), column) for column in ("reward_model", "extra_info"))
    given = {"reward_model.ground_truth": model.get("ground_truth"), "extra_info.answer": extra.get("answer")}
    given |= {name: record.row.get(name) for name in ANSWER_COLUMNS}
    _, *others = ((name, value) for name, value in given.items() if value is not None)
    return {name: value for name, value in others if extract_answer(str(value)) != answer and not _is_number(value, answer)}


def _is_number(value: object, answer: str) -> bool:
    """Return True if a value is a float and its decimal form is `answer`."""
    return isinstance(value, float) and math.isfinite(value) and decimal_text(value) == answer


def _image_column(record: DataRecord, payload: Mapping[str, object]) -> str:
    """Return the name of the column that contains a question's images or videos, else ""."""
    if not payload["images"] and not payload["videos"]:
        return ""
    hint = ["mm_hint.hint_path"] if "hint_path" in record.row.get("mm_hint", {}) else []
    return [*picture_columns(record), *hint, _question_column(record)][0]


def _question_column(record: DataRecord) -> str:
    """Return the name of the column that contains the question, or "" if there is none."""
    if "question" in record.require_mapping(record.row.get("extra_info", {}), "extra_info"):
        return "extra_info.question"
    return next((name for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) if name in record.row), "")


def _question(record: DataRecord, extra: Mapping[str, object]) -> ChatPrompt:
    """Read the question and the system message, and any images that the messages contain."""
    system = record.require_text(record.row.get("system", ""), "system")
    if IMAGE_PLACEHOLDER in system:
        raise record.make_error("system", f"contains {IMAGE_PLACEHOLDER}, but a system message has no images; move it to the question")
    name = _question_column(record)
    if not name:
        raise MissingColumn(record, "question")
    value = extra["question"] if name == "extra_info.question" else parse_messages(record, record.row[name], name)
    if isinstance(value, str) and PARTS_AS_TEXT.match(value):
        raise record.make_error(
            name, "is text that contains a list of parts; store only the question here, and the images in a column images"
        )
    if not isinstance(value, list):
        return ChatPrompt(record.require_text(value, name), system)
    asked = read_chat(record, value, name)
    if system and asked.system and system != asked.system:
        raise record.make_error("system", f"differs from the system message in {name}; keep one of them")
    asked.system = asked.system or system
    return asked


def _fill_placeholders(record: DataRecord, asked: ChatPrompt, listed: Sequence[StoredImage]) -> tuple[StoredImage, ...]:
    """Return a question's images in the order of their placeholders.

    Placeholders without an image in the messages are filled from the image column.
    """
    num_open = asked.images.count(None)
    if num_open == len(asked.images):
        return tuple(listed)
    if num_open != len(listed):
        raise record.make_error(
            "question",
            f"has {num_open} {IMAGE_PLACEHOLDER} placeholders without an image in the messages, "
            f"but the image column has {len(listed)} images",
        )
    remaining = iter(listed)
    return tuple(next(remaining) if image is None else image for image in asked.images)


def _add_placeholders(record: DataRecord, text: str, *, num_images: int) -> str:
    """Return the question with one placeholder per image.

    If the question has no placeholders, they are added at the start.
    """
    num_places = text.count(IMAGE_PLACEHOLDER)
    if num_places not in (0, num_images):
        raise record.make_error("question", f"has {num_places} {IMAGE_PLACEHOLDER} placeholders for {num_images} images")
    if not text.replace(IMAGE_PLACEHOLDER, "").strip():
        raise record.make_error("question", "is empty")
    return text if num_places else f"{IMAGE_PLACEHOLDER}\n" * num_images + text


def _require_answer(record: DataRecord, extra: Mapping[str, object]) -> None:
    """Raise MissingColumn for a row without an answer."""
    model = record.require_mapping(record.row.get("reward_model", {}), "reward_model")
    if "ground_truth" in model or "answer" in extra or any(name in record.row for name in ANSWER_COLUMNS):
        return
    messages = [value for name in MESSAGE_COLUMNS if isinstance(value := record.row.get(name), list)]
    roles = [message.get("role") for message in messages[0] if isinstance(message, Mapping)] if messages else []
    hint = "the assistant's message is not read as the answer; write it into a column" if roles[-1:] == ["assistant"] else ""
    raise MissingColumn(record, "answer", hint=hint)


def _videos(record: DataRecord) -> tuple[StoredVideo, ...]:
    hint = record.require_mapping(record.row.get("mm_hint", {}), "mm_hint")
    if hint.get("hint_type", "image") == "image":
        return ()
    pictures = picture_columns(record)
    if hint["hint_type"] != "video" or pictures:
        raise record.make_error(
            "mm_hint",
            f"hint_type must be image (or video, if the row has no {', '.join(pictures) or 'pictures'}), but is {hint['hint_type']}",
        )
    return find_stored_videos(hint, folder=record.folder, where=f"{record.where}: mm_hint.hint_path", roots=record.roots)


def _images(record: DataRecord) -> tuple[StoredImage, ...]:
    row = record.row
    hint = record.require_mapping(row.get("mm_hint", {}), "mm_hint")
    given = {name: parse_text_list(row[name]) for name in picture_columns(record)}
    if not given and "hint_path" in hint:
        given = {"mm_hint.hint_path": parse_text_list(hint["hint_path"])}
    return tuple(
        record.load_image(value, f"{name}[{number}]" if isinstance(values, list) else name)
        for name, values in given.items()
        for number, value in enumerate(values if isinstance(values, list) else [values])
    )
