"""Scoring rules of published benchmarks, applied to the answers extracted from replies.

The rules follow the benchmarks' own scripts as of November 2026. docs/evaluation.md lists the
scripts and every deliberate difference. A rule returns None if the benchmark itself would use a
model to score the answer. An answer that no rule scores is compared as text and as a mathematical
expression. If the comparison is undecided, a judge decides, as for any other answer (accuracy.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from megatron_rl.data.answers import MAX_ANSWER_CHARS
from megatron_rl.rewards.answer import same_text
from megatron_rl.rewards.answer_values import (
    LETTERS,
    find_option,
    normalize_signs,
    read_bare_letter,
    read_grid,
    read_number,
    read_number_with_pi,
    read_numbers,
    read_pair,
)
from megatron_rl.rewards.multiple_choice import read_choice_set

ScoringRule = Callable[[str, str, Mapping[str, object]], float | None]
"""Maps (truth, answer, benchmark item) to a score in [0, 1], or None if undecided."""
DYNAMATH_MARGIN = 0.001
VSI_ERRORS = tuple(float(error) for error in 1 - np.linspace(0.5, 0.95, 10))
"""Maximum relative error for each threshold, computed in floating point as in thinking-in-space. In
floating point, `1 - 0.8` is 0.19999999999999996, so an error of 0.2 exceeds the limit.
"""
_WHOLE = re.compile(r"[-+]?\d+", re.ASCII)
_POSITION = re.compile(r"\(?\d{1,2}\)?\.?", re.ASCII)
_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"[A-Z]")
_LETTERS_ONLY = re.compile(r"[A-Z](?:,\s*[A-Z])*")
_IN_BRACKETS = re.compile(r"\(([a-zA-Z])\)")


def score_by_benchmark(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Return the score by the rule of the question's benchmark, or None if undecided.

    `item` is the `benchmark_info` of the question's record (data/benchmarks/items.py). An answer of
    MAX_ANSWER_CHARS characters or more scores 0.
    """
    rule = SCORING_RULES.get(str(item["benchmark"]))
    if rule is None:
        return None
    return 0.0 if len(answer) >= MAX_ANSWER_CHARS else rule(truth, answer, item)


