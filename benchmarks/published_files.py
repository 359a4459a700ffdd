"""Published answers and verdicts of MATH-Vision, LogicVista and DynaMath in their authors' files.

The files of a folder are recognized by their contents, not by their names or places. A file, a row
or a value that cannot be read is recorded as one line in `Published.problems` and skipped.
"""

import ast
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.data.benchmarks.benchmark_scores import ItemScore

MATHVISION_SUFFIX, TOTALS_SUFFIX = ".jsonl", "_result.json"
ANSWERS_SUFFIX, RESULTS_SUFFIX = "-answers.json", "-accuracy-results.csv"
REPLY_MARK = "ASSISTANT:"
"""Mark in an answer; LogicVista's script scores the text after it (extract_accuracy.py)."""
NUM_VARIANTS = 10
DYNAMATH_VERDICTS = {"correct": 1.0, "fail": 0.0}
csv.field_size_limit(1 << 24)


@dataclass(slots=True, frozen=True)
class PublishedAnswer:
    """Raw answer of a model to one question, with the authors' verdict."""

    response: str
    is_right: bool | None
    """Verdict, or None if the authors published none."""
    extracted: str | None = None
    """Letters that the authors' language model extracted from the answer, such as `a, c`."""


@dataclass(slots=True)
class ModelAnswers:
    """Answers of one model to the questions of one benchmark, keyed by question."""

    answers: dict[str, PublishedAnswer] = field(default_factory=dict)
    total: str = ""
    """Total in the authors' separate file, such as `537/3040=17.66%`; "" if there is none."""


