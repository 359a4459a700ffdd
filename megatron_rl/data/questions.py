"""Questions with pictures and answers, from rows of several shapes (docs/data.md).

Those of the agents' training files:  prompt, data_source, ability, env_name, reward_model {ground_truth}, extra_info {question, answer,
    index, ...}, and pictures in images (bytes, paths or hashes) or mm_hint {hint_path, hint_type}, which may also show videos.
Raw validation records:  {id, question, answer, ability, data_source, image_path}.
The user's own:  {question, answer}, with image, images or neither. For question also problem (R1-V), prompt (TRL: text or messages) or
    messages (ms-swift); for answer also solution. Other names are chosen by task.data.columns.

An example's payload, whatever the shape: question (a picture's place is written <image>; pictures that have none come first), answer (out
of <answer> and \\boxed), system (of messages that hold the question), images (a tuple of StoredImage), videos (of StoredClip), data_source,
ability, env_name, index, extra (every other column and every other key of extra_info); of a published benchmark also official
(published/items.py).
"""

from collections.abc import Mapping, Sequence

from megatron_rl.config import ColumnSettings, DataSettings, require
from megatron_rl.data.answers import ANSWER_COLUMNS, reference_answer
from megatron_rl.data.clips import StoredClip, stored_clips
from megatron_rl.data.images import StoredImage
from megatron_rl.data.records import PLACE, Read, Record, Records
from megatron_rl.data.survey import survey
from megatron_rl.types import Example

IMAGE_COLUMNS = ("images", "image", "image_path")
QUESTION_COLUMNS, MESSAGE_COLUMNS = ("question", "problem"), ("prompt", "messages")
READ = {
    "id", "data_source", "ability", "env_name", "reward_model", "extra_info", "mm_hint", "system",
    *QUESTION_COLUMNS, *MESSAGE_COLUMNS, *ANSWER_COLUMNS, *IMAGE_COLUMNS,
}  # fmt: skip
READ_EXTRA = {"question", "answer", "index"}
SEES_VIDEOS = "only the code of task=visual_python task.protocol=pyvision sees"


class Questions(Sequence[Example]):
    """Examples that are read when they are asked for. A slice is a view."""

    def __init__(self, records: Records, *, name: str, places: range | None = None) -> None:
        self.records, self.name = records, name
        self._places = range(len(records)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int | slice) -> "Example | Questions":
        if isinstance(index, slice):
            return Questions(self.records, name=self.name, places=self._places[index])
        place = self._places[index]
        record = self.records[place]
        payload = payload_of(record, place=place)
        return Example(id=f"{self.name}/{place}", payload=payload, where=record.where, source=str(payload["data_source"]))


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
    given = columns or ColumnSettings()
    files = ", ".join(paths)
    require(not given.images or found.num_images > 0, "task.data.columns.images", given.images, f"no row of {files} has pictures there")
    has_sources = {*found.sources} != {""}
    require(not given.data_source or has_sources, "task.data.columns.data_source", given.data_source, f"no row of {files} has that column")
    return opened


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
    videos = _videos(record)
    images = () if videos else _images(record) or _shown_in_messages(record, extra)
    index = extra.get("index", row.get("id", place))
    if not isinstance(index, str | int):
        raise record.error("index", f"must be text or a whole number, is {type(index).__name__}")
    rest = {key: value for key, value in row.items() if key not in READ} | {key: extra[key] for key in extra if key not in READ_EXTRA}
    question, system = _question(record, extra, num_images=len(images))
    return {
        "question": question,
        "system": system,
        "answer": reference_answer(record, extra),
        "images": images,
        "videos": videos,
        **{key: record.text(row.get(key, ""), key) for key in ("data_source", "ability", "env_name")},
        "index": index,
        "extra": rest,
        **({"official": record.official} if record.official else {}),
    }


