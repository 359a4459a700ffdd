"""How published benchmarks compare an answer with the truth, on the answer that was read from the reply: no model is asked to extract it.

A rule gives None where its benchmark would ask a model: text, mathematics and the judge then decide as for any question (accuracy.py).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from megatron_rl.rewards.answer import THRESHOLDS, same_text
from megatron_rl.rewards.multiple_choice import choice
from megatron_rl.rewards.numbers import number

Rule = Callable[[str, str, Mapping[str, object]], float | None]
"""(truth, answer, what the benchmark scores by) -> from 0 to 1, or None."""
DYNAMATH_MARGIN = Fraction(1, 1000)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DOTTED = re.compile(r"^([A-Z])\.(?=\s)")
_WHOLE = re.compile(r"\d+")
_LONGEST_DIGITS = 30


def official(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """By the benchmark that the question is of (published/items.py)."""
    rule = RULES.get(str(by["benchmark"]))
    return None if rule is None else rule(truth, answer, by)


def by_letter(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """`B`, `(B)`, `B. red`, or the words of one option alone. None where the truth is no letter, or the answer is neither."""
    options = _options(by)
    if not options or truth not in _LETTERS[: len(options)]:
        return None
    given = choice(_DOTTED.sub(r"\1)", answer.strip()))
    named = [letter for letter, option in zip(_LETTERS, options, strict=False) if same_text(option, answer)]
    if len(named) == 1:
        return float(named[0] == truth)
    return None if given is None else float(given == truth)


def mathvista(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """calculate_score.py of MathVista (2025): of choices the one that is named, or whose words are nearest; numbers cut to whole ones or
    rounded to the precision; lists as text."""
    kind, options = by["answer_type"], _options(by)
    if kind == "choice":
        given = choice(_DOTTED.sub(r"\1)", answer.strip()))
        if given is None or given not in _LETTERS[: len(options)]:
            near = [edits(answer.strip(), option) for option in options]
            given = _LETTERS[near.index(min(near))]
        return float(given == truth)
    if kind in ("integer", "float"):
        value, wanted, places = number(answer), number(truth), int(str(by["precision"]))
        if value is None or wanted is None:
            return 0.0
        return float(int(value) == int(wanted)) if kind == "integer" else float(round(float(value), places) == round(float(wanted), places))
    if kind == "list":
        return float("".join(truth.split()) == "".join(answer.split()))
    return None


def vsi_bench(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """Letters; of numbers mean relative accuracy, with equality at a threshold counted as its code does (lmms-eval, tasks/vsibench)."""
    if _options(by):
        return by_letter(truth, answer, by)
    value, wanted = number(answer), number(truth)
    if value is None or not wanted:
        return float(same_text(truth, answer))
    error = abs(value - wanted) / abs(wanted)
    return sum(error <= 1 - threshold for threshold in THRESHOLDS) / len(THRESHOLDS)


def tir_bench(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """calculate_score.py of TIR-Bench (2025). A letter that only stands nearest to the answer's words is not looked for."""
    match by["task"]:
        case "ocr":
            return float(truth in answer)
        case "jigsaw":
            given, wanted = _grid(answer, int(str(by["side"]))), _grid(truth, int(str(by["side"])))
            return sum(map(int.__eq__, given, wanted)) / len(wanted) if given and wanted else 0.0
        case "spot_difference" if not truth.isdigit():
            given, wanted = set(_whole(answer)), set(_whole(truth))
            return len(given & wanted) / len(given | wanted) if given | wanted else 1.0
        case "word_search" if not truth.isdigit():
            return float(_pair(answer) == _pair(truth) is not None)
    if truth.isalpha() and len(truth) > 1:
        return float(sorted(truth) == sorted(re.sub(r"[\s,]", "", answer)))
    if truth.isalpha():
        given = choice(_DOTTED.sub(r"\1)", answer.strip()))
        return None if given is None else float(given == truth)
    value, wanted = number(re.sub(r"[A-Za-z*:\s]+", "", answer)), number(truth)
    return None if value is None or wanted is None else float(value == wanted)


def dynamath(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """Of decimals within a thousandth, with pi read; of choices the letter; of text what the truth contains (VLMEvalKit's dynamath.py)."""
    if by["answer_type"] == "float":
        value, wanted = _with_pi(answer), _with_pi(truth)
        return None if value is None or wanted is None else float(abs(value - wanted) <= DYNAMATH_MARGIN)
    if by["answer_type"] == "multiple choice":
        named = [letter for letter in "ABCDE" if letter in answer.upper()]
        return float(named == [truth.upper()]) if len(named) == 1 else 0.0
    return float(answer.strip().casefold() in truth.casefold() and bool(answer.strip()))


def vlmblind(truth: str, answer: str, by: Mapping[str, object]) -> float | None:
    """Numbers, pairs of them, a letter or a word, out of braces."""
    if _whole(truth):
        return float(_whole(answer) == _whole(truth))
    return float(same_text(truth, answer.strip().strip("{}")))


RULES: Mapping[str, Rule] = {
    "vstar": by_letter,
    "hrbench": by_letter,
    "mathvision": by_letter,
    "wemath": by_letter,
    "mathvista": mathvista,
    "vsi_bench": vsi_bench,
    "tir_bench": tir_bench,
    "dynamath": dynamath,
    "vlmblind": vlmblind,
}
"""By benchmark. MathVerse and VisualProbe have no rules: their own scoring is a judge's."""


def edits(one: str, other: str) -> int:
    """Levenshtein's distance: characters to insert, to delete or to change. Example: kitten, sitting -> 3."""
    row = list(range(len(other) + 1))
    for number_, left in enumerate(one, start=1):
        before, row[0] = row[0], number_
        for place, right in enumerate(other, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (left != right))
    return row[-1]


def _options(by: Mapping[str, object]) -> Sequence[str]:
    options = by["options"]
    assert isinstance(options, tuple), f"{by}"
    return options


def _whole(text: str) -> list[int]:
    return [int(digits) for digits in _WHOLE.findall(text) if len(digits) <= _LONGEST_DIGITS]


def _pair(text: str) -> tuple[int, int] | None:
    found = re.search(r"\b(\d{1,30})\s*,\s*(\d{1,30})\b", text)
    return (int(found[1]), int(found[2])) if found else None


def _grid(text: str, side: int) -> list[int]:
    """The first run of side * side numbers, parted by commas or blanks; none where there is none."""
    runs = (_whole(run) for run in re.findall(r"[\d\s,\uff0c]+", text))
    return next((run for run in runs if side and len(run) == side * side), [])


def _with_pi(text: str) -> Fraction | None:
    """Example: 2.5\u03c0 -> 7.853981633974483."""
    before, pi, _ = text.partition("\u03c0")
    value = number(before) if before.strip() or not pi else Fraction(1)
    return value * Fraction(math.pi) if value is not None and pi else value