@dataclass(slots=True)
class Published:
    """Everything that was read from a folder."""

    mathvision: dict[str, ModelAnswers] = field(default_factory=dict)
    logicvista: dict[str, ModelAnswers] = field(default_factory=dict)
    dynamath: dict[str, list[ItemScore]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_published(folder: Path) -> Published:
    """Read all published answers and verdicts below a folder."""
    found, totals, raw_answers = Published(), dict[str, str](), dict[str, dict[str, str]]()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            if path.suffix == MATHVISION_SUFFIX:
                _read_mathvision(path, found)
            elif path.name.endswith(TOTALS_SUFFIX):
                totals[path.name.removesuffix(TOTALS_SUFFIX)] = _read_total(path)
            elif path.suffix == ".json":
                _read_raw_answers(path, raw_answers, found)
            elif path.suffix == ".csv":
                _read_table(path, found)
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            found.problems.append(f"{path}: cannot be read ({str(error).splitlines()[0][:200]}); skipped")
    for model, total in totals.items():
        if model in found.mathvision:
            found.mathvision[model].total = total
        else:
            found.problems.append(f"{model}{TOTALS_SUFFIX}: there is no {model}.jsonl with its answers; skipped")
    for model, answers in raw_answers.items():
        _add_raw_answers(found.logicvista.setdefault(model, ModelAnswers()), answers, model, found.problems)
    return found


def _read_mathvision(path: Path, found: Published) -> None:
    """Read lines with `id`, `response` and `correct`; leave out other lines, such as questions."""
    model, rows = ModelAnswers(), 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        row, where = _parse_object(line), f"{path} line {number}"
        if number == 1 and row is not None and "response" not in row and "question" in row:
            return
        rows += 1
        problem = _mathvision_problem(row, model.answers)
        if row is None or problem:
            found.problems.append(f"{where}: {problem}; skipped")
            continue
        model.answers[str(row["id"])] = PublishedAnswer(row["response"], row.get("correct"))
    name = path.stem
    if name in found.mathvision:
        found.problems.append(f"{path}: another file has the answers of {name} too; skipped")
    elif rows:
        found.mathvision[name] = model


def _mathvision_problem(row: Mapping[str, Any] | None, seen: Mapping[str, PublishedAnswer]) -> str:
    if row is None:
        return "is not a JSON object"
    for key, kinds in (("id", (str, int)), ("response", (str,)), ("correct", (bool, type(None)))):
        value = row.get(key)
        if not isinstance(value, kinds) or (key == "id" and isinstance(value, bool)):
            return f"{key} is {'missing' if key not in row else json.dumps(value)[:40]}"
    return f"the id {row['id']} occurs twice" if str(row["id"]) in seen else ""


def _read_total(path: Path) -> str:
    row = _parse_object(path.read_text(encoding="utf-8"))
    total = (row or {}).get("-all")
    if not isinstance(total, str):
        raise ValueError("there is no total under the key -all")
    return total


def _read_raw_answers(path: Path, raw_answers: dict[str, dict[str, str]], found: Published) -> None:
    """Read LogicVista's answers: one object that maps each question to `answer`.

    Other JSON files are left out, unless they are named like answers.
    """
    is_named = path.name.endswith(ANSWERS_SUFFIX)
    rows = _parse_object(path.read_text(encoding="utf-8"))
    if rows is None and is_named:
        raise ValueError("is not one JSON object")
    if not is_named:
        return
    answers: dict[str, str] = {}
    for key, row in (rows or {}).items():
        answer = row.get("answer") if isinstance(row, dict) else None
        if isinstance(answer, str):
            answers[key] = answer
        else:
            found.problems.append(f"{path} {key}: answer is missing or is not text; skipped")
    raw_answers[path.name.removesuffix(ANSWERS_SUFFIX)] = answers


def _add_raw_answers(model: ModelAnswers, answers: Mapping[str, str], name: str, problems: list[str]) -> None:
    """Use the raw answers of an answer file; report where the scored file has another text."""
    changed = 0
    for key, answer in answers.items():
        reply = answer.split(REPLY_MARK)[1] if REPLY_MARK in answer else answer
        scored = model.answers.get(key)
        if scored is None:
            model.answers[key] = PublishedAnswer(reply, None)
        elif scored.response.split() != reply.split():
            changed += 1
    if changed:
        problems.append(f"{name}{ANSWERS_SUFFIX}: {changed} answers differ from those of the scored file, which are used")


def _read_table(path: Path, found: Published) -> None:
    """Read a table of LogicVista or DynaMath; other tables are left out."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    header = rows[0] if rows else []
    if "match?" in header:
        name = path.name.removesuffix(RESULTS_SUFFIX)
        found.logicvista[name] = ModelAnswers(dict(_logicvista_rows(path, header, rows[1:], found.problems)))
    elif header[:2] == ["Question ID", "Variant 1"]:
        found.dynamath[path.stem.removesuffix("-result")] = list(_dynamath_rows(path, header, rows[1:], found.problems))


def _logicvista_rows(
    path: Path, header: list[str], rows: Iterable[list[str]], problems: list[str]
) -> Iterator[tuple[str, PublishedAnswer]]:
    raw, extracted = (next((name for name in header if name.endswith(f"answer {kind}")), "") for kind in ("raw", "extracted"))
    if not (raw and "id" in header):
        raise ValueError("has no columns `id` and `... answer raw`")
    seen: set[str] = set()
    for number, cells in enumerate(rows, start=1):
        row = dict(zip(header, cells, strict=False))
        key, verdict = row.get("id", ""), row.get("match?", "")
        if not key or verdict not in ("0", "1") or len(cells) != len(header) or key in seen:
            reason = "the id occurs twice" if key in seen else f"id is {key[:40]!r}, match? is {verdict[:40]!r}, {len(cells)} columns"
            problems.append(f"{path} row {number}: {reason}; skipped")
            continue
        seen.add(key)
        yield key, PublishedAnswer(row[raw], verdict == "1", _letters(row.get(extracted, "")))


def _letters(cell: str) -> str | None:
    """Return the items of a Python list written as text, separated by commas."""
    try:
        items = ast.literal_eval(cell)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return ", ".join(map(str, items)) if isinstance(items, list) else None


def _dynamath_rows(path: Path, header: list[str], rows: Iterable[list[str]], problems: list[str]) -> Iterator[ItemScore]:
    """Yield one score per question and variant, labeled with topic and level.

    Rows that do not begin with Q and a number are totals or empty.
    """
    seen: set[str] = set()
    for number, cells in enumerate(rows, start=1):
        key = cells[0].strip() if cells else ""
        if not key.startswith("Q") or not key[1:].isdecimal():
            continue
        row, verdicts = dict(zip(header, cells, strict=False)), [cell.strip() for cell in cells[1 : NUM_VARIANTS + 1]]
        unknown = [verdict for verdict in verdicts if verdict not in DYNAMATH_VERDICTS]
        count, right = row.get("# of correct per question", "").strip(), verdicts.count("correct")
        if unknown or len(verdicts) < NUM_VARIANTS or key in seen:
            reason = (
                "occurs twice" if key in seen else f"has {len(verdicts)} verdicts" + (f", one is {unknown[0][:40]!r}" if unknown else "")
            )
            problems.append(f"{path} row {number}: {key} {reason}; skipped")
            continue
        if count and count != str(right):
            problems.append(
                f"{path} row {number}: {key} has {right} right variants, but its column says {count[:40]}; the verdicts are used"
            )
        seen.add(key)
        labels = {"topic": row.get("Topic", "").strip() or "any", "level": row.get("Difficulty Level", "").strip() or "any"}
        yield from (ItemScore(key, labels, DYNAMATH_VERDICTS[verdict]) for verdict in verdicts)


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
