"""Compares the scoring rules with the benchmarks' own scripts: every score named `official` was
returned by executing their functions on the same pair.

Scripts, each at its newest revision of November 2026: We-Math
evaluation/four_dimensional_metrics.py, thinking-in-space lmms_eval/tasks/vsibench/utils.py,
DynaMath evaluation/gpt4o/gpt_4o_json_eval.py, MathVista evaluation/calculate_score.py, TIR-Bench
calculate_score.py, MATH-V evaluation/evaluate.py. docs/evaluation.md explains each difference.
"""

import time
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.benchmarks.catalog import BENCHMARKS
from megatron_rl.rewards.answer_values import find_option, read_grid, read_number, read_number_with_pi, read_numbers, read_pair
from megatron_rl.rewards.benchmark_rules import score_by_benchmark

COLORS = ("red", "light blue", "green")
SHIFTED = ("B", "C", "D", "E", "No correct answer")
"""Options of row 2steps_10 of We-Math's testmini.json."""


def score(benchmark: str, truth: str, answer: str, **by: object) -> float | None:
    return score_by_benchmark(truth, answer, {"benchmark": benchmark, "options": (), **by})


@pytest.mark.parametrize("benchmark", ["vstar", "hrbench", "wemath", "vsi_bench", "mathvista"])
@pytest.mark.parametrize(
    "options", [SHIFTED, ("F", "D", "B", "I", "E"), ("(b)", "(c)", "(a)", "d", "e"), ("$C$", "$A$", "$B$", "$D$", "$E$")]
)
def test_a_letter_is_a_letter_before_it_is_the_words_of_an_option(benchmark: str, options: tuple[str, ...]) -> None:
    """An answer that is a letter is read as a letter, even if it is also the text of another
    option, as We-Math does. MATH-V accepts both readings.
    """
    by = {"options": options, "answer_type": "choice", "precision": 0}
    for right, truth in enumerate("ABCDE"):
        for place, letter in enumerate("ABCDE"):
            for answer in (letter, f"({letter})", f"{letter}.", f"{letter}. {options[place]}", f"({letter}) {options[place]}"):
                assert score(benchmark, truth, answer, **by) == (place == right), (truth, answer)


def test_mathvision_takes_the_letter_or_the_words() -> None:
    """The letter D and the text of option D, E, are both correct. Oracle: MATH-V's
    `is_equal(gt_answer, model_answer) or is_equal(gt_answer_value, model_answer)` for test.jsonl,
    row 742.
    """
    options = ("A", "B", "C", "E", "Impossible to determine")
    found = {answer: score("mathvision", "D", answer, options=options) for answer in ("A", "D", "E", "d", "Impossible to determine")}
    assert found == {"A": 0, "D": 1, "E": 1, "d": 1, "Impossible to determine": 0}


WE_MATH = [
    # truth, answer, official score, score of this project
    ("D", "D", 1, 1), ("D", "E", 0, 0), ("D", "D. E", 1, 1), ("D", "D: E", 1, 1), ("A", "A. B", 1, 1), ("B", "A. B", 0, 0),
    ("E", "E. No correct answer", 1, 1), ("D", "F", 0, 0), ("D", "<D>", 1, 1), ("E", "E) x", 1, 1),
    ("D", "(D)", 0, 1), ("D", "d", 0, 1), ("D", "**D**", 0, 1), ("E", "No correct answer", 0, 1),
    ("B", "B, C", 1, None), ("B", "Because", 1, None), ("A", "A dog", 1, None),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "theirs", "ours"), WE_MATH)
def test_we_math(truth: str, answer: str, theirs: int, ours: int | None) -> None:
    assert score("wemath", truth, answer, options=SHIFTED) == ours
    assert ours == theirs or answer in ("(D)", "d", "**D**", "No correct answer", "B, C", "Because", "A dog")


def test_vsi_bench_equals_its_own_arithmetic() -> None:
    """All pairs of truths 1 to 100 and answers 0 to 150, and decimals at the thresholds, score as
    in a numpy version of the benchmark's formula.
    """
    largest = 1 - np.linspace(0.5, 0.95, int((0.95 - 0.5) / 0.05 + 2))
    pairs = [(str(truth), str(answer)) for truth in range(1, 101) for answer in range(151)]
    pairs += [
        (f"{truth / 10:.1f}", f"{truth / 10 * share:.3f}") for truth in range(1, 100) for share in np.arange(0.5, 1.51, 0.05).round(2)
    ]
    for truth, answer in pairs:
        expected = (abs(float(answer) - float(truth)) / float(truth) <= largest).mean()
        assert score("vsi_bench", truth, answer) == pytest.approx(expected, abs=1e-12), (truth, answer)