def score_letter(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score an answer that selects an option by letter or by text, such as `(B)` or `B. red`.

    Return None if the truth is not an option letter, or if the answer selects no option.
    """
    options = _options(item)
    if truth not in [*LETTERS[: len(options)]]:
        return None
    given = find_option(answer, options)
    return None if given is None else float(given == truth)


def score_mathvision(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score an answer by its letter or by the text of the right option.

    The text of the right option is accepted even if it is also the letter of another option. The
    position of an option (`2` for B) does not select it (MATH-V, evaluate.py).
    """
    options = _options(item)
    if truth in [*LETTERS[: len(options)]] and same_text(options[LETTERS.index(truth)], answer):
        return 1.0
    found = score_letter(truth, answer, item)
    return 0.0 if found is None and options and _is_position(answer, options) else found


def score_logicvista(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score an answer that names the letters of all right options and no others.

    Letters of either case and the text of an option are accepted, but not the position of an
    option. An answer that is one letter is wrong if this letter is not the truth, even if no option
    has it (LogicVista, extract_accuracy.py). Return None if the truth has no letter, or the answer
    names no option.
    """
    letters = dict(zip(LETTERS, _choices(item), strict=False))
    if not _LETTERS_ONLY.fullmatch(truth):
        return None
    wanted, one = frozenset(_LETTER.findall(truth)), read_bare_letter(answer) or find_option(answer, _choices(item))
    given = frozenset(one.upper()) if one is not None else read_choice_set(answer, letters)
    if given is None:
        return 0.0 if item.get("choices") and _is_position(answer, _choices(item)) else None
    return float(given == wanted)


def score_mathvista(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score choices, numbers and lists as in MathVista (calculate_score.py).

    For multiple-choice questions, the prediction is the selected option. If no option is selected,
    the prediction is the option with the smallest edit distance to the answer. Numbers are
    truncated to integers or rounded to the item's precision. Lists are compared as text without
    whitespace.
    """
    kind = item["answer_type"]
    if kind == "choice":
        options = _options(item)
        return float(_nearest_option(answer.strip(), options) == options[LETTERS.index(truth)])
    if kind in ("integer", "float"):
        given, wanted, places = read_number(answer), read_number(truth), int(str(item["precision"]))
        if given is None or wanted is None:
            return 0.0
        return float(int(float(given)) == wanted if kind == "integer" else round(float(given), places) == round(float(wanted), places))
    if kind == "list":
        return float("".join(truth.split()) == "".join(answer.split()))
    return None


def score_vsi_bench(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score option letters exactly, and numbers by mean relative accuracy.

    The arithmetic follows thinking-in-space (tasks/vsibench/utils.py).
    """
    if _options(item):
        return score_letter(truth, answer, item)
    given, wanted = read_number(answer), read_number(truth)
    if given is None or wanted is None:
        return float(same_text(truth, answer))
    if wanted == 0:
        return float(given == 0)
    error = abs(float(given) - float(wanted)) / abs(float(wanted))
    return sum(error <= largest for largest in VSI_ERRORS) / len(VSI_ERRORS)


def score_tir_bench(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score an answer by the rule of the item's task, as in TIR-Bench (calculate_score.py).

    Unlike TIR-Bench, this function does not search for the option nearest to the answer's text.
    """
    answer = answer.replace("*", "").strip()
    match item["task"]:
        case "ocr":
            return float(truth in answer)
        case "jigsaw":
            given, wanted = read_grid(answer, int(str(item["side"]))), read_grid(truth, int(str(item["side"])))
            return sum(map(int.__eq__, given, wanted)) / len(wanted) if given and wanted else 0.0
        case "spot_difference" if not _WHOLE.fullmatch(truth):
            return _jaccard(read_numbers(answer), read_numbers(truth))
        case "word_search" if not _WHOLE.fullmatch(truth):
            return float(read_pair(answer) == read_pair(truth) is not None)
    if truth.isalpha():
        return _score_letters(truth, answer, item)
    given, wanted = read_number(answer), read_number(truth)
    return None if given is None or wanted is None or "%" in answer else float(given == wanted)


def score_dynamath(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score decimals within 0.001, choices by letter, and text by substring, as in DynaMath.

    If an answer to a multiple-choice question selects no option, it is right if its first three
    characters contain the truth.
    """
    answer = answer.strip()
    if item["answer_type"] == "float":
        given, wanted = read_number_with_pi(answer), read_number_with_pi(truth)
        return None if given is None or wanted is None else float(abs(given - wanted) <= DYNAMATH_MARGIN)
    if item["answer_type"] == "multiple choice":
        given_letter = find_option(answer, _choices(item))
        return float(given_letter == truth if given_letter else truth in answer[:3])
    return float(_contains(normalize_signs(answer), normalize_signs(truth)))


def score_vlmblind(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score one or more numbers, a letter or a word; braces around a letter or word are ignored."""
    if wanted := read_numbers(truth):
        return float(read_numbers(answer) == wanted)
    return float(same_text(truth, answer.strip().strip("{}")))


SCORING_RULES: Mapping[str, ScoringRule] = {
    "vstar": score_letter,
    "hrbench": score_letter,
    "mathvision": score_mathvision,
    "wemath": score_letter,
    "mathvista": score_mathvista,
    "vsi_bench": score_vsi_bench,
    "tir_bench": score_tir_bench,
    "dynamath": score_dynamath,
    "vlmblind": score_vlmblind,
    "puzzlevqa": score_letter,
    "logicvista": score_logicvista,
}
"""Maps each benchmark to its scoring rule. MathVerse and VisualProbe have no rule, because a judge
scores them.
"""


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the minimum number of single-character edits.

    Example: the distance between kitten and sitting is 3.
    """
    row = list(range(len(other) + 1))
    for number_, left in enumerate(one, start=1):
        before, row[0] = row[0], number_
        for place, right in enumerate(other, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (left != right))
    return row[-1]


def _nearest_option(answer: str, options: Sequence[str]) -> str:
    """Return the option selected by letter or text, else the option nearest in edit distance."""
    letters = [*LETTERS[: len(options)]]
    bracketed = _IN_BRACKETS.search(answer)
    for given in (read_bare_letter(answer).upper(), find_option(answer, options), bracketed[1].upper() if bracketed else ""):
        if given in letters:
            return options[letters.index(given)]
        if answer in options:
            return answer
    return min(options, key=lambda option: edit_distance(bracketed[1].upper() if bracketed else answer, option))


def _score_letters(truth: str, answer: str, item: Mapping[str, object]) -> float | None:
    """Score an answer that is a letter, several letters or a word.

    If the answer has several letters, neither their order nor their separators matter.
    """
    if len(truth) == 1:
        given = find_option(answer, _choices(item))
        return None if given is None else float(given == truth)
    if not truth.isupper():
        return float(same_text(truth, answer))
    return float(sorted(truth) == sorted(re.sub(r"\band\b|\W|_", "", answer)))


def _jaccard(given: Sequence[Fraction] | None, wanted: Sequence[Fraction] | None) -> float:
    """Return the Jaccard index of two sets of numbers.

    The result is 1 if both sets are empty, and 0 if one of them is None.
    """
    if given is None or wanted is None:
        return 0.0
    places = {*given, *wanted}
    return len({*given} & {*wanted}) / len(places) if places else 1.0


def _contains(answer: str, truth: str) -> bool:
    """Return True if the answer contains the truth, or equals it except for case and whitespace.

    A truth that begins or ends with a digit, or that is a label (`AC`, `Product A`), must not be
    part of a longer number or word. For example, `135` is not contained in `1352`, `-135` or
    `135.5`.
    """
    if "".join(truth.casefold().split()) == "".join(answer.casefold().split()) != "":
        return True
    if not truth or truth not in answer:
        return False
    is_label = truth.isupper() and truth.isalpha()
    before = r"(?<![\w-])(?<!-\s)(?<!\d[.,:/])" if is_label or truth[0].isdigit() else ""
    after = r"(?!\w|[.,:/]\d)" if truth[-1].isdigit() or truth[-1].isupper() else ""
    return re.search(before + re.escape(truth) + after, answer) is not None


def _is_position(answer: str, options: Sequence[str]) -> bool:
    """Return True for a small number that is not part of an option's text."""
    return _POSITION.fullmatch(answer.strip()) is not None and not any(map(_DIGIT.search, options))


def _options(item: Mapping[str, object]) -> Sequence[str]:
    options = item["options"]
    assert isinstance(options, tuple), f"{item}"
    return options


def _choices(item: Mapping[str, object]) -> Sequence[str]:
    """Return the question's options, or 26 empty strings if the question has no options."""
    choices = item.get("choices") or ("",) * len(LETTERS)
    assert isinstance(choices, tuple), f"{item}"
    return choices
