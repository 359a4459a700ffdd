"""Questions with pictures and answers, from rows of several shapes (docs/data.md).

Those of the agents' training files:  prompt, data_source, ability, env_name, reward_model {ground_truth}, extra_info {question, answer,
    index, ...}, and pictures in images (bytes, paths or hashes) or mm_hint {hint_path, hint_type}, which may also show videos.
Raw validation records:  {id, question, answer, ability, data_source, image_path}.
The user's own:  {question, answer}, with image, images or neither. For question also problem (R1-V), prompt (TRL: text or messages) or
    messages (ms-swift); for answer also solution; for pictures see column_names.py. Other names are chosen by task.data.columns.

An example's payload, whatever the shape: question (a picture's place is written <image>; pictures that have none come first), answer (out
of <answer> and \\boxed), system (of messages that hold the question), images (a tuple of StoredImage), videos (of StoredClip), data_source,
ability, env_name, index, extra (every other column and every other key of extra_info); of a published benchmark also official
(data/benchmarks/items.py).
"""

import math
from collections.abc import Mapping, Sequence

from megatron_rl.config import ColumnSettings, DataSettings, require
from megatron_rl.data.answers import given_answer, reference_answer, unwrapped
from megatron_rl.data.chat_prompt import ChatPrompt, parse_messages, read_chat
from megatron_rl.data.clips import StoredClip, stored_clips
from megatron_rl.data.column_names import ANSWER_COLUMNS, MESSAGE_COLUMNS, QUESTION_COLUMNS, is_picture_column
from megatron_rl.data.columns import MissingColumn, picture_columns, unread_picture_keys
from megatron_rl.data.decimal_forms import decimal_text
from megatron_rl.data.doubtful_answers import find_doubts
from megatron_rl.data.images import StoredImage
from megatron_rl.data.literals import listed_values
from megatron_rl.data.media_places import PARTS_AS_TEXT
from megatron_rl.data.records import PLACE, Read, Record, Records
from megatron_rl.data.survey import survey
from megatron_rl.data.unread import READ_BY_TASKS, Examined, find_unread, unread_prompts
from megatron_rl.types import Example

READ = {
    "id", "data_source", "ability", "env_name", "reward_model", "extra_info", "mm_hint", "system",
    *QUESTION_COLUMNS, *MESSAGE_COLUMNS, *ANSWER_COLUMNS,
}  # fmt: skip
READ_EXTRA = {"question", "answer", "index"}
SEES_VIDEOS = "only the code of task=visual_python task.tool_format=pyvision sees"


class Questions(Sequence[Example]):
    """Examples that are read when they are asked for. A slice is a view."""

    def __init__(self, records: Records, *, name: str, places: range | None = None, warnings: Sequence[str] = ()) -> None:
        self.records, self.name = records, name
        self.warnings = warnings
        """About columns that are not read, where every row was looked at."""
        self._places = range(len(records)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int | slice) -> "Example | Questions":
        if isinstance(index, slice):
            return Questions(self.records, name=self.name, places=self._places[index], warnings=self.warnings)
        return self._example(self._places[index])[0]

    @property
    def chosen(self) -> Mapping[str, str]:
        """Our names of columns -> those that task.data.columns gives."""
        return self.records.chosen

    @property
    def ignored(self) -> Sequence[str]:
        """Columns that no warning names."""
        return self.records.ignored

    def where(self, index: int) -> str:
        """Return file and row without reading it: `train.jsonl row 17`."""
        return self.records.where(self._places[index])

    def examine(self, index: int) -> Examined:
        """Return an example, and what its row holds that is not read."""
        example, record = self._example(self._places[index])
        unread = _unread_values(record) | _unread_keys(record) | _other_answers(record, str(example.payload["answer"]))
        unread |= unread_prompts(record, example.payload, asked_in=_question_column(record))
        if example.payload["images"]:
            unread = {name: value for name, value in unread.items() if name.removeprefix("extra_info.") not in READ_BY_TASKS}
        found = find_unread(record, example.payload, unread=unread, asked_in=_question_column(record))
        findings = [finding for finding in found if finding.is_error or not {*finding.column.split(" to ")} <= {*self.ignored}]
        if not record.official:
            given = given_answer(record, record.mapping(record.row.get("extra_info", {}), "extra_info"))
            findings += find_doubts(given, example.payload, unread=unread)
        place = "" if record.official else _picture_place(record, example.payload)
        return Examined(example, tuple(findings), record.columns, unread, self.chosen.get(place, place))

    def _example(self, place: int) -> tuple[Example, Record]:
        record = self.records[place]
        payload = payload_of(record, place=place)
        return Example(id=f"{self.name}/{place}", payload=payload, where=record.where, source=str(payload["data_source"])), record