VSI_NUMBERS = [
    # truth, answer, official score, score of this project
    ("5", "4", 0.6, 0.6), ("5", "6", 0.6, 0.6), ("10", "8", 0.6, 0.6), ("4", "5", 0.6, 0.6), ("20", "11", 0.1, 0.1),
    ("20", "29", 0.1, 0.1),
    ("10", "15", 0.1, 0.1), ("10", "11", 0.9, 0.9), ("5", "5.", 1, 1), ("5", "5 m", 1, 1), ("5000", "5e3", 1, 1), ("5", "-5", 0, 0),
    ("5", "\u22125", 0, 0), ("5", "- 5", 0, 0), ("5", "minus 5", 0, 0), ("5", "five", 0, 0), ("5", "5/1", 0, 0), ("5", "1:5", 0, 0),
    ("5", "\\sqrt{5}", 0, 0), ("5", "-(5)", 0, 0), ("5", "5-6", 0, 0), ("5", "nan", 0, 0), ("5", "inf", 0, 0), ("5", "", 0, 0),
    ("5", "5m", 0, 1), ("5", "about 5", 0, 1), ("5", "(5)", 0, 1), ("5", "4 or 5", 0.6, 0), ("5", "5 million", 1, 0), ("5", "5 e0", 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "theirs", "ours"), VSI_NUMBERS)
def test_vsi_bench_numbers(truth: str, answer: str, theirs: float, ours: float) -> None:
    assert score("vsi_bench", truth, answer) == pytest.approx(ours)
    assert ours == theirs or answer in ("5m", "about 5", "(5)", "4 or 5", "5 million", "5 e0")


YES_NO = {"answer_type": "multiple choice", "choices": ("yes", "no")}
DYNAMATH_CHOICES = [
    # truth, answer, official score, score of this project
    ("B", "B", 1, 1), ("B", "A", 0, 0), ("B", "B. no", 1, 1), ("A", "A. yes", 1, 1), ("B", "B. yes", 1, 1), ("A", "A) B", 1, 1),
    ("B", "A) B", 0, 0), ("B", "(B)", 1, 1), ("B", "B.", 1, 1), ("B", "[B]", 1, 1), ("B", "$B$", 1, 1), ("B", "**B**", 1, 1),
    ("A", "A or B", 1, 1), ("B", "A or B", 0, 0), ("B", "AB", 1, 1), ("B", "The answer is B", 0, 0), ("A", "All", 1, 1), ("B", "", 0, 0),
    ("B", "b", 0, 1), ("B", "(b)", 0, 1), ("A", "yes", 0, 1), ("B", "No", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "theirs", "ours"), DYNAMATH_CHOICES)
def test_dynamath_choices(truth: str, answer: str, theirs: int, ours: int) -> None:
    assert score("dynamath", truth, answer, **YES_NO) == ours
    assert ours == theirs or answer in ("b", "(b)", "yes", "No")


def test_words_of_another_option_are_not_right_by_their_first_letters() -> None:
    """The official script looks for a letter in the first three characters, so it reads
    `Arithmetic` as the answer A and scores 1. Here the score is 0.
    """
    by = {"answer_type": "multiple choice", "choices": ("geometric", "Arithmetic")}
    assert [score("dynamath", truth, "Arithmetic", **by) for truth in "AB"] == [0, 1]


DYNAMATH_FLOATS = [
    # truth, answer, official score, score of this project
    ("2.0944", "2.0944", 1, 1), ("2.0944", "2.095", 1, 1), ("5.75", "5.751", 0, 0), ("5.75", "5.7509", 1, 1), ("5.75", "5.752", 0, 0),
    ("12", "12.001", 1, 1), ("12", "12.0011", 0, 0), ("-3", "-3.001", 1, 1), ("-3", "3", 0, 0), ("12", "1.2e1", 1, 1),
    ("12", "12 cm", 1, 1),
    ("2.0944", "0.66667\u03c0", 1, 1), ("6.283", "2\u03c0", 1, 1), ("-1.571", "-0.5\u03c0", 1, 1), ("12", "-12", 0, 0),
    ("12", "1,000", 0, 0),
    ("2.0944", "2.0944cm", 0, 1), ("12", "about 12", 0, 1), ("2.0944", "x = 2.0944", 0, 1), ("2.0944", "2\u03c0/3", 0, 1),
    ("6.283", "2\u03c0/3", 1, 0), ("-1.571", "-\u03c0/2", 0, 1), ("3.142", "\u03c0", 0, 1), ("-3", "\u22123", 0, 1), ("-3", "- 3", 0, 1),
    ("-3", "minus 3", 0, 1), ("12", "12 5", 1, None), ("3", "-(3)", 0, None), ("3", "3^2", 0, None), ("2", "2pi", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "theirs", "ours"), DYNAMATH_FLOATS)