def _question(record: Record, extra: Mapping[str, object], *, num_images: int) -> tuple[str, str]:
    """And what the system says where both are read from messages, or stands in a column beside them."""
    system = record.text(record.row.get("system", ""), "system")
    given = next((name for name in (*QUESTION_COLUMNS, *MESSAGE_COLUMNS) if name in record.row), "")
    if "question" in extra:
        text = record.text(extra["question"], "extra_info.question")
    elif not given:
        raise record.error("question", "is missing: a row has extra_info.question, question, problem, prompt or messages")
    elif given in MESSAGE_COLUMNS and isinstance(record.row[given], list):
        text, said = _asked(record, given)
        system = system or said
    else:
        text = record.text(record.row[given], given)
    num_places = text.count(PLACE)
    if num_places not in (0, num_images):
        raise record.error("question", f"has {num_places} {PLACE} for {num_images} pictures")
    if not text.replace(PLACE, "").strip():
        raise record.error("question", "is empty")
    return text if num_places else f"{PLACE}\n" * num_images + text, system


def _asked(record: Record, name: str) -> tuple[str, str]:
    """What the user asks in messages, and what the system says before. Of an answer of the assistant behind it nothing is read."""
    messages = [record.mapping(message, name) for message in record.items(record.row[name], name)]
    roles = [message.get("role") for message in messages]
    if "user" not in roles:
        raise record.error(name, "has no message of the user")
    last = len(roles) - 1 - roles[::-1].index("user")
    if "assistant" in roles[:last]:
        raise record.error(name, "has turns of the assistant before the question; a question is one message of the user")
    system = next((_text_of(record, message, name) for message in messages[:last] if message.get("role") == "system"), "")
    return _text_of(record, messages[last], name), system


def _text_of(record: Record, message: Mapping[str, object], name: str) -> str:
    """A message's words; its parts become text with places."""
    content = message.get("content")
    if not isinstance(content, list):
        return record.text(content, name)
    parts = [record.mapping(part, name) for part in content]
    return "".join(PLACE if part.get("type") in ("image", "image_url") else record.text(part.get("text"), name) for part in parts)


def _shown_in_messages(record: Record, extra: Mapping[str, object]) -> tuple[StoredImage, ...]:
    """Pictures that stand in the question's message itself, where it has parts: as `image`, or as OpenAI's image_url."""
    name = next((name for name in MESSAGE_COLUMNS if isinstance(record.row.get(name), list)), "")
    if not name or "question" in extra or any(column in record.row for column in QUESTION_COLUMNS):
        return ()
    asked = [message for message in record.row[name] if isinstance(message, Mapping) and message.get("role") == "user"]
    content = asked[-1].get("content") if asked else None
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    values = [
        part["image"] if "image" in part else record.mapping(part["image_url"], name).get("url")
        for part in parts
        if {"image", "image_url"} & part.keys()
    ]
    return tuple(record.image(value, name) for value in values)


def _videos(record: Record) -> tuple[StoredClip, ...]:
    hint = record.mapping(record.row.get("mm_hint", {}), "mm_hint")
    if hint.get("hint_type", "image") == "image":
        return ()
    pictures = [name for name in IMAGE_COLUMNS if record.row.get(name, "") not in ("", [])]
    if hint["hint_type"] != "video" or pictures:
        raise record.error("mm_hint", f"hint_type is image, or video without {', '.join(pictures) or 'pictures'}; is {hint['hint_type']}")
    return stored_clips(hint, folder=record.folder, where=f"{record.where}: mm_hint.hint_path", roots=record.roots)


def _images(record: Record) -> tuple[StoredImage, ...]:
    row = record.row
    hint = record.mapping(row.get("mm_hint", {}), "mm_hint")
    if "video_path" in row:
        raise record.error("video_path", "is not read; name a video in mm_hint: {hint_type: video, hint_path: clip.mp4}")
    given = {name: row[name] for name in IMAGE_COLUMNS if row.get(name, "") not in ("", [])} or (
        {"mm_hint.hint_path": hint["hint_path"]} if "hint_path" in hint else {}
    )
    if len(given) > 1:
        raise record.error(" and ".join(given), "name the pictures twice; keep one of these columns")
    return tuple(
        record.image(value, f"{name}[{number}]" if isinstance(values, list) else name)
        for name, values in given.items()
        for number, value in enumerate(values if isinstance(values, list) else [values])
    )
