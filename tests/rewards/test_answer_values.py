"""Answers of another value that were once equal, and what was once an exception. Truths by hand; all through the accuracy reward."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.algebra import is_mathematics
from megatron_rl.rewards.answer import decide, relative_accuracy
from megatron_rl.rewards.answer_values import read_number
from megatron_rl.rewards.numbers import exact_number, number
from megatron_rl.rewards.typed_math import to_latex
from tests.support.rewards import rewards_of

LISTED = "Which one?\nA. red\nB. 3.141593\nC. 7"
HUGE = ["1e99", "10^{50}", "5x10^40", "1e28", "9" * 60, "-1e99", "-" + "9" * 59]

Pairs = list[tuple[str, str]]
KINDS: dict[str, tuple[Pairs, Pairs]] = {
    "huge numbers": (
        [("3.141593", "3.14159265"), ("-3.141593", "-3.14159265"), ("1234.56", "1234.5649"), ("1234.57", "1234.565")],
        [*[(decimal, huge) for decimal in ("3.141593", "1234.56", "-3.141593") for huge in HUGE], ("1234.56", "1234.565")],
    ),
}
"""By kind: pairs of one value, and pairs of two values, or of which it is left open whether they are one."""


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(kind: str) -> None:
    """In both directions, and each side is itself."""
    same, different = KINDS[kind]
    cases = [(*pair, expected) for pairs, expected in ((same, 1.0), (different, 0.0)) for one, other in pairs
             for pair in ((one, other), (other, one))]  # fmt: skip
    cases += [(text, text, 1.0) for pair in (*same, *different) for text in pair]
    found = rewards_of([(one, other, "") for one, other, _ in cases])
    assert [(*case, got) for case, got in zip(cases, found, strict=True) if case[2] != got] == []


def test_a_huge_number_is_no_option() -> None:
    assert rewards_of([("B", huge, LISTED) for huge in HUGE]) == [0.0] * len(HUGE)


SIZES = st.integers(-(10**6), 10**6)
NUMERALS = st.one_of(
    st.text("0123456789", min_size=1, max_size=400),
    st.builds("{}{}{}".format, st.text("0123456789.", min_size=1, max_size=40), st.sampled_from(["e", "E", "x10^", "\\times10^"]), SIZES),
    st.builds("10^{{{}}}".format, SIZES),
    st.builds("{}/{}".format, st.integers(0, 10**60), st.integers(0, 10**60)),
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
)
REFERENCES = ["3.141593", "-1234.56", "1/3", "B", "5%", "$5.123456", "90°", "1, 2", "7:30", "3x4", "\\sqrt{2}", "x=5", "red", "1e-30"]


@settings(max_examples=300, deadline=2000)
@given(st.sampled_from(REFERENCES), st.sampled_from(["", "-", "±", "$"]), NUMERALS, st.sampled_from(["", "%", " cm", "!", ", 2"]))
def test_no_number_is_an_exception(truth: str, sign: str, numeral: str, rest: str) -> None:
    """Of up to 400 digits and exponents of a million, beside each kind of reference; a value is equal only to itself."""
    reply = sign + numeral + rest
    for question in ("", LISTED):
        assert decide(truth, reply, question=question) in (True, False, None)
        assert 0 <= relative_accuracy(truth, reply, question=question) <= 1
    assert read_number(reply) is None or isinstance(number(reply), Fraction | None)
    assert isinstance(to_latex(reply), str) and is_mathematics(reply) in (True, False)
    if truth == "3.141593" and decide(truth, reply):
        value = exact_number(reply)
        assert value is not None and abs(value - Fraction(truth)) <= Fraction(1, 10**6)


NOT_FIVE = [
    *["5\u0660", "\u096b5", "5 (\u0666)", "5 \u2460", "5 \u2260", "5\xf7", "5<", "5>", "5|", "(5", "[5", "\\{5", "(about (5)"],
    *["5 kilo", "5 mega", "5 giga", "5 quintillion", "5 googol", "5 kilos"],
]
FIVE = ["(5)", "(5 cm)", "[5] m", "5 (about)", "a) 5", "5 kilograms", "5 megapixels", "5 = the number", "x = {5}", "5 \u2248"]


def test_numeric_sources_read_other_digits_and_symbols() -> None:
    for answers, expected in ((NOT_FIVE, 0.0), (FIVE, 1.0)):
        found = rewards_of([("5", answer, "") for answer in answers], source="vsi_numerical")
        assert [answer for answer, got in zip(answers, found, strict=True) if got != expected] == []