def test_dynamath_floats(truth: str, answer: str, theirs: int, ours: int | None) -> None:
    """None means that the answer is left to the mathematical comparison and the judge."""
    assert score("dynamath", truth, answer, answer_type="float") == ours
    read_more = (
        "2.0944cm",
        "about 12",
        "x = 2.0944",
        "2\u03c0/3",
        "-\u03c0/2",
        "\u03c0",
        "\u22123",
        "- 3",
        "minus 3",
        "12 5",
        "-(3)",
        "3^2",
    )
    assert ours == theirs or answer in read_more


DYNAMATH_TEXTS = [
    # truth, answer, official score, score of this project
    ("Sep", "Sep", 1, 1), ("Sep", "September", 1, 1), ("Sep", "May", 0, 0), ("A", "It is A", 1, 1), ("3:0", "It is 3:0.", 1, 1),
    ("x = -1", "x = 1", 0, 0), ("(-1, 1)", "at (-1, 1)", 1, 1), ("135", "about 135 cm", 1, 1), ("Q1", "Q2", 0, 0), ("Sep", "", 0, 0),
    ("Sep", "sep", 0, 1), ("x = -1", "x=-1", 0, 1), ("x = -1", "x = \u22121", 0, 1), ("(-1, 1)", "(-1,1)", 0, 1),
    ("3:0", "13:0", 1, 0), ("3:0", "3:00", 1, 0), ("135", "1352", 1, 0), ("135", "-135", 1, 0), ("135", "\u2212135", 1, 0),
    ("135", "135.5", 1, 0),
    ("x = -1", "x = -12", 1, 0), ("A", "All", 1, 0), ("AC", "ACE", 1, 0), ("Product A", "Product AB", 1, 0), ("Q1", "Q12", 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "theirs", "ours"), DYNAMATH_TEXTS)
def test_dynamath_texts(truth: str, answer: str, theirs: int, ours: int) -> None:
    """The scores equal the official scores in the first ten cases only. In the others, case, spaces
    and minus signs are handled, and a truth inside a longer number or label does not match.
    """
    assert score("dynamath", truth, answer, answer_type="text") == ours
    assert (ours == theirs) == ((truth, answer, theirs, ours) in DYNAMATH_TEXTS[:10])


