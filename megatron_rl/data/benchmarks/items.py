"""Common format for rows of published benchmarks, and its conversion to questions."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_rl.config import DataSettings
from megatron_rl.data.records import IMAGE_PLACEHOLDER, DataRecord

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LABEL = re.compile(r"\(?\$?[A-Z]\$?[).]?|\$[a-z]\$|\([a-z]\)")


@dataclass(slots=True, frozen=True, kw_only=True)
class BenchmarkItem:
    """A row of a benchmark in the common form."""

    question: str
    """Question without its options; <image> may mark the position of an image."""
    answer: str
    """Letter of the correct option if the item has options, else the correct answer."""
    options: tuple[str, ...] = ()
    images: tuple[object, ...] = ()
    """Images in any form that data/images.py accepts."""
    videos: tuple[str, ...] = ()
    """Paths of videos, which are used instead of images."""
    hint: str = ""
    """Sentence that describes the form of the answer; "" for none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label values by which metrics are broken down, such as {"category": "single"}."""
    unit: str = ""
    """Name of the set of items that are scored together; "" if the item is scored alone."""
    scoring_info: Mapping[str, object] = field(default_factory=dict)
    """Additional values that the scoring rules read."""


def item_to_record(item: BenchmarkItem, record: DataRecord, *, data: DataSettings) -> DataRecord:
    """Convert an item to a row that questions.py can read.

    The seed data.shuffle_options determines the order of the options. At most data.frames images
    are kept.
    """
    options, answer = shuffle_options(item, row_id=record.where, seed=data.shuffle_options)
    lines = [item.question, *(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))]
    words = "\n".join([*lines, *([item.hint] if item.hint else [])])
    images = sample_evenly([image for image in item.images if image], max_num=data.frames)
    if words.count(IMAGE_PLACEHOLDER) != len(images):  # placeholders that are only mentioned in the text
        words = words.replace(IMAGE_PLACEHOLDER, "")
    row = {"id": record.where, "question": words, "answer": answer, "images": images, "data_source": data.benchmark}
    if item.videos:
        row["mm_hint"] = {"hint_type": "video", "hint_path": list(item.videos)}
    official = {
        "benchmark": data.benchmark,
        "labels": item.labels,
        "unit": item.unit or record.where,
        "options": options,
        **item.scoring_info,
    }
    return replace(record, row=row, benchmark_info=official)


def sample_evenly(images: list, *, max_num: int) -> list:
    """Return at most `max_num` images, evenly spaced, including the first and the last."""
    if len(images) <= max_num:
        return images
    return [images[round(place * (len(images) - 1) / max(1, max_num - 1))] for place in range(max_num)]


def shuffle_options(item: BenchmarkItem, *, row_id: str, seed: int) -> tuple[tuple[str, ...], str]:
    """Return the options in shuffled order, and the letter of the correct option.

    The order is unchanged if the seed is 0 or the answer is not the letter of an option. The order
    is also unchanged if an option is only a letter, such as `(A)` or `$A$`, because such options
    refer to labels in the image.
    """
    stay = not seed or any(_LABEL.fullmatch(option.strip()) for option in item.options)
    if stay or item.answer not in [*LETTERS[: len(item.options)]]:
        return item.options, item.answer
    order = list(range(len(item.options)))
    random.Random(f"{seed} {row_id}").shuffle(order)
    return tuple(item.options[old] for old in order), LETTERS[order.index(LETTERS.index(item.answer))]


def read_text_column(record: DataRecord, *names: str, default: str | None = None) -> str:
    """Return, as text, the value of the first column in `names` that the row contains.

    Raises:
        ValueError: the row has none of these columns, and no default is given.
    """
    for name in names:
        value = record.row.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return record.require_text(str(value), name).strip()
    if default is None:
        raise record.make_error(names[0], f"is missing; the row has the columns {', '.join(record.row)[:200]}")
    return default


def read_lettered_options(record: DataRecord) -> tuple[str, ...]:
    """Return the options in columns A, B, C and so on, up to the first missing column."""
    found: list[str] = []
    for letter in LETTERS:
        if letter not in record.row:
            break
        found.append(read_text_column(record, letter))
    return tuple(found)
