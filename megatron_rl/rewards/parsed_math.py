r"""Detects differences that math-verify would remove when it evaluates parsed expressions.

Only the helper process of algebra.py imports this module, because SymPy loads slowly. Math-verify
solves equations and evaluates both sides. For example, `f(2)=4` has no unknown, `x^2=-1` has no
real solution and \frac{dy}{dx} is 0, so math-verify would accept any other expression of the same
kind as equal. An unevaluated limit, sum or integral would count as equal to its value, although the
question usually asks for this value.
"""

from collections.abc import Sequence

from sympy import (
    Abs,
    And,
    Basic,
    Derivative,
    Equality,
    Expr,
    FiniteSet,
    Float,
    Integral,
    Interval,
    Limit,
    Max,
    Pow,
    Product,
    Sum,
    Symbol,
    Tuple,
    Union,
    exp,
    false,
    nan,
    nsimplify,
    preorder_traversal,
    solve,
    true,
    zoo,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom
from sympy.sets.sets import EmptySet

RELATIVE_TOLERANCE = 1e-6
_UNEVALUATED = (AppliedUndef, Derivative, Integral, Limit, Product, Sum)


def replace_unevaluated(sides: Sequence[Basic]) -> tuple[list[Basic], bool]:
    """Replace each unevaluated part of the expressions with a symbol.

    Equal parts are replaced with the same symbol. The second return value is True if any part was
    replaced.
    """
    parts = sorted(set().union(*(_unevaluated_parts(side) for side in sides)), key=str)
    symbols = {part: Symbol(f"#{place}", real=True) for place, part in enumerate(parts)}
    return [side.xreplace(symbols) for side in sides], bool(parts)


def is_undefined(side: Basic) -> bool:
    """Return True if an expression has no value.

    Expressions without a value are divisions by zero, empty intervals, and statements that SymPy
    has evaluated to true or false.
    """
    return isinstance(side, BooleanAtom | EmptySet) or side.has(nan, zoo)


def is_always_or_never_true(side: Basic) -> bool:
    """Return True if a relation in the expression holds for all real values or for none."""
    relations = side.atoms(Relational)
    return any(map(_is_trivial, [each for each in relations if each.free_symbols] or relations))


def with_exact_exponents(side: Basic) -> Basic:
    r"""Return the expression with fractions instead of decimals in exponents.

    Without this conversion, SymPy would not recognize that x^{1.5} equals x\sqrt{x}.
    """
    powers = [power for power in side.atoms(Pow, exp) if power.exp.has(Float)]
    return side.xreplace({power: Pow(power.base, nsimplify(power.exp, rational=True)) for power in powers})


def are_numbers(*sides: Basic) -> bool:
    """Return True if all expressions are finite numbers."""
    return all(isinstance(side, Expr) and side.is_number and side.is_finite for side in sides)


def differ_beyond(one: Expr, other: Expr, margin: float | None) -> bool:
    """Return True if two numbers differ by more than `margin`.

    If `margin` is None, the margin is RELATIVE_TOLERANCE times the larger of the two absolute
    values.
    """
    size = Abs(one - other).evalf()
    return bool(size > (RELATIVE_TOLERANCE * Max(Abs(one), Abs(other)).evalf() if margin is None else margin * (1 + RELATIVE_TOLERANCE)))


def differ_beyond_tolerance(truth: Basic, answer: Basic) -> bool:
    """Return True if corresponding numbers differ by more than RELATIVE_TOLERANCE.

    The expressions may be numbers, lists, sets, intervals or named values. This check is needed
    because math-verify rounds to six decimal places and would therefore treat 1e-7 and 2e-7 as
    equal.
    """
    values, others = _values(truth), _values(answer)
    if values is None or others is None or len(values) != len(others):
        return False
    return any(differ_beyond(one, other, None) for one, other in zip(values, others, strict=True))


def are_lost_in_rounding(truth: Basic, answer: Basic) -> bool:
    """Return True if two formulas differ and at least one contains a number that rounds to 0.

    Math-verify would treat such formulas as equal, because it rounds to six decimal places.
    """
    if _values(truth) is not None and _values(answer) is not None:
        return False
    return any(map(_holds_tiny, (truth, answer))) and truth.doit() != answer.doit()


def are_interval_and_list(truth: Basic, answer: Basic) -> bool:
    r"""Return True if one expression is an interval and the other a list of numbers.

    Examples of an interval and a list are `2<x<5` and `2, 5`, or `(-3,3)` and `x=\pm3`. Math-verify
    treats an interval and a list as equal if the list contains the interval's end points.
    """
    return {_form(truth), _form(answer)} in ({"range", "values"}, {"range", "list"}, {"interval", "values"})


def _form(side: Basic) -> str:
    if side.atoms(Relational) - side.atoms(Equality) or (isinstance(side, Equality) and side.has(Interval)):
        return "range"
    if isinstance(side, FiniteSet | Tuple | Equality):
        return "values" if side.atoms(Equality) else "list"
    return "interval" if isinstance(side, Interval | Union) else ""


def _values(side: Basic) -> list[Expr] | None:
    """Return the finite numbers in an expression, or None for a formula.

    The expression may be a number, named value, list, set or interval.
    """
    if isinstance(side, Interval):
        return _values_of(side.args[:2])
    if isinstance(side, FiniteSet | Union | And):
        found = [values for part in side.args if (values := _values(part)) is not None]
        return [value for values in sorted(found, key=_sizes) for value in values] if len(found) == len(side.args) else None
    if isinstance(side, Tuple):
        return _values_of(side.args)
    if isinstance(side, Relational):
        return _values_of([part for part in side.args if not isinstance(part, Symbol)])
    if isinstance(side, Expr) and side.is_number:
        return [side] if side.is_finite else []
    return None


def _values_of(parts: Sequence[Basic]) -> list[Expr] | None:
    found = [values for part in parts if (values := _values(part)) is not None]
    return [value for values in found for value in values] if len(found) == len(parts) else None


def _sizes(values: Sequence[Expr]) -> list[tuple[Expr, Expr]]:
    return [value.evalf().as_real_imag() for value in values]


def _holds_tiny(side: Basic) -> bool:
    numbers = [part for part in preorder_traversal(side) if isinstance(part, Expr) and part.is_number and part.is_finite]
    return any(0 < Abs(part).evalf() < RELATIVE_TOLERANCE for part in numbers)


def _unevaluated_parts(side: Basic) -> set[Basic]:
    if isinstance(side, _UNEVALUATED):
        return {side}
    return set().union(*(_unevaluated_parts(part) for part in side.args))


def _is_trivial(relation: Relational) -> bool:
    if not all(isinstance(side, Expr) for side in relation.args):  # e.g. the right side of `x \in (1,2)` is a set
        return False
    try:
        return solve(relation, relation.free_symbols) in ([], true, false)
    except (NotImplementedError, ValueError):  # e.g. an inequality with several unknowns, which math-verify cannot solve either
        return False