CHOICE = {"answer_type": "choice", "precision": 0}
MATHVISTA_CHOICES = [
    # options, truth, answer, official score, score of this project
    (COLORS, "B", "B", 1, 1), (COLORS, "B", "(b)", 1, 1), (COLORS, "B", "it is (B) I think", 1, 1), (COLORS, "B", "light blu", 1, 1),
    (COLORS, "A", "rod", 1, 1), (("ab", "cd"), "A", "x", 1, 1), (("ab", "cd"), "B", "x", 0, 0), (("ab", "ac", "ad"), "A", "ax", 1, 1),
    (("9", "12", "18", "18"), "C", "18", 1, 1), (("9", "12", "18", "18"), "C", "D", 1, 1),
    (("(c)", "(a)", "(e)", "(d)", "(b)"), "E", "E", 1, 1), (("(c)", "(a)", "(e)", "(d)", "(b)"), "B", "(b)", 1, 1),
    (COLORS, "B", "B) green", 0, 1), (("no", "yes"), "B", "B.", 0, 1), (("cab", "dog"), "B", "b", 0, 1),
    (("y = f(b)", "y = f(a)"), "A", "y = f(b)", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("options", "truth", "answer", "theirs", "ours"), MATHVISTA_CHOICES)
def test_mathvista_choices(options: tuple[str, ...], truth: str, answer: str, theirs: int, ours: int) -> None:
    """The first of equally similar options is chosen, and either letter of equal options is
    accepted. The scores equal the official scores except in the last four cases.
    """
    assert score("mathvista", truth, answer, options=options, **CHOICE) == ours
    assert (ours == theirs) == ((options, truth, answer, theirs, ours) in MATHVISTA_CHOICES[:-4])


MATHVISTA_NUMBERS = [
    # kind, precision, truth, answer, official score, score of this project
    ("integer", 0, "7", "7.9", 1, 1), ("integer", 0, "-3", "-3", 1, 1), ("integer", 0, "3", "-3", 0, 0),
    ("integer", 0, "1000", "1e3", 1, 1),
    ("integer", 0, "0", "-0.5", 1, 1), ("integer", 0, "15", "1e5", 0, 0), ("integer", 0, "1", "0." + "9" * 100, 1, 1),
    ("integer", 0, "5", "five", 0, 0),
    ("float", 1, "1.2", "1.24", 1, 1), ("float", 1, "1.2", "1.25", 1, 1), ("float", 2, "1.2", "1.24", 0, 0),
    ("float", 1, "1.2", "-1.2", 0, 0),
    ("list", 0, "[1, 2]", "[1, 2]", 1, 1), ("list", 0, "[1, 2]", "[2, 1]", 0, 0),
    ("integer", 0, "7", "7 cm", 0, 1), ("integer", 0, "10", "[10]", 0, 1), ("integer", 0, "-3", "\u22123", 0, 1),
    ("integer", 0, "-3", "minus 3", 0, 1),
    ("integer", 0, "1200", "1,200", 0, 1), ("list", 0, "[1, 2]", "[1,2]", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "precision", "truth", "answer", "theirs", "ours"), MATHVISTA_NUMBERS)
def test_mathvista_numbers(kind: str, precision: int, truth: str, answer: str, theirs: int, ours: int) -> None:
    assert score("mathvista", truth, answer, answer_type=kind, precision=precision) == ours
    assert ours == theirs or answer in ("7 cm", "[10]", "\u22123", "minus 3", "1,200", "[1,2]")


TIR = [
    # task, truth, answer, official score, score of this project
    ("instrument", "12", "12", 1, 1), ("instrument", "12", "12.0", 1, 1), ("instrument", "12", "12 cm", 1, 1),
    ("instrument", "12", "-12", 0, 0),
    ("instrument", "12", "**12**", 1, 1), ("instrument", "2.39", "x=2.39", 1, 1), ("instrument", "0.5", "50%", 1, None),
    ("instrument", "15", "1e5", 1, 0),
    ("instrument", "12", "minus 12", 1, 0), ("instrument", "12", "- 12", 1, 0), ("instrument", "12", "\u221212", 0, 0),
    ("instrument", "12", "1:2", 1, None),
    ("instrument", "12", "A12", 1, None), ("instrument", "12", "[12]", 0, 1), ("instrument", "12", "12^2", 0, None),
    ("symbolic", "ABD", "DBA", 1, 1), ("symbolic", "ABD", "ABC", 0, 0), ("symbolic", "ABD", "ABDD", 0, 0),
    ("symbolic", "ABD", "A,B,D", 0, 1),
    ("symbolic", "ABD", "A, B and D", 0, 1), ("symbolic", "ABD", "A B D", 0, 1),
    ("spot_difference", "1, 3", "[3, 1]", 1, 1), ("spot_difference", "1, 3", "1, 2, 3", 2 / 3, 2 / 3),
    ("spot_difference", "1, 3", "- 1\n- 3", 1, 1),
    ("spot_difference", "1, 3", "none", 0, 0), ("spot_difference", "1, 3", "1-3", 1, 1), ("spot_difference", "1, 3", "-1, 3", 1, 1 / 3),
    ("spot_difference", "1, 3", "1.3", 1, 0), ("spot_difference", "1, 3", "1:3", 1, 0), ("spot_difference", "1, 3", "1e3", 1, 0),
    ("spot_difference", "1, 3", "A1, A3", 1, 0), ("spot_difference", "1, 3", "minus 1, 3", 1, 1 / 3),
    ("word_search", "3, 4", "[3, 4]", 1, 1), ("word_search", "3, 4", "4, 3", 0, 0), ("word_search", "3, 4", "13, 4", 0, 0),
    ("word_search", "3, 4", "3, 4, 5", 1, 1), ("word_search", "5", "-5", 0, 0),
    ("word_search", "3, 4", "-3, 4", 1, 0), ("word_search", "3, 4", "\u22123, 4", 1, 0), ("word_search", "3, 4", "3, 4.5", 1, 0),
    ("word_search", "3, 4", "3\uff0c4", 0, 1),
    ("jigsaw", "2 1 4 3", "2, 1, 3, 4", 0.5, 0.5), ("jigsaw", "2 1 4 3", "in 2 parts: 2 1 4 3", 1, 1),
    ("jigsaw", "2 1 4 3", "2 1 4 3 5", 0, 0),
    ("jigsaw", "2 1 4 3", "2 1 4 3.", 1, 1), ("jigsaw", "2 1 4 3", "2\uff0c1\uff0c4\uff0c3", 1, 1),
    ("jigsaw", "2 1 4 3", "-2, 1, 4, 3", 1, 0), ("jigsaw", "2 1 4 3", "2.5, 1, 4, 3", 0.75, 0), ("jigsaw", "2 1 4 3", "2 1 4 3.5", 1, 0),
    ("jigsaw", "2 1 4 3", "1e2 1 4 3", 1, 0), ("jigsaw", "2 1 4 3", "minus 2 1 4 3", 1, 0),
]  # fmt: skip
TIR_DIFFERENCES = 26


@pytest.mark.parametrize(("task", "truth", "answer", "theirs", "ours"), TIR)
def test_tir_bench(task: str, truth: str, answer: str, theirs: float, ours: float | None) -> None:
    """Signs, decimals, exponents, times and labels are not ignored, unlike in the official
    patterns. None means that the answer is left to the mathematical comparison and the judge.
    """
    assert score("tir_bench", truth, answer, task=task, side=2) == (ours if ours is None else pytest.approx(ours))


def test_tir_bench_differs_where_it_is_listed() -> None:
    assert sum(theirs != ours for _, _, _, theirs, ours in TIR) == TIR_DIFFERENCES


@pytest.mark.parametrize(
    ("answer", "ours"), [("B", 1), ("(B)", 1), ("b", 1), ("B. light blue", 1), ("light blue", 1), ("A", 0), ("J", 0), ("reddish", None)]
)
def test_tir_bench_choices(answer: str, ours: float | None) -> None:
    """Other words are left to the general rules. The official script takes the most similar letter,
    which is A for `reddish`.
    """
    assert score("tir_bench", "B", answer, task="color", side=0, choices=COLORS) == ours


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [("4", "-4", 0), ("4", "\u22124", 0), ("4", "- 4", 0), ("4", "minus 4", 0), ("4", "A4", 0), ("4", "4e1", 0), ("4,5", "4.5", 0),
     ("1,2", "1:2", 0), ("4,5", "4x5", 1), ("4,5", "4 rows, 5 columns", 1), ("4", "4.0", 1), ("4", "{4}", 1)],
)  # fmt: skip
def test_vlmblind_reads_whole_numbers(truth: str, answer: str, right: float) -> None:
    assert score("vlmblind", truth, answer) == right