def open_questions(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), name: str, columns: ColumnSettings | None = None,
    read: Read | None = None,
) -> Questions:  # fmt: skip
    """The questions of the files, not looked at yet."""
    records = Records(paths, images_root=images_root, image_roots=image_roots, key=f"task.data.{name}", columns=columns, read=read)
    return Questions(records, name=name)


def questions(
    paths: Sequence[str], *, images_root: str, image_roots: Sequence[str] = (), name: str, columns: ColumnSettings | None = None,
    read: Read | None = None, videos: bool = False,
) -> Questions:  # fmt: skip
    """The same after a look at every row. ValueError names file and row of the first that cannot be used."""
    opened = open_questions(paths, images_root=images_root, image_roots=image_roots, name=name, columns=columns, read=read)
    found = survey(opened)
    found.require_sound()
    require(videos or not found.video, f"task.data.{name}", list(paths), f"{found.video}, which {SEES_VIDEOS}")
    chosen = opened.chosen.get("images")
    require(not chosen or found.num_images > 0, "task.data.columns.images", chosen, f"no row of {', '.join(paths)} has pictures there")
    return Questions(opened.records, name=name, warnings=[*found.column_warnings, *found.unread])


def split_of(data: DataSettings, split: str, *, read: Read | None = None, videos: bool = False) -> Questions:
    """The questions of split train or eval, of the latter the first data.max_eval. ValueError: no files are given, or a row is no good: one
    with a video is, where `videos` are not for this task."""
    paths = {"train": data.train, "eval": data.eval}[split]
    require(bool(paths), f"task.data.{split}", paths, "give the files of questions (docs/data.md)")
    chosen = questions(
        paths, images_root=data.images, image_roots=data.image_roots, name=split, columns=data.columns, read=read, videos=videos
    )
    return chosen[: data.max_eval] if split == "eval" and data.max_eval else chosen


def payload_of(record: Record, *, place: int) -> dict[str, object]:
    """ValueError, naming file, row and field: something is missing, of the wrong type, or does not fit together."""
    row = record.row
    extra = record.mapping(row.get("extra_info", {}), "extra_info")
    asked = _question(record, extra)
    videos = _videos(record)
    images = () if videos else _placed(record, asked, _images(record))
    index = extra.get("index", row.get("id", place))
    if not isinstance(index, str | int):
        raise record.error("index", f"must be text or a whole number, is {type(index).__name__}")
    _require_answer(record, extra)
    return {
        "question": _with_places(record, asked.question, num_images=len(images)),
        "system": asked.system,
        "answer": reference_answer(record, extra),
        "images": images,
        "videos": videos,
        **{key: record.text(row.get(key, ""), key) for key in ("data_source", "ability", "env_name")},
        "index": index,
        "extra": {name.removeprefix("extra_info."): value for name, value in _unread_values(record).items()},
        **({"official": record.official} if record.official else {}),
    }


def _unread_values(record: Record) -> dict[str, object]:
    """Return what is not read of a row, by column; keys of extra_info as `extra_info.KEY`."""
    extra = record.mapping(record.row.get("extra_info", {}), "extra_info")
    pictures = picture_columns(record)
    empty = [key for key, value in record.row.items() if is_picture_column(key) and value in ("", [], {})]
    own = {key: value for key, value in record.row.items() if key not in (*READ, *pictures, *empty)}
    return own | {f"extra_info.{key}": value for key, value in extra.items() if key not in READ_EXTRA}


def _unread_keys(record: Record) -> dict[str, object]:
    """Return what is not read of mm_hint, reward_model and mappings that hold pictures."""
    read = {"mm_hint": ("hint_type",) if picture_columns(record) else ("hint_type", "hint_path"), "reward_model": ("ground_truth", "style")}
    held = {column: record.mapping(record.row.get(column, {}), column) for column in read}
    keys = {f"{column}.{key}": value for column, struct in held.items() for key, value in struct.items() if key not in read[column]}
    return keys | unread_picture_keys(record, picture_columns(record))


def _other_answers(record: Record, answer: str) -> dict[str, object]:
    """Return the answers that are not read, because another column has one, and that differ from it."""
    model, extra = (record.mapping(record.row.get(column, {}), column) for column in ("reward_model", "extra_info"))
    given = {"reward_model.ground_truth": model.get("ground_truth"), "extra_info.answer": extra.get("answer")}
    given |= {name: record.row.get(name) for name in ANSWER_COLUMNS}
    _, *others = ((name, value) for name, value in given.items() if value is not None)
    return {name: value for name, value in others if unwrapped(str(value)) != answer and not _is_number(value, answer)}


