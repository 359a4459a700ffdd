"""Rows of the published files -> items. Each reader says which files it knows; columns are those of the files' cards (2024 to 2026)."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.data.benchmarks.items import LETTERS, Item, lettered, text
from megatron_rl.data.benchmarks.listed_options import IN_A_LINE, listed_options, split_options
from megatron_rl.data.images import SUFFIXES
from megatron_rl.data.records import PLACE, Record

_OPTION = re.compile(r"^\(?([A-Z])[).:]\s*(.*)$", re.MULTILINE)
_NUMBERED_PLACE = re.compile(r"<image\s?\d+>")
HEAD = 1 << 16
"""Bytes of a picture's file by which it is told apart from others."""
VISION_ONLY = "Answer the question that the picture shows."
GRID_DIFFICULTY, DIFFICULTY = ("metadata", "meta_data"), "difficulty"
TIR_MENDED = {"60.jpg": "mobi", "62.jpg": "aires"}
"""Answers that TIR-Bench's own scoring (calculate_score.py) takes in the place of its file's."""


def vstar(record: Record) -> Item:
    """The folders of pictures with a JSON file each, whose first option is the right one; test_questions.jsonl; a table."""
    if "options" in record.row:
        options = tuple(str(option) for option in record.items(record.row["options"], "options"))
        labels = {"category": record.path.parent.name}
        return Item(question=text(record, "question"), options=options, answer="A", images=(_beside(record),), labels=labels)
    labels = {"category": text(record, "category")}
    if "A" in record.row:
        picture = record.row.get("image", "")
        return Item(
            question=text(record, "question"), options=lettered(record), answer=text(record, "answer"), images=(picture,), labels=labels
        )
    question, options = _split_options(text(record, "text"))
    return Item(question=question, options=options, answer=text(record, "label"), images=(record.row.get("image", ""),), labels=labels)


def hrbench(record: Record) -> Item:
    """hr_bench_4k and hr_bench_8k, as tables or Parquet: each question four times, its options in four orders."""
    labels = {"category": text(record, "category"), "cycle": text(record, "cycle_category")}
    given = {"options": lettered(record), "answer": text(record, "answer"), "images": (record.row.get("image", ""),)}
    unit = f"{text(record, 'question')} {_told_apart(record.row.get('image'))}"
    return Item(question=text(record, "question"), labels=labels, unit=unit, **given)


def _told_apart(picture: object) -> str:
    """The same of equal pictures, whose files begin alike and are as long as each other."""
    data = picture.get("bytes") if isinstance(picture, Mapping) else picture
    start = data[:HEAD] if isinstance(data, bytes) else str(data)[:HEAD].encode()
    length = len(data) if isinstance(data, bytes | str) else 0
    return hashlib.sha256(start + str(length).encode()).hexdigest()[:12]


def mathverse(record: Record) -> Item:
    """testmini: each problem in five versions; in the last one the question stands in the picture."""
    labels = {"version": text(record, "problem_version"), "type": text(record, "question_type")}
    question = text(record, "question", default="") or VISION_ONLY
    unit = text(record, "problem_index")
    return Item(question=question, answer=text(record, "answer"), images=(record.row.get("image", ""),), labels=labels, unit=unit)


def mathvista(record: Record) -> Item:
    """testmini and test: multiple choice, whole numbers, decimals of a precision, lists."""
    about = record.mapping(record.row.get("metadata", {}), "metadata")
    kind, precision = text(record, "answer_type"), int(float(text(record, "precision", default="0")))
    hints = {"integer": "Give a whole number.", "float": f"Give a number with {precision} decimals.", "list": "Give a list: [1, 2, 3]."}
    choices = tuple(str(choice) for choice in record.items(record.row.get("choices", []), "choices"))
    answer = text(record, "answer")
    if not answer:
        raise record.error("answer", "is empty: answers of MathVista's test split are not published; use testmini")
    if choices:
        if answer not in choices[: len(LETTERS)]:
            raise record.error("answer", f"is none of the choices: {answer[:80]}")
        answer = LETTERS[choices.index(answer)]
    unit = text(record, "unit", default="")
    return Item(
        question=text(record, "question") + (f" (Unit: {unit})" if unit else ""),
        options=choices,
        answer=answer,
        images=(record.row.get("decoded_image") or record.row.get("image", ""),),
        hint="" if choices else hints.get(kind, ""),
        labels={"task": str(about.get("task", "")), "type": "choice" if choices else kind},
        by={"answer_type": "choice" if choices else kind, "precision": precision},
    )


def vsi_bench(record: Record) -> Item:
    """test.jsonl, or Parquet, beside folders DATASET/SCENE of the frames of each video, in the order of their names; where there is no such
    folder, beside DATASET/SCENE.mp4."""
    kind = text(record, "question_type")
    options = tuple(re.sub(r"^[A-Z]\.\s*", "", str(option)) for option in record.items(record.row.get("options", []), "options"))
    frames, video = _frames(record)
    return Item(
        question=("" if video else "The pictures are frames of a video, in order.\n") + text(record, "question"),
        options=options,
        answer=text(record, "ground_truth"),
        images=tuple(frames),
        videos=(video,) if video else (),
        hint="" if options else "Give a number.",
        labels={"type": kind},
    )


