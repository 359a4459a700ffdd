"""Readers that convert rows of published benchmark files to items.

The docstring of each reader lists the supported files. Column names follow the files' dataset cards
(2024 to 2026).
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.data.benchmarks.items import LETTERS, BenchmarkItem, read_lettered_options, read_text_column
from megatron_rl.data.benchmarks.listed_options import INLINE_MARKER, find_listed_options, split_options
from megatron_rl.data.images import SUFFIXES
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord

_OPTION = re.compile(r"^\(?([A-Z])[).:]\s*(.*)$", re.MULTILINE)
_NUMBERED_PLACE = re.compile(r"<image\s?\d+>")
HEAD_BYTES = 1 << 16
"""Number of leading bytes of an image file that are hashed to distinguish images."""
VISION_ONLY = "Answer the question that the picture shows."
GRID_DIFFICULTY, DIFFICULTY = ("metadata", "meta_data"), "difficulty"
TIR_CORRECTIONS = {"60.jpg": "mobi", "62.jpg": "aires"}
"""Maps an image name to the corrected answer in TIR-Bench's own scoring (calculate_score.py)."""


def read_vstar(record: DataRecord) -> BenchmarkItem:
    """Read a row of V*.

    Files: folders that contain images and one JSON file per image, test_questions.jsonl, or a
    table. In the JSON files, the first option is the correct option.
    """
    if "options" in record.row:
        options = tuple(str(option) for option in record.require_list(record.row["options"], "options"))
        labels = {"category": record.path.parent.name}
        return BenchmarkItem(
            question=read_text_column(record, "question"), options=options, answer="A", images=(_image_next_to_file(record),), labels=labels
        )
    labels = {"category": read_text_column(record, "category")}
    if "A" in record.row:
        picture = record.row.get("image", "")
        return BenchmarkItem(
            question=read_text_column(record, "question"),
            options=read_lettered_options(record),
            answer=read_text_column(record, "answer"),
            images=(picture,),
            labels=labels,
        )
    question, options = _split_options(read_text_column(record, "text"))
    return BenchmarkItem(
        question=question, options=options, answer=read_text_column(record, "label"), images=(record.row.get("image", ""),), labels=labels
    )


def read_hrbench(record: DataRecord) -> BenchmarkItem:
    """Read a row of HR-Bench.

    Files: hr_bench_4k and hr_bench_8k as tables or Parquet. Each question occurs four times, each
    time with its options in a different order.
    """
    labels = {"category": read_text_column(record, "category"), "cycle": read_text_column(record, "cycle_category")}
    given = {
        "options": read_lettered_options(record),
        "answer": read_text_column(record, "answer"),
        "images": (record.row.get("image", ""),),
    }
    unit = f"{read_text_column(record, 'question')} {_image_digest(record.row.get('image'))}"
    return BenchmarkItem(question=read_text_column(record, "question"), labels=labels, unit=unit, **given)


def _image_digest(picture: object) -> str:
    """Return a digest that is the same for equal images.

    The digest is computed from the image's first HEAD_BYTES bytes and its length.
    """
    data = picture.get("bytes") if isinstance(picture, Mapping) else picture
    start = data[:HEAD_BYTES] if isinstance(data, bytes) else str(data)[:HEAD_BYTES].encode()
    length = len(data) if isinstance(data, bytes | str) else 0
    return hashlib.sha256(start + str(length).encode()).hexdigest()[:12]


def read_mathverse(record: DataRecord) -> BenchmarkItem:
    """Read a row of MathVerse.

    File: testmini. Each problem has five versions; in the last version, the question is part of the
    image.
    """
    labels = {"version": read_text_column(record, "problem_version"), "type": read_text_column(record, "question_type")}
    question = read_text_column(record, "question", default="") or VISION_ONLY
    unit = read_text_column(record, "problem_index")
    return BenchmarkItem(
        question=question, answer=read_text_column(record, "answer"), images=(record.row.get("image", ""),), labels=labels, unit=unit
    )


