r"""Checks of parsed expressions that math-verify would evaluate away. Imported by the algebra's helper process only: SymPy loads slowly.

math-verify solves equations and evaluates both sides: `f(2)=4` has no unknown, `x^2=-1` has no real solution and \frac{dy}{dx} is 0, so
each of them would equal any other of its kind. A limit, a sum or an integral would equal its value, which is what a question asks for.
"""

from collections.abc import Sequence

from sympy import (
    Abs,
    And,
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


def replace_unevaluated(sides: Sequence[Expr]) -> tuple[list[Expr], bool]:
    """Return both sides with one symbol for each unevaluated part, the same for the same part, and whether there was such a part."""
    parts = sorted(set().union(*(_unevaluated_parts(side) for side in sides)), key=str)
    symbols = {part: Symbol(f"#{place}", real=True) for place, part in enumerate(parts)}
    return [side.xreplace(symbols) for side in sides], bool(parts)


def is_undefined(side: Expr) -> bool:
    """Return whether a side is no value: it divides by zero, it is an interval without points, or a statement that SymPy has found
    true or false."""
    return isinstance(side, BooleanAtom | EmptySet) or side.has(nan, zoo)


def is_always_or_never_true(side: Expr) -> bool:
    """Return whether an equation or inequality of a side holds for every real value of its unknowns, or for none."""
    relations = side.atoms(Relational)
    return any(map(_is_trivial, [each for each in relations if each.free_symbols] or relations))


def with_exact_exponents(side: Expr) -> Expr:
    """Return a side with fractions for the decimals in its exponents: SymPy would not find x^{1.5} equal to x\\sqrt{x}."""
    powers = [power for power in side.atoms(Pow, exp) if power.exp.has(Float)]
    return side.xreplace({power: Pow(power.base, nsimplify(power.exp, rational=True)) for power in powers})


def are_numbers(*sides: Expr) -> bool:
    return all(isinstance(side, Expr) and side.is_number and side.is_finite for side in sides)


def differ_beyond(one: Expr, other: Expr, margin: float | None) -> bool:
    """Return whether two numbers differ by more than a margin, without one by more than SHARE of the larger."""
    size = Abs(one - other).evalf()
    return bool(size > (RELATIVE_TOLERANCE * Max(Abs(one), Abs(other)).evalf() if margin is None else margin * (1 + RELATIVE_TOLERANCE)))


def differ_beyond_tolerance(truth: Expr, answer: Expr) -> bool:
    """Return whether two numbers, or two in the same place of lists, sets, intervals and named values, differ by more than SHARE.

    math-verify rounds to six places, where 1e-7 equals 2e-7.
    """
    values, others = _values(truth), _values(answer)
    if values is None or others is None or len(values) != len(others):
        return False
    return any(differ_beyond(one, other, None) for one, other in zip(values, others, strict=True))


def are_lost_in_rounding(truth: Expr, answer: Expr) -> bool:
    """Return whether one of two formulas that are not written alike holds a number that is 0 at six places."""
    if _values(truth) is not None and _values(answer) is not None:
        return False
    return any(map(_holds_tiny, (truth, answer))) and truth.doit() != answer.doit()


def are_interval_and_list(truth: Expr, answer: Expr) -> bool:
    """Return whether one side is an interval and the other the values at its ends: `2<x<5` beside `2, 5`, `(-3,3)` beside `x=\\pm3`."""
    return {_form(truth), _form(answer)} in ({"range", "values"}, {"range", "list"}, {"interval", "values"})


def _form(side: Expr) -> str:
    if side.atoms(Relational) - side.atoms(Equality) or (isinstance(side, Equality) and side.has(Interval)):
        return "range"
    if isinstance(side, FiniteSet | Tuple | Equality):
        return "values" if side.atoms(Equality) else "list"
    return "interval" if isinstance(side, Interval | Union) else ""


def _values(side: Expr) -> list[Expr] | None:
    """Return the numbers of a number, a named value, a list, a set or an interval, None for a formula; without the infinite ones."""
    if isinstance(side, Interval):
        return _values_of(side.args[:2])
    if isinstance(side, FiniteSet | Union | And):
        found = [_values(part) for part in side.args]
        return None if None in found else [value for values in sorted(found, key=_sizes) for value in values]
    if isinstance(side, Tuple):
        return _values_of(side.args)
    if isinstance(side, Relational):
        return _values_of([part for part in side.args if not isinstance(part, Symbol)])
    if isinstance(side, Expr) and side.is_number:
        return [side] if side.is_finite else []
    return None


def _values_of(parts: Sequence[Expr]) -> list[Expr] | None:
    found = [_values(part) for part in parts]
    return None if None in found else [value for values in found for value in values]


def _sizes(values: Sequence[Expr]) -> list[tuple[Expr, Expr]]:
    return [value.evalf().as_real_imag() for value in values]


def _holds_tiny(side: Expr) -> bool:
    numbers = [part for part in preorder_traversal(side) if isinstance(part, Expr) and part.is_number and part.is_finite]
    return any(0 < Abs(part).evalf() < RELATIVE_TOLERANCE for part in numbers)


def _unevaluated_parts(side: Expr) -> set[Expr]:
    if isinstance(side, _UNEVALUATED):
        return {side}
    return set().union(*(_unevaluated_parts(part) for part in side.args))


def _is_trivial(relation: Relational) -> bool:
    if not all(isinstance(side, Expr) for side in relation.args):  # `x \in (1,2)` has a set on its right
        return False
    try:
        return solve(relation, relation.free_symbols) in ([], true, false)
    except (NotImplementedError, ValueError):  # unsolvable, or an inequality of several unknowns: math-verify has not solved it either
        return False