def tir_bench(record: Record) -> Item:
    """TIR-Bench.json: thirteen tasks, one or two pictures."""
    task, answer = text(record, "task", "category"), text(record, "answer")
    about = next((record.row[name] for name in GRID_DIFFICULTY if name in record.row), {})
    images = tuple(record.row.get(name, "") for name in ("image_1", "image_2"))
    if task == "ocr":
        answer = next((mended for name, mended in TIR_MENDED.items() if name in str(images[0])), answer)
    side = about.get(DIFFICULTY, 0) if isinstance(about, dict) else 0
    prompt = text(record, "prompt")
    by = {"task": task, "side": int(side) if str(side).isdigit() else 0, "choices": listed_options(prompt, answer=answer)}
    return Item(question=prompt, answer=answer, images=images, labels={"task": task}, by=by)


def visualprobe(record: Record) -> Item:
    """val.json or Parquet of easy, medium and hard, whose names of pictures begin with the name of the data set."""
    given = record.row.get("images") or [record.row.get("image", "")]
    images = tuple(_without_home(record, image) for image in record.items(given, "images"))
    named = f"{text(record, 'data_source', default='')} {given[0] if isinstance(given[0], str) else ''} {record.path}".casefold()
    level = next((level for level in ("easy", "medium", "hard") if f"probe_{level}" in named), "any")
    answer, question = text(record, "answer", "solution"), text(record, "problem", "question")
    return Item(question=question.replace(PLACE, ""), answer=answer, images=images, labels={"level": level})


def mathvision(record: Record) -> Item:
    """test and testmini: options, or an answer of their own; pictures' places are numbered."""
    options = tuple(str(option) for option in record.items(record.row.get("options", []), "options"))
    labels = {"subject": text(record, "subject", default="any"), "level": text(record, "level", default="any")}
    image = record.row.get("decoded_image") or record.row.get("image", "")
    question = _NUMBERED_PLACE.sub(PLACE, text(record, "question"))
    return Item(question=question, options=options, answer=text(record, "answer"), images=(image,), labels=labels)


def wemath(record: Record) -> Item:
    """testmini: a problem of two or three steps and its steps as problems of their own, by ID."""
    options = lettered(record) or split_options(text(record, "option"), IN_A_LINE)
    key, answer = text(record, "key"), text(record, "answer")
    if answer not in [*LETTERS[: len(options)]]:
        raise record.error("answer", f"is {answer[:80]}, which is no letter of the {len(options)} options")
    if not re.fullmatch(r"[23]steps_([123]|multi)", key):
        raise record.error("key", f"is {key}; 2steps_1, 3steps_multi or the like was expected")
    return Item(
        question=text(record, "question"),
        options=options,
        answer=answer,
        images=(record.row.get("image_path") or record.row.get("image", ""),),
        labels={"key": key},
        unit=f"{key[0]} {text(record, 'ID')}",
    )


def dynamath(record: Record) -> Item:
    """The ten variants of each problem: files sample_variant1 to 10, a table with qid and varid, or dataset.json of ten trials, each an
    object by number."""
    kind, question, answer = text(record, "answer_type"), text(record, "question"), text(record, "ground_truth", "answer")
    labels = {"subject": text(record, "subject", default="any"), "level": text(record, "knowledge_level", "level", default="any")}
    hint = {"float": "Give a number with three decimals.", "multiple choice": "Give the letter of the right choice."}.get(kind, "")
    return Item(
        question=question,
        answer=answer,
        images=(record.row.get("decoded_image") or record.row.get("image", ""),),
        hint=hint,
        labels={**labels, "type": kind},
        unit=text(record, "qid", "id"),
        by={"answer_type": kind, "choices": listed_options(question, answer=answer)},
    )


def vlmblind(record: Record) -> Item:
    """The valid split: seven tasks, two of them in two forms."""
    task = re.split(r"\s+-\s+", text(record, "task"))[0]
    return Item(question=text(record, "prompt"), answer=text(record, "groundtruth"), images=(record.row["image"],), labels={"task": task})


def _split_options(words: str) -> tuple[str, tuple[str, ...]]:
    """The question in front of lines (A) ..., (B) ...; what stands behind them is how to answer."""
    found = list(_OPTION.finditer(words))
    return (words[: found[0].start()] if found else words).strip(), tuple(option[2].strip() for option in found)


def _beside(record: Record) -> str:
    """The picture that is named as the row's file is."""
    found = next((path for suffix in SUFFIXES[1:] if (path := record.path.with_suffix(suffix)).is_file()), None)
    if found is None:
        raise record.error("image", f"there is no picture {record.path.with_suffix('.jpg')}")
    return str(found)


def _frames(record: Record) -> tuple[list[str], str]:
    """Of the folder of a scene, all; without a folder the video."""
    folder: Path = record.folder / text(record, "dataset") / text(record, "scene_name")
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES[1:]) if folder.is_dir() else []
    video = folder.with_name(f"{folder.name}.mp4")
    if not found and not video.is_file():
        remedy = f"ffmpeg -i {folder}.mp4 -vf fps=1 {folder}/%05d.jpg makes them, task.data.images is the folder of the data sets"
        raise record.error("scene_name", f"there are no frames in {folder}, and no {video.name} beside it; {remedy}")
    return [str(path) for path in found], "" if found else str(video)


def _without_home(record: Record, image: object) -> object:
    """VisualProbe_Hard/x.jpg -> x.jpg, where the file lies beside the row's."""
    if isinstance(image, str) and image.startswith("VisualProbe_") and not (record.folder / image).is_file():
        return image.partition("/")[2]
    return image
