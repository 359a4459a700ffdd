"""Tests the answers read from responses, what voids an answer, and the rules that compare answers,
against hand-computed numbers and cases."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards import answer as answers
from megatron_rl.rewards.answer import (
    compare_by_rules,
    make_answer_vetoes,
    mean_relative_accuracy,
    read_strict_boxed,
    read_tagged,
    same_text,
    strip_box,
)
from megatron_rl.rewards.multiple_choice import read_choice
from megatron_rl.rewards.numbers import parse_number
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.types import Turn
from tests.support.rollout_factory import make_reward_input


def said(*replies: str) -> RewardInput:
    return make_reward_input(*(Turn(sequence=0, token_span=(0, 1), text=reply) for reply in replies))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("So.\n<answer>\n\\boxed{12}\n</answer>", "12"),
        ("<answer>\n\\boxed{\\frac{1}{2}}\n</answer>  \n", "\\frac{1}{2}"),
        ("<answer>\n\\boxed{\\{1, 2\\}}\n</answer>", "\\{1, 2\\}"),
        ("<answer>\n\\boxed{\\left\\{ 3 }\n</answer>", "\\left\\{ 3 "),
        ("<answer>\n\\boxed{1}\n</answer> no, <answer>\n\\boxed{2}\n</answer>", "2"),
        ("<think><answer>\n\\boxed{1}\n</answer></think> I do not know", None),
        ("<answer>\\boxed{12}</answer>", None),
        ("<answer>\n\\boxed{12}</answer>", None),
        ("<answer>\n\\boxed{12} or so\n</answer>", None),
        ("<answer>\n\\boxed{12}\n", None),
        ("<answer>\n\\boxed{{12}\n</answer>", None),
        ("<answer>\n12\n</answer>", None),
        ("\\boxed{12}", None),
        ("", None),
    ],
)
def test_strict_boxed(reply: str, expected: str | None) -> None:
    assert read_strict_boxed(reply) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<think>hm</think><answer> a dog </answer>", "a dog"),
        ("<answer>a</answer><answer>b</answer>", "b"),
        ("<think><answer>a</answer></think><answer>b</answer>", "b"),
        ("<think><answer>a</answer></think> nothing", None),
        ("<answer>\\boxed{7}</answer>", "7"),
        ("<answer>\\boxed{7} or \\boxed{8}</answer>", "\\boxed{7} or \\boxed{8}"),
        ("so \\boxed{\\text{x}}.", "\\text{x}"),
        ("<answer>never closed", None),
        ("\\boxed{never closed", None),
        ("", None),
    ],
)
def test_tagged(reply: str, expected: str | None) -> None:
    assert read_tagged(reply) == expected


VOID = {
    "long_answer": ["<answer>\n\\boxed{" + "x" * 1000 + "}\n</answer>", "<answer>" + "x" * 1000 + "</answer>"],
    "two_answers": [
        "<answer>\n\\boxed{3}\n</answer><answer>\n\\boxed{4}\n</answer>",
        "<answer><answer>\n\\boxed{3}\n</answer>",
        "<answer>3</answer></answer>",
    ],
    "tags_in_answer": [
        "<answer>\n\\boxed{\\boxed{3}}\n</answer>",
        "<answer>\n\\boxed{<interpreter>3</interpreter>}\n</answer>",
        "<answer>\n\\boxed{<answer>3}\n</answer>",
        "<answer>\n\\boxed{3<|im_end|>}\n</answer>",
    ],
}


@pytest.mark.parametrize("box", ["$\\boxed{5}$", "\\(\\boxed{5}\\)", "\\[ \\boxed{5} \\]", "**\\boxed{5}**", "\n$$\\fbox{5}$$\n"])
def test_a_box_between_marks_is_read(box: str) -> None:
    assert read_tagged(f"<answer>{box}</answer>") == "5"
    assert read_tagged("<answer>$\\boxed{5}+\\boxed{6}$</answer>") == "$\\boxed{5}+\\boxed{6}$"


@pytest.mark.parametrize("name", VOID)
@pytest.mark.parametrize("read", [read_strict_boxed, read_tagged])
def test_void_answers(name: str, read: answers.AnswerReader) -> None:
    """Each void answer is found by the veto of its name or is not read as an answer. Only the last
    response counts."""
    for reply in VOID[name]:
        assert make_answer_vetoes(read)[name](said("<answer>\n\\boxed{3}\n</answer>", reply)) or read(reply) is None, reply
        assert read(reply) is None or any(veto(said(reply)) for veto in make_answer_vetoes(read).values()), reply


@pytest.mark.parametrize("read", [read_strict_boxed, read_tagged])
@pytest.mark.parametrize(
    "reply", ["", "<answer>\n\\boxed{" + "x" * 999 + "}\n</answer>", "<think><answer>a</answer></think><answer>\n\\boxed{3}\n</answer>"]
)
def test_sound_answers_stay(reply: str, read: answers.AnswerReader) -> None:
    assert not any(veto(said(reply)) for veto in make_answer_vetoes(read).values())
    assert not any(veto(said()) for veto in make_answer_vetoes(read).values())


def test_two_boxes_without_tags_are_two_answers() -> None:
    assert make_answer_vetoes(read_tagged)["two_answers"](said("\\boxed{3} or \\boxed{4}"))
    assert not make_answer_vetoes(read_tagged)["two_answers"](said("\\boxed{3} is what I get. <answer>3</answer>"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("B", "B"), ("(B)", "B"), ("B.", "B"), ("B) a dog", "B"), ("(C) two dogs", "C"), (" D: ", "D"), ("B. not C", None)],
        *[("A dog", None), ("b", None), ("AB", None), ("B or C", None), ("(B", None), ("", None), ("B. Vitamin C", None)],
        *[("B)", "B"), ("B: red", "B"), ("B. Obama", None), ("C. elegans", None), ("(B).", "B"), ("(b)", "B"), ("b)", "B"), ("[B]", "B")],
    ],
)
def test_choice(text: str, expected: str | None) -> None:
    assert read_choice(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12),
        ("-3.5", Fraction(-7, 2)),
        ("about .5 m", Fraction(1, 2)),
        ("1,250.25 cm", Fraction(5001, 4)),
        ("7.", 7),
        ("12cm", 12),
        ("12 cm\u00b2", 12),
        ("1,23", None),
        ("\u0663", None),
        ("3 or 4", None),
        ("1e9", 10**9),
        ("2^3", None),
        ("1.2.3", None),
        ("none", None),
        ("9" * 31, None),
        ("", None),
    ],
)
def test_number(text: str, expected: Fraction | None) -> None:
    assert parse_number(text) == expected


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("100", "100", 1.0),
        ("100", "96", 1.0),
        ("100", "95", 0.9),  # off by exactly 0.05, which is not below 1 - 0.95
        ("100", "88", 0.8),
        ("100", "150.0", 0.0),
        ("100", "51", 0.1),
        ("100", "50", 0.0),
        ("4", "about 5 chairs", 0.5),  # 0.25: below 0.50, 0.45, 0.40, 0.35, 0.30
        ("-10", "-9", 0.8),  # 0.1: not below 0.10 and 0.05
        ("-10", "10", 0.0),
        ("0", "0.0", 1.0),
        ("0", "0.001", 0.0),
        ("B", "(B) left", 1.0),
        ("B", "C", 0.0),
        ("B", "B. Obama", 0.0),
        ("J. Smith", "J. Jones", 0.0),
        ("three", "Three", 1.0),
        ("100", "I saw 7, so 100", 0.0),
        ("100", "", 0.0),
    ],
)
def test_relative_accuracy(truth: str, answer: str, expected: float) -> None:
    """The mean relative accuracy equals hand-computed values."""
    assert mean_relative_accuracy(truth, answer) == expected


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("Red", " red. ", True),
        ("red  car", "Red car", True),
        ("B", "(B) red", True),
        ("B", "C", False),
        ("B", "B.", True),
        ("(B)", "B:", True),
        ("B) red", "B", True),
        ("B", "B: red", True),
        ("B", "(C) red", False),
        ("J. Smith", "J. Jones", None),
        ("C. elegans", "C. diff", None),
        ("B. Obama", "B", None),
        ("B", "B. Obama", None),
        ("C", "B. Obama", None),
        ("M. Curie", "M) whatever", None),
        ("(B) red", "B) blue", None),
        ("(B) red", "(C) red", None),
        ("1,000", "1000", True),
        ("12", "13", False),
        ("12", "12.0", True),
        ("12", "twelve", None),
        ("red", "not red", None),
        ("red", "", None),
        ("", "", None),
        ("A", "true", None),
    ],
)
def test_what_words_decide(truth: str, answer: str, expected: bool | None) -> None:
    """Rules decide a pair as expected by hand: equal, different, or undecided (None)."""
    assert compare_by_rules(truth, answer) is expected


TAGS = ["<answer>", "</answer>", "<think>", "</think>"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*TAGS, "\\boxed{", "{", "}", "\\", "\n", "3", "A", ".", ",", "-", "'"])))
def test_readers_are_total(pieces: list[str]) -> None:
    """Every text is read without an exception, and what is read is part of the text."""
    text = "".join(pieces)
    for read in (read_strict_boxed, read_tagged):
        found = read(text)
        assert found is None or found in text
        [veto(said(text)) for veto in make_answer_vetoes(read).values()]
    assert parse_number(text) is None or "3" in text
    assert strip_box(text) in text
    assert mean_relative_accuracy("3", text) in {step / 10 for step in range(11)}
    assert same_text(text, text) or not any(map(str.isalnum, text))


@given(st.decimals(min_value=-(10**12), max_value=10**12, places=5), st.booleans())
def test_a_number_is_read_as_python_reads_it(value: Decimal, commas: bool) -> None:
    """`parse_number` returns the same value as Python's Fraction, with and without separators of
    thousands."""
    assert parse_number(f"about {value:,f} cm" if commas else f"{value:f}") == Fraction(value)


def test_readers_are_linear() -> None:
    """Reading 20,000 repetitions of each tag or piece takes less than 20 s in total; a quadratic
    reader would take far longer."""
    began = time.perf_counter()
    for piece in ("<answer>", "</answer>", "\\boxed{", "{", "1,", "1.", "-", "</think>", "<answer></answer>"):
        text = piece * 20_000
        for read in (read_strict_boxed, read_tagged):
            read(text)
            [veto(said(text)) for veto in make_answer_vetoes(read).values()]
        parse_number(text), read_choice(text), same_text(text, text)
    assert time.perf_counter() - began < 20


OPTIONS = "Which color is the cup?\nA. green\nB. red\n(C) blue"


@pytest.mark.parametrize(
    ("question", "truth", "answer", "expected"),
    [
        (OPTIONS, "B", "B. red", True),
        (OPTIONS, "B. red", "B", True),
        (OPTIONS, "B. red", "(B) red", True),
        (OPTIONS, "B", "C. blue", False),
        (OPTIONS, "B", "B. or C.", None),
        (OPTIONS, "B. red", "B. blue", None),
        ("Which? (A) x (B) y", "A", "A. x", True),
        ("Who was president?", "B", "B. Obama", None),
        ("Did A. Smith meet J. Doe?", "A", "A. Smith", None),
    ],
)
def test_options_that_a_question_lists_are_choices(question: str, truth: str, answer: str, expected: bool | None) -> None:
    assert compare_by_rules(truth, answer, question=question) is expected
