"""What a formula of the card games is worth. It is parsed and never run as code.

The strict reading takes whole numbers, + - * / and parentheses, in exact fractions; a sign may stand before a number. Two numbers side by
side, ** and // are no formula. The legacy reading is that of Python, which RL4VLM hands the formula's text to: neighbors concatenate, ** is
a power, // divides without rest, / gives floats. Powers beyond MAX_BITS have no value here; Python would work on them for hours.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

Number = Fraction | int | float
MAX_TOKENS = 64
"""Longer formulas have no value: it bounds how deep parentheses can nest."""
MAX_BITS = 4096
"""Largest size of a power."""


class _NoFormula(ValueError):
    pass


class _Operator(NamedTuple):
    binds: int
    apply: Callable[[Number, Number], Number]
    is_right: bool = False
    """a op b op c is a op (b op c)."""


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise _NoFormula
    value = base**exponent
    if isinstance(value, complex):
        raise _NoFormula
    return value


STRICT = {
    "+": _Operator(1, operator.add),
    "-": _Operator(1, operator.sub),
    "*": _Operator(2, operator.mul),
    "/": _Operator(2, operator.truediv),
}
PYTHON = {**STRICT, "//": _Operator(2, operator.floordiv), "**": _Operator(4, _power, is_right=True)}
SIGN_BINDS = 3
SIGNS = {"+": operator.pos, "-": operator.neg}


class _Reader:
    """Precedence climbing over tokens."""

    def __init__(self, tokens: Sequence[str], operators: Mapping[str, _Operator], number: Callable[[str], Number]) -> None:
        self.rest, self.operators, self.number = [*reversed(tokens)], operators, number

    def whole(self) -> Number:
        value = self.expression(0)
        if self.rest:
            raise _NoFormula
        return value

    def expression(self, least: int) -> Number:
        """As far as operators bind at least so tightly."""
        value = self.operand()
        while self.rest and self.rest[-1] in self.operators and self.operators[self.rest[-1]].binds >= least:
            found = self.operators[self.rest.pop()]
            value = found.apply(value, self.expression(found.binds + (not found.is_right)))
        return value

    def operand(self) -> Number:
        token = self.rest.pop() if self.rest else ""
        if token in SIGNS:
            return SIGNS[token](self.expression(SIGN_BINDS))
        if token == "(":
            value = self.expression(0)
            if not self.rest or self.rest.pop() != ")":
                raise _NoFormula
            return value
        if not (token.isascii() and token.isdigit()):
            raise _NoFormula
        return self.number(token)


def _worth(tokens: Sequence[str], operators: Mapping[str, _Operator], number: Callable[[str], Number]) -> Number | None:
    if len(tokens) > MAX_TOKENS:
        return None
    try:
        return _Reader(tokens, operators, number).whole()
    except (_NoFormula, ZeroDivisionError, OverflowError):
        return None


def evaluate(tokens: Sequence[str]) -> Fraction | None:
    """The exact worth, or None of what is no formula. Blanks stand for nothing. Example: 8 / ( 3 - 8 / 3 ) is 24."""
    return _worth([token for token in tokens if token.strip()], STRICT, Fraction)


def evaluate_as_python(tokens: Sequence[str]) -> Number | None:
    """What Python makes of the tokens written one behind the other; None where it makes nothing. Example: 2 4 is 24."""
    return _worth(re.findall(r"[0-9]+|\*\*|//|[^ ]", "".join(tokens)), PYTHON, int)