def _is_number(value: object, answer: str) -> bool:
    """Return whether an answer is the decimal form of a number."""
    return isinstance(value, float) and math.isfinite(value) and decimal_text(value) == answer


def _picture_place(record: Record, payload: Mapping[str, object]) -> str:
    """Return the column that a question's pictures or video come from, "" where it has none."""
    if not payload["images"] and not payload["videos"]:
        return ""
    hint = ["mm_hint.hint_path"] if "hint_path" in record.row.get("mm_hint", {}) else []
    return [*picture_columns(record), *hint, _question_column(record)][0]


def _question_column(record: Record) -> str:
    """Return which column gives the question, "" where none does."""
    if "question" in record.mapping(record.row.get("extra_info", {}), "extra_info"):
        return "extra_info.question"
    return next((name for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) if name in record.row), "")


def _question(record: Record, extra: Mapping[str, object]) -> ChatPrompt:
    """Read the question, the system message and the pictures that stand in messages."""
    system = record.text(record.row.get("system", ""), "system")
    if PLACE in system:
        raise record.error("system", f"has {PLACE}, and the system message shows no pictures; move it to the question")
    name = _question_column(record)
    if not name:
        raise MissingColumn(record, "question")
    value = extra["question"] if name == "extra_info.question" else parse_messages(record, record.row[name], name)
    if isinstance(value, str) and PARTS_AS_TEXT.match(value):
        raise record.error(name, "is a list of parts written as text; write the words, and pictures into a column images")
    if not isinstance(value, list):
        return ChatPrompt(record.text(value, name), system)
    asked = read_chat(record, value, name)
    if system and asked.system and system != asked.system:
        raise record.error("system", f"is given in this column and as a message of {name}; keep one of them")
    asked.system = asked.system or system
    return asked


def _placed(record: Record, asked: ChatPrompt, listed: Sequence[StoredImage]) -> tuple[StoredImage, ...]:
    """Return the pictures of a question in the order of their places: those of messages, and those of a column for the other places."""
    num_open = asked.images.count(None)
    if num_open == len(asked.images):
        return tuple(listed)
    if num_open != len(listed):
        raise record.error("question", f"has {num_open} {PLACE} without a picture in the messages, and a column has {len(listed)} pictures")
    remaining = iter(listed)
    return tuple(next(remaining) if image is None else image for image in asked.images)


def _with_places(record: Record, text: str, *, num_images: int) -> str:
    """Return the question with a place for each picture: at its front, unless it has them."""
    num_places = text.count(PLACE)
    if num_places not in (0, num_images):
        raise record.error("question", f"has {num_places} {PLACE} for {num_images} pictures")
    if not text.replace(PLACE, "").strip():
        raise record.error("question", "is empty")
    return text if num_places else f"{PLACE}\n" * num_images + text


def _require_answer(record: Record, extra: Mapping[str, object]) -> None:
    """Raise MissingColumn for a row without an answer."""
    model = record.mapping(record.row.get("reward_model", {}), "reward_model")
    if "ground_truth" in model or "answer" in extra or any(name in record.row for name in ANSWER_COLUMNS):
        return
    messages = [value for name in MESSAGE_COLUMNS if isinstance(value := record.row.get(name), list)]
    roles = [message.get("role") for message in messages[0] if isinstance(message, Mapping)] if messages else []
    hint = "the assistant's message is not read as the answer; write it into a column" if roles[-1:] == ["assistant"] else ""
    raise MissingColumn(record, "answer", hint=hint)


def _videos(record: Record) -> tuple[StoredClip, ...]:
    hint = record.mapping(record.row.get("mm_hint", {}), "mm_hint")
    if hint.get("hint_type", "image") == "image":
        return ()
    pictures = picture_columns(record)
    if hint["hint_type"] != "video" or pictures:
        raise record.error("mm_hint", f"hint_type is image, or video without {', '.join(pictures) or 'pictures'}; is {hint['hint_type']}")
    return stored_clips(hint, folder=record.folder, where=f"{record.where}: mm_hint.hint_path", roots=record.roots)


def _images(record: Record) -> tuple[StoredImage, ...]:
    row = record.row
    hint = record.mapping(row.get("mm_hint", {}), "mm_hint")
    given = {name: listed_values(row[name]) for name in picture_columns(record)}
    if not given and "hint_path" in hint:
        given = {"mm_hint.hint_path": listed_values(hint["hint_path"])}
    return tuple(
        record.image(value, f"{name}[{number}]" if isinstance(values, list) else name)
        for name, values in given.items()
        for number, value in enumerate(values if isinstance(values, list) else [values])
    )
