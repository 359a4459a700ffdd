"""Tests the formulas of the card games: the strict reading against Python's syntax tree evaluated
in fractions, the legacy reading against Python itself."""

import ast
import operator
import time
import warnings
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.tasks.gym_cards.expressions import MAX_TOKENS, Number, evaluate, evaluate_as_python
from megatron_rl.tasks.gym_cards.points import POINTS24

BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
TOKENS = [*POINTS24.tokens[:-1], " "]
NUMBERS = st.sampled_from(POINTS24.tokens[:10])


def nested(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    joined = st.tuples(inner, st.sampled_from([["+"], ["-"], ["*"], ["/"], ["*", "*"], ["/", "/"], [" ", "*", " "]]), inner).map(
        lambda three: [*three[0], *three[1], *three[2]]
    )
    return joined | inner.map(lambda tokens: ["(", *tokens, ")"]) | inner.map(lambda tokens: ["-", *tokens])


FORMULAS = st.recursive(NUMBERS.map(lambda number: [number]), nested, max_leaves=5) | st.lists(st.sampled_from(TOKENS), max_size=12)


def by_the_syntax_tree(tokens: list[str]) -> Fraction | None:
    """Return the value of the formula by Python's syntax tree, or None. Blanks between all tokens
    keep adjacent numbers apart, so that Python's grammar rejects what the strict reading must
    reject."""
    try:
        return walk(ast.parse(" ".join(tokens).strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError):
        return None


def walk(node: ast.AST) -> Fraction:
    if isinstance(node, ast.BinOp):
        return BINARY[type(node.op)](walk(node.left), walk(node.right))
    if isinstance(node, ast.UnaryOp):
        return UNARY[type(node.op)](walk(node.operand))
    return Fraction({ast.Constant: lambda: node.value}[type(node)]())


@settings(max_examples=500, deadline=None)
@given(FORMULAS)
def test_strict_reading_is_that_of_the_syntax_tree(tokens: list[str]) -> None:
    """The strict reading equals the evaluation of Python's syntax tree in fractions."""
    assert evaluate(tokens) == by_the_syntax_tree(tokens)


@settings(max_examples=500, deadline=None)
@given(FORMULAS.filter(lambda tokens: "".join(tokens).count("**") <= 1))
def test_legacy_reading_is_pythons_own(tokens: list[str]) -> None:
    """The legacy reading equals Python's eval of the joined tokens."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = eval("".join(tokens).strip())
    except (SyntaxError, ZeroDivisionError, OverflowError, TypeError):
        expected = None
    if not isinstance(expected, int | float) or abs(expected) > 2**64:
        return  # a complex number, or a power that may be too large to compute here
    assert evaluate_as_python(tokens) in (expected, None if 0 < abs(expected) < 2**-60 else expected)


@pytest.mark.parametrize(
    ("text", "strict", "legacy"),
    [
        ("2 4", None, None), ("8/(3-8/3)", 24, pytest.approx(24)), ("1/0", None, None), ("-2*-3", 6, 6), ("2-3-4", -5, -5),
        ("2**3**2", None, 512), ("-2**2", None, -4), ("2**-1", None, 0.5), ("9//2*6", None, 24), ("7/2", Fraction(7, 2), 3.5),
        ("10**10**10", None, None), ("9**9**9**9", None, None), ("", None, None), ("()", None, None), ("2(3)", None, None),
        ("(2", None, None), ("2)", None, None), ("*2", None, None), ("(0-8)**(1/3)", None, None), ("2***3", None, None),
    ],
)  # fmt: skip
def test_by_hand(text: str, strict: Number | None, legacy: Number | None) -> None:
    assert evaluate([*text]) == strict
    assert evaluate_as_python([*text]) == legacy


def test_neighbors_concatenate_in_the_legacy_reading_alone() -> None:
    """Adjacent numbers are concatenated in the legacy reading and invalid in the strict one."""
    assert (evaluate(["2", "4"]), evaluate_as_python(["2", "4"])) == (None, 24)
    assert (evaluate(["1", "10"]), evaluate_as_python(["1", "10"])) == (None, 110)
    assert evaluate_as_python(["2", " ", "4"]) is None and evaluate(["2", " ", "+", "4"]) == 6


@pytest.mark.parametrize("read", [evaluate, evaluate_as_python])
@pytest.mark.parametrize(
    "tokens",
    [["("] * 10_000, ["("] * 5000 + ["1"] + [")"] * 5000, ["-"] * 10_000, ["1", "+"] * 10_000, ["__import__"], ["print", "(", ")"],
     ["\u0661"], ["\uff11"]],
    ids=["open", "nested", "signs", "long", "name", "call", "arabic", "wide"],
)  # fmt: skip
def test_what_is_no_formula_has_no_worth_and_takes_no_time(read: object, tokens: list[str]) -> None:
    """Token lists that are no formula have no value, and are rejected within 0.1 s."""
    started = time.perf_counter()
    assert read(tokens) is None
    assert time.perf_counter() - started < 0.1
    deepest = ["("] * (MAX_TOKENS // 2 - 1) + ["7"] + [")"] * (MAX_TOKENS // 2 - 1)
    assert evaluate(deepest) == 7
