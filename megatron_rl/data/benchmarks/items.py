"""What a row of a published benchmark says, in one form; and the question that is asked of it."""

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
    question: str
    """Without its options. A picture's place may be written <image>."""
    answer: str
    """The letter of the right option where there are options, else what is right."""
    options: tuple[str, ...] = ()
    images: tuple[object, ...] = ()
    """As data/images.py takes them."""
    videos: tuple[str, ...] = ()
    """Paths, in the place of pictures."""
    hint: str = ""
    """What form the answer has."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What figures are told by: {"category": "single"}."""
    unit: str = ""
    """Items of one unit are scored together; empty: each by itself."""
    scoring_info: Mapping[str, object] = field(default_factory=dict)
    """What else the scoring goes by."""


def item_to_record(item: BenchmarkItem, record: DataRecord, *, data: DataSettings) -> DataRecord:
    """The row that questions.py reads, its options in the order that data.shuffle_options wants; of its pictures data.frames at most."""
    options, answer = shuffle_options(item, row_id=record.where, seed=data.shuffle_options)
    lines = [item.question, *(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))]
    words = "\n".join([*lines, *([item.hint] if item.hint else [])])
    images = sample_evenly([image for image in item.images if image], max_num=data.frames)
    if words.count(IMAGE_PLACEHOLDER) != len(images):  # places that the text only talks about
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
    """At most `max_num` of them, the first and the last among them, evenly."""
    if len(images) <= max_num:
        return images
    return [images[round(place * (len(images) - 1) / max(1, max_num - 1))] for place in range(max_num)]


def shuffle_options(item: BenchmarkItem, *, row_id: str, seed: int) -> tuple[tuple[str, ...], str]:
    """The options in their order, and the letter of the right one. Options of which one is but a letter, as `(A)` or `$A$`, name places in
    the picture and stay."""
    stay = not seed or any(_LABEL.fullmatch(option.strip()) for option in item.options)
    if stay or item.answer not in [*LETTERS[: len(item.options)]]:
        return item.options, item.answer
    order = list(range(len(item.options)))
    random.Random(f"{seed} {row_id}").shuffle(order)
    return tuple(item.options[old] for old in order), LETTERS[order.index(LETTERS.index(item.answer))]


def read_text_column(record: DataRecord, *names: str, default: str | None = None) -> str:
    """The first of these columns that the row has, as text. ValueError: it has none."""
    for name in names:
        value = record.row.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return record.require_text(str(value), name).strip()
    if default is None:
        raise record.make_error(names[0], f"is missing; the row has {', '.join(record.row)[:200]}")
    return default


def read_lettered_options(record: DataRecord) -> tuple[str, ...]:
    """The options of columns A, B, C and so on, up to the first that is not there."""
    found: list[str] = []
    for letter in LETTERS:
        if letter not in record.row:
            break
        found.append(read_text_column(record, letter))
    return tuple(found)