def test_numbers_are_read_whole_or_not_at_all() -> None:
    for text in (
        "-(5)",
        "-$5",
        "5^2",
        "5!",
        "\u221a5",
        "\\sqrt{5}",
        "5\u03c0",
        "5 pi",
        "5 million",
        "A5",
        "f(5)",
        "5 or 6",
        "1:5",
        "5/6",
        "five",
        "",
    ):
        assert read_number(text) is None, text
    texts = ("5", "+5", "5.", "05", "5 cm", "about 5", "$5$", "5 m/s", "x = 5", "5e0", "50e-1", "(5)", "69^\\circ")
    assert [read_number(text) for text in texts] == [5] * 12 + [69]
    for minus in ("-5", "\u22125", "\u20135", "\uff0d5", "- 5", "minus 5", "negative 5", "x = - 5", "$-5$", "-5 cm", "-5e0", "-.5e1"):
        assert read_number(minus) == -5, minus
    assert [read_numbers(text) for text in ("3 - 5", "-3, - 5", "1e2 3", "A1", "x")] == [[3, 5], [-3, -5], [100, 3], None, []]
    assert read_pair("3, -4") == (3, -4) and read_pair("3.5, 4") == (3.5, 4) and read_pair("3 4") is None
    assert [read_pair(f"3, 4{more}") for more in ("^2", ":5", "/5", "\u03c0", "", " cm", ".")] == [*[None] * 4, *[(3, 4)] * 3]
    assert read_number_with_pi("\\pi") == np.pi == read_number_with_pi("1 pi") and read_number_with_pi("2\u03c0 - 1") is None
    assert [
        read_number_with_pi(text) for text in ("2\u03c0r", "\u03c0\u00b2", "\u03c0\u03c0", "\u03c0/0", "2 - \u03c0", "\\frac{\u03c0}{2}")
    ] == [None] * 6