def read_mathvista(record: DataRecord) -> BenchmarkItem:
    """Read a row of MathVista.

    Files: the splits testmini and test. Answers are choices, integers, decimals with a given
    precision, or lists.
    """
    about = record.require_mapping(record.row.get("metadata", {}), "metadata")
    kind, precision = read_text_column(record, "answer_type"), int(float(read_text_column(record, "precision", default="0")))
    hints = {"integer": "Give a whole number.", "float": f"Give a number with {precision} decimals.", "list": "Give a list: [1, 2, 3]."}
    choices = tuple(str(choice) for choice in record.require_list(record.row.get("choices", []), "choices"))
    answer = read_text_column(record, "answer")
    if not answer:
        raise record.make_error("answer", "is empty: answers of MathVista's test split are not published; use testmini")
    if choices:
        if answer not in choices[: len(LETTERS)]:
            raise record.make_error("answer", f"is not one of the choices: {answer[:80]}")
        answer = LETTERS[choices.index(answer)]
    unit = read_text_column(record, "unit", default="")
    return BenchmarkItem(
        question=read_text_column(record, "question") + (f" (Unit: {unit})" if unit else ""),
        options=choices,
        answer=answer,
        images=(record.row.get("decoded_image") or record.row.get("image", ""),),
        hint="" if choices else hints.get(kind, ""),
        labels={"task": str(about.get("task", "")), "type": "choice" if choices else kind},
        scoring_info={"answer_type": "choice" if choices else kind, "precision": precision},
    )


def read_vsi_bench(record: DataRecord) -> BenchmarkItem:
    """Read a row of VSI-Bench.

    Files: test.jsonl or Parquet, next to folders DATASET/SCENE that contain the frames of each
    video, ordered by file name. If a scene has no frames, DATASET/SCENE.mp4 is used.
    """
    kind = read_text_column(record, "question_type")
    options = tuple(re.sub(r"^[A-Z]\.\s*", "", str(option)) for option in record.require_list(record.row.get("options", []), "options"))
    frames, video = _find_frames(record)
    return BenchmarkItem(
        question=("" if video else "The pictures are frames of a video, in order.\n") + read_text_column(record, "question"),
        options=options,
        answer=read_text_column(record, "ground_truth"),
        images=tuple(frames),
        videos=(video,) if video else (),
        hint="" if options else "Give a number.",
        labels={"type": kind},
    )


def read_tir_bench(record: DataRecord) -> BenchmarkItem:
    """Read a row of TIR-Bench.

    The file TIR-Bench.json contains thirteen tasks, with one or two images per row.
    """
    task, answer = read_text_column(record, "task", "category"), read_text_column(record, "answer")
    about = next((record.row[name] for name in GRID_DIFFICULTY if name in record.row), {})
    images = tuple(record.row.get(name, "") for name in ("image_1", "image_2"))
    if task == "ocr":
        answer = next((mended for name, mended in TIR_CORRECTIONS.items() if name in str(images[0])), answer)
    side = about.get(DIFFICULTY, 0) if isinstance(about, dict) else 0
    prompt = read_text_column(record, "prompt")
    by = {"task": task, "side": int(side) if str(side).isdigit() else 0, "choices": find_listed_options(prompt, answer=answer)}
    return BenchmarkItem(question=prompt, answer=answer, images=images, labels={"task": task}, scoring_info=by)


def read_visualprobe(record: DataRecord) -> BenchmarkItem:
    """Read a row of VisualProbe.

    Files: val.json or Parquet for the levels easy, medium and hard. Image names begin with the name
    of the data set.
    """
    given = record.require_list(record.row.get("images") or [record.row.get("image", "")], "images")
    images = tuple(_strip_dataset_folder(record, image) for image in given)
    named = (
        f"{read_text_column(record, 'data_source', default='')} {given[0] if isinstance(given[0], str) else ''} {record.path}".casefold()
    )
    level = next((level for level in ("easy", "medium", "hard") if f"probe_{level}" in named), "any")
    answer, question = read_text_column(record, "answer", "solution"), read_text_column(record, "problem", "question")
    return BenchmarkItem(question=question.replace(IMAGE_PLACEHOLDER, ""), answer=answer, images=images, labels={"level": level})


def read_mathvision(record: DataRecord) -> BenchmarkItem:
    """Read a row of MathVision.

    The reader accepts the test and testmini splits. Rows have options or a free-form answer; image
    placeholders are numbered.
    """
    options = tuple(str(option) for option in record.require_list(record.row.get("options", []), "options"))
    labels = {"subject": read_text_column(record, "subject", default="any"), "level": read_text_column(record, "level", default="any")}
    image = record.row.get("decoded_image") or record.row.get("image", "")
    question = _NUMBERED_PLACE.sub(IMAGE_PLACEHOLDER, read_text_column(record, "question"))
    return BenchmarkItem(question=question, options=options, answer=read_text_column(record, "answer"), images=(image,), labels=labels)


