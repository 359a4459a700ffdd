"""Evaluation of formulas in the card games. Formulas are parsed, never run as code.

The strict rules allow whole numbers, signs, + - * / and parentheses, and compute exact fractions.
Adjacent numbers, ** and // are invalid.

The legacy rules follow Python, because RL4VLM evaluates the text of a formula as Python: adjacent
numbers are concatenated, ** is exponentiation, // is integer division, and / returns a float.
Unlike in Python, an integer power whose result has more than MAX_BITS bits is invalid, because its
computation could take hours.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Number = Fraction | int | float
MAX_TOKENS = 64
"""Maximum number of tokens in a formula; a longer formula is invalid. The limit bounds the nesting
depth of parentheses.
"""
MAX_BITS = 4096
"""Maximum size, in bits, of the result of an integer power."""


class _InvalidFormula(ValueError):
    pass


class _Operator(NamedTuple):
    precedence: int
    function: Callable[[Any, Any], Number]
    is_right: bool = False
    """True if the operator is right-associative, i.e. a op b op c means a op (b op c)."""


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise _InvalidFormula
    value = base**exponent
    if isinstance(value, complex):
        raise _InvalidFormula
    return value


STRICT_OPERATORS = {
    "+": _Operator(1, operator.add),
    "-": _Operator(1, operator.sub),
    "*": _Operator(2, operator.mul),
    "/": _Operator(2, operator.truediv),
}
PYTHON_OPERATORS = {**STRICT_OPERATORS, "//": _Operator(2, operator.floordiv), "**": _Operator(4, _power, is_right=True)}
SIGN_PRECEDENCE = 3
SIGN_OPERATORS = {"+": operator.pos, "-": operator.neg}


class _ExpressionParser:
    """Precedence-climbing parser that evaluates a tokenized formula."""

    def __init__(self, tokens: Sequence[str], operators: Mapping[str, _Operator], number: Callable[[str], Number]) -> None:
        self.remaining, self.operators, self.parse_number = [*reversed(tokens)], operators, number

    def parse(self) -> Number:
        """Parse all tokens as one expression and return the expression's value."""
        value = self.parse_expression(0)
        if self.remaining:
            raise _InvalidFormula
        return value

    def parse_expression(self, min_precedence: int) -> Number:
        """Evaluate the tokens up to the next operator with a precedence below `min_precedence`."""
        value = self.parse_operand()
        while self.remaining and self.remaining[-1] in self.operators and self.operators[self.remaining[-1]].precedence >= min_precedence:
            found = self.operators[self.remaining.pop()]
            value = found.function(value, self.parse_expression(found.precedence + (not found.is_right)))
        return value

    def parse_operand(self) -> Number:
        """Parse and evaluate a number, a signed operand or an expression in parentheses."""
        token = self.remaining.pop() if self.remaining else ""
        if token in SIGN_OPERATORS:
            return SIGN_OPERATORS[token](self.parse_expression(SIGN_PRECEDENCE))
        if token == "(":
            value = self.parse_expression(0)
            if not self.remaining or self.remaining.pop() != ")":
                raise _InvalidFormula
            return value
        if not (token.isascii() and token.isdigit()):
            raise _InvalidFormula
        return self.parse_number(token)


def _evaluate_tokens(tokens: Sequence[str], operators: Mapping[str, _Operator], number: Callable[[str], Number]) -> Number | None:
    if len(tokens) > MAX_TOKENS:
        return None
    try:
        return _ExpressionParser(tokens, operators, number).parse()
    except (_InvalidFormula, ZeroDivisionError, OverflowError):
        return None


def evaluate(tokens: Sequence[str]) -> Fraction | None:
    """Return the exact value of a formula under the strict rules, or None for an invalid formula.

    Blank tokens are ignored. Example: 8 / ( 3 - 8 / 3 ) is 24.
    """
    value = _evaluate_tokens([token for token in tokens if token.strip()], STRICT_OPERATORS, Fraction)
    assert value is None or isinstance(value, Fraction)
    return value


def evaluate_as_python(tokens: Sequence[str]) -> Number | None:
    """Return the value of a formula under Python's rules, or None for an invalid formula.

    The tokens are concatenated before parsing. Example: the tokens 2 and 4 have the value 24.
    """
    return _evaluate_tokens(re.findall(r"[0-9]+|\*\*|//|[^ ]", "".join(tokens)), PYTHON_OPERATORS, int)