BY = [
    ("B", {"options": COLORS, "answer_type": "choice", "precision": 0, "task": "color", "side": 2, "choices": COLORS}),
    ("-2.5", {"answer_type": "float", "precision": 1, "task": "math", "side": 0}),
    ("7", {"answer_type": "integer", "precision": 0, "task": "word_search", "side": 0}),
    ("[1, 2]", {"answer_type": "list", "precision": 0, "task": "spot_difference", "side": 0}),
    ("2, 1, 4, 3", {"answer_type": "text", "precision": 0, "task": "jigsaw", "side": 2}),
    ("ABD", {"answer_type": "text", "precision": 0, "task": "symbolic", "side": 0}),
    ("C", {"answer_type": "multiple choice", "precision": 0, "task": "ocr", "side": 0, "choices": COLORS}),
]
HOSTILE = st.text(alphabet="0123456789-+.,:/^eE \n\u2212\u03c0ABab()[]{}\\$*x%", max_size=80) | st.text(max_size=80)


@settings(deadline=None, max_examples=60)
@given(HOSTILE)
def test_every_score_lies_between_0_and_1(answer: str) -> None:
    for truth, by in BY:
        for benchmark in BENCHMARKS:
            found = score(benchmark, truth, answer, **by)
            assert found is None or 0 <= found <= 1


@settings(deadline=None, max_examples=100)
@given(HOSTILE, HOSTILE)
def test_overlaps_and_pairs_are_symmetric(one: str, other: str) -> None:
    """The overlap score does not depend on which of the two texts is the truth. Asterisks are
    removed first, because they are Markdown only in an answer.
    """
    for left, right in ((one, other), (one, one)):
        marked = [f"1 2 {text}".replace("*", "") for text in (left, right)]
        forth, back = (score("tir_bench", *pair, task="spot_difference", side=0) for pair in (marked, marked[::-1]))
        assert forth == back


@settings(deadline=None, max_examples=200)
@given(
    st.decimals(min_value=-1000, max_value=1000, places=3), st.sampled_from(["-", "\u2212", "\u2013", "\uff0d", "- ", "minus ", "\u2212 "])
)
def test_a_sign_is_never_dropped(size: object, minus: str) -> None:
    """For a negative truth, the number with any form of minus sign is correct. For the positive
    truth, it is wrong.
    """
    negative, positive = f"-{abs(size)}", f"{abs(size)}"
    for benchmark, by in (("vsi_bench", {}), ("dynamath", {"answer_type": "float"}), ("tir_bench", {"task": "math", "side": 0}),
                          ("mathvista", {"answer_type": "float", "precision": 3})):  # fmt: skip
        assert score(benchmark, negative, f"{minus}{abs(size)} cm", **by) == 1
        assert abs(size) <= 1 or not score(benchmark, positive, f"{minus}{abs(size)} cm", **by)


@pytest.mark.parametrize(
    "text", ["-", "- ", "1", "1 ", "1,", "-1", "1.", "a", "(", "\\", "A. ", "\u03c0", "- 1\n", "minus ", "1 x", "\n- "]
)
def test_long_texts_take_no_time(text: str) -> None:
    """Texts of 100,000 characters take less than eight seconds for all readers together. Scoring
    takes no time, because answers of 1,000 characters are invalid.
    """
    answer = text * (100_000 // len(text))
    begun = time.process_time()
    for read in (read_number, read_number_with_pi, read_numbers, read_pair):
        read(answer)
    read_grid(answer, 3)
    find_option(answer, COLORS)
    for truth, by in BY:
        for benchmark in BENCHMARKS:
            assert score(benchmark, truth, answer, **by) in (0, None)
    assert time.process_time() - begun < 8


def test_a_benchmark_without_rules_has_none() -> None:
    by: Mapping[str, object] = {"benchmark": "mathverse", "options": ()}
    assert score_by_benchmark("B", "B", by) is None and score_by_benchmark("B", "B" * 2000, by) is None