def read_wemath(record: DataRecord) -> BenchmarkItem:
    """Read a row of We-Math.

    File: testmini. Each problem has two or three steps. The steps and the composite question of a
    problem are separate rows with the same ID.
    """
    options = read_lettered_options(record) or split_options(read_text_column(record, "option"), INLINE_MARKER)
    key, answer = read_text_column(record, "key"), read_text_column(record, "answer")
    if answer not in [*LETTERS[: len(options)]]:
        raise record.make_error("answer", f"is {answer[:80]}, which is not the letter of one of the {len(options)} options")
    if not re.fullmatch(r"[23]steps_([123]|multi)", key):
        raise record.make_error("key", f"is {key}; expected a value such as 2steps_1 or 3steps_multi")
    return BenchmarkItem(
        question=read_text_column(record, "question"),
        options=options,
        answer=answer,
        images=(record.row.get("image_path") or record.row.get("image", ""),),
        labels={"key": key},
        unit=f"{key[0]} {read_text_column(record, 'ID')}",
    )


def read_dynamath(record: DataRecord) -> BenchmarkItem:
    """Read a row of DynaMath, which has ten variants of each problem.

    Files: sample_variant1 to sample_variant10; a table with qid and varid; or dataset.json with ten
    trials, each an object with numeric keys.
    """
    kind, question, answer = (
        read_text_column(record, "answer_type"),
        read_text_column(record, "question"),
        read_text_column(record, "ground_truth", "answer"),
    )
    labels = {
        "subject": read_text_column(record, "subject", default="any"),
        "level": read_text_column(record, "knowledge_level", "level", default="any"),
    }
    hint = {"float": "Give a number with three decimals.", "multiple choice": "Give the letter of the right choice."}.get(kind, "")
    return BenchmarkItem(
        question=question,
        answer=answer,
        images=(record.row.get("decoded_image") or record.row.get("image", ""),),
        hint=hint,
        labels={**labels, "type": kind},
        unit=read_text_column(record, "qid", "id"),
        scoring_info={"answer_type": kind, "choices": find_listed_options(question, answer=answer)},
    )


def read_vlmblind(record: DataRecord) -> BenchmarkItem:
    """Read a row of VLMs Are Blind.

    The split valid contains seven tasks; two of the tasks have two forms.
    """
    task = re.split(r"\s+-\s+", read_text_column(record, "task"))[0]
    return BenchmarkItem(
        question=read_text_column(record, "prompt"),
        answer=read_text_column(record, "groundtruth"),
        images=(record.row["image"],),
        labels={"task": task},
    )


def _split_options(words: str) -> tuple[str, tuple[str, ...]]:
    """Split a text into the question and its options.

    Each option is on a line that starts with its letter: (A), (B) and so on. Instructions after the
    options are dropped.
    """
    found = list(_OPTION.finditer(words))
    return (words[: found[0].start()] if found else words).strip(), tuple(option[2].strip() for option in found)


def _image_next_to_file(record: DataRecord) -> str:
    """Return the path of the image with the same name as the row's file."""
    found = next((path for suffix in SUFFIXES[1:] if (path := record.path.with_suffix(suffix)).is_file()), None)
    if found is None:
        raise record.make_error("image", f"no such image {record.path.with_suffix('.jpg')}")
    return str(found)


def _find_frames(record: DataRecord) -> tuple[list[str], str]:
    """Return all frames in a scene's folder, or else the path of the scene's video."""
    folder: Path = record.folder / read_text_column(record, "dataset") / read_text_column(record, "scene_name")
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES[1:]) if folder.is_dir() else []
    video = folder.with_name(f"{folder.name}.mp4")
    if not found and not video.is_file():
        remedy = f"ffmpeg -i {folder}.mp4 -vf fps=1 {folder}/%05d.jpg creates them; task.data.images must be the folder of the data sets"
        raise record.make_error("scene_name", f"no frames in {folder}, and no {video.name} next to it; {remedy}")
    return [str(path) for path in found], "" if found else str(video)


def _strip_dataset_folder(record: DataRecord, image: object) -> object:
    """Remove the data set's folder from an image path, unless the file exists at that path.

    Example: `VisualProbe_Hard/x.jpg` -> `x.jpg`.
    """
    if isinstance(image, str) and image.startswith("VisualProbe_") and not (record.folder / image).is_file():
        return image.partition("/")[2]
    return image
