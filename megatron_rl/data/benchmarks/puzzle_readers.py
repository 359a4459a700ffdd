"""Readers that convert rows of published benchmarks of visual puzzles to items.

Each reader follows the files in the authors' repository (November 2026).
"""

from pathlib import PurePosixPath

from megatron_rl.data.benchmarks.items import LETTERS, BenchmarkItem, read_text_column
from megatron_rl.data.benchmarks.listed_options import find_listed_options
from megatron_rl.data.records import DataRecord

LOGICVISTA_HINT = "Give the letter of the right choice, or the letters if several are right."
CAPABILITY_COLUMNS = ("broad_capability", "capability")
"""Names of LogicVista's column with the capabilities, in the order of preference.

Files before 2025 have `capability`.
"""


def read_puzzlevqa(record: DataRecord) -> BenchmarkItem:
    """Read a row of PuzzleVQA.

    Files: data/KIND.json with one object per line, next to images/KIND. The answer is the text of
    an option. The columns caption, explanation and deduction describe the solution and are not
    read.
    """
    options = tuple(str(option) for option in record.require_list(record.row.get("options", []), "options"))
    answer, image = read_text_column(record, "answer"), read_text_column(record, "image")
    if answer not in options[: len(LETTERS)]:
        raise record.make_error("answer", f"is {answer[:80]}, which is not one of the {len(options)} options")
    return BenchmarkItem(
        question=read_text_column(record, "question"),
        options=options,
        answer=LETTERS[options.index(answer)],
        images=(image,),
        labels={"puzzle": PurePosixPath(image).parent.name or record.path.stem},
    )


def read_logicvista(record: DataRecord) -> BenchmarkItem:
    """Read a row of LogicVista.

    File: dataset.json, one object with the keys v1_0, v1_1 and so on, next to the folder images.
    The options are part of the question or of the image. An answer is a letter, several letters
    (`A, C`) or a number.
    """
    question, answer = read_text_column(record, "question"), read_text_column(record, "answer")
    if not answer or not question:
        remedy = "the published file has one such row (v1_382): remove it from the file"
        raise record.make_error("question" if answer else "answer", f"is empty in row {record.row.get('id', '')}; {remedy}")
    image = read_text_column(record, "imagename")
    skill, capability = _joined(record, "skill"), next((_joined(record, name) for name in CAPABILITY_COLUMNS if name in record.row), "any")
    return BenchmarkItem(
        question=question,
        answer=answer,
        images=(image if (record.folder / image).is_file() else f"images/{image}",),
        hint=LOGICVISTA_HINT,
        labels={"skill": skill, "capability": capability},
        scoring_info={"choices": find_listed_options(question, answer=answer.partition(",")[0])},
    )


def _joined(record: DataRecord, column: str) -> str:
    """Return the texts of a list in one column, joined by `and`."""
    return " and ".join(record.require_text(each, column) for each in record.require_list(record.row.get(column, []), column)) or "any"
