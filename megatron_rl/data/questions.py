"""Questions with pictures and answers, from rows of three shapes.

Those of the agents' training files:  prompt, data_source, ability, env_name, reward_model {ground_truth}, extra_info {question, answer,
    index, ...}, and pictures in images (bytes, paths or hashes) or mm_hint {hint_path, hint_type}.
Raw validation records:  {id, question, answer, ability, data_source, image_path}.
The user's own:  {question, answer}, with image, images or neither.

An example's payload, whatever the shape: question (a picture's place is written <image>; pictures that have none come first), answer,
images (a tuple of StoredImage), data_source, ability, env_name, index, extra (every other column and every other key of extra_info).
"""

from collections.abc import Mapping, Sequence

from megatron_rl.config import DataSettings, require
from megatron_rl.data.images import StoredImage
from megatron_rl.data.records import PLACE, Record, Records
from megatron_rl.data.survey import survey
from megatron_rl.types import Example

IMAGE_COLUMNS = ("images", "image", "image_path")
READ = {"prompt", "question", "answer", "id", "data_source", "ability", "env_name", "reward_model", "extra_info", "mm_hint", *IMAGE_COLUMNS}
READ_EXTRA = {"question", "answer", "index"}


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
        return Example(id=f"{self.name}/{place}", payload=payload_of(self.records[place], place=place))


def open_questions(paths: Sequence[str], *, images_root: str, name: str) -> Questions:
    """The questions of the files, not looked at yet."""
    return Questions(Records(paths, images_root=images_root), name=name)


def questions(paths: Sequence[str], *, images_root: str, name: str) -> Questions:
    """The same after a look at every row. ValueError names file and row of the first that cannot be used."""
    opened = open_questions(paths, images_root=images_root, name=name)
    survey(opened).require_sound()
    return opened


def split_of(data: DataSettings, split: str) -> Questions:
    """The questions of split train or eval, of the latter the first data.max_eval. ValueError: no files are given, or a row is no good."""
    paths = {"train": data.train, "eval": data.eval}[split]
    require(bool(paths), f"task.data.{split}", paths, "give the files of questions: JSON lists, JSON lines or Parquet")
    chosen = questions(paths, images_root=data.images, name=split)
    return chosen[: data.max_eval] if split == "eval" and data.max_eval else chosen


def payload_of(record: Record, *, place: int) -> dict[str, object]:
    """ValueError, naming file, row and field: something is missing, of the wrong type, or does not fit together."""
    row = record.row
    extra = record.mapping(row.get("extra_info", {}), "extra_info")
    images = _images(record)
    index = extra.get("index", row.get("id", place))
    if not isinstance(index, str | int):
        raise record.error("index", f"must be text or a whole number, is {type(index).__name__}")
    rest = {key: value for key, value in row.items() if key not in READ} | {key: extra[key] for key in extra if key not in READ_EXTRA}
    return {
        "question": _question(record, extra, num_images=len(images)),
        "answer": _answer(record, extra),
        "images": images,
        **{key: record.text(row.get(key, ""), key) for key in ("data_source", "ability", "env_name")},
        "index": index,
        "extra": rest,
    }


def _question(record: Record, extra: Mapping[str, object], *, num_images: int) -> str:
    if "question" in extra:
        text = record.text(extra["question"], "extra_info.question")
    elif "question" in record.row:
        text = record.text(record.row["question"], "question")
    else:
        text = _last_user_text(record)
    num_places = text.count(PLACE)
    if num_places not in (0, num_images):
        raise record.error("question", f"has {num_places} {PLACE} for {num_images} pictures")
    if not text.replace(PLACE, "").strip():
        raise record.error("question", "is empty")
    return text if num_places else f"{PLACE}\n" * num_images + text


def _last_user_text(record: Record) -> str:
    """Of the prompt's messages the last that the user says; its parts become text with places."""
    if "prompt" not in record.row:
        raise record.error("question", "is missing: a row has extra_info.question, question or prompt")
    messages = [record.mapping(message, "prompt") for message in record.items(record.row["prompt"], "prompt")]
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said:
        raise record.error("prompt", "has no message of the user")
    if not isinstance(said[-1], list):
        return record.text(said[-1], "prompt")
    parts = [record.mapping(part, "prompt") for part in said[-1]]
    return "".join(PLACE if part.get("type") == "image" else record.text(part.get("text"), "prompt") for part in parts)


def _answer(record: Record, extra: Mapping[str, object]) -> str:
    model = record.mapping(record.row.get("reward_model", {}), "reward_model")
    found = [value for value in (model.get("ground_truth"), extra.get("answer"), record.row.get("answer")) if value is not None]
    if not found:
        raise record.error("answer", "is missing: a row has reward_model.ground_truth, extra_info.answer or answer")
    if isinstance(found[0], list | Mapping | bytes):
        raise record.error("answer", f"must be text or a number, is {type(found[0]).__name__}")
    answer = record.text(str(found[0]), "answer").strip()
    if not answer:
        raise record.error("answer", "is empty")
    return answer


def _images(record: Record) -> tuple[StoredImage, ...]:
    row = record.row
    hint = record.mapping(row.get("mm_hint", {}), "mm_hint")
    if hint.get("hint_type", "image") != "image" or "video_path" in row:
        raise record.error("mm_hint", "shows a video, and videos are not supported")
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
