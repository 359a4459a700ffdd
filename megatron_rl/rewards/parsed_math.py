r"""Checks of parsed expressions that math-verify would evaluate away. Imported by the algebra's helper process only: SymPy loads slowly.

math-verify solves equations and evaluates both sides: `f(2)=4` has no unknown, `x^2=-1` has no real solution and \frac{dy}{dx} is 0, so
each of them would equal any other of its kind. A limit, a sum or an integral would equal its value, which is what a question asks for.
"""

from collections.abc import Sequence

from sympy import Abs, Derivative, Expr, Integral, Limit, Max, Product, Sum, Symbol, false, nan, solve, true, zoo
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom
from sympy.sets.sets import EmptySet

SHARE = 1e-6
_UNEVALUATED = (AppliedUndef, Derivative, Integral, Limit, Product, Sum)


def name_unevaluated(sides: Sequence[Expr]) -> tuple[list[Expr], bool]:
    """Return both sides with one symbol for each unevaluated part, the same for the same part, and whether there was such a part."""
    parts = sorted(set().union(*(_outermost(side) for side in sides)), key=str)
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


def differ_by_a_share(truth: Expr, answer: Expr) -> bool:
    """Return whether two numbers differ by more than SHARE of the larger: math-verify rounds to six places, where 1e-7 equals 2e-7."""
    if not all(isinstance(side, Expr) and side.is_number and side.is_finite for side in (truth, answer)):
        return False
    return bool(Abs(truth - answer).evalf() > SHARE * Max(Abs(truth), Abs(answer)).evalf())


def _outermost(side: Expr) -> set[Expr]:
    if isinstance(side, _UNEVALUATED):
        return {side}
    return set().union(*(_outermost(part) for part in side.args))


def _is_trivial(relation: Relational) -> bool:
    if not all(isinstance(side, Expr) for side in relation.args):  # `x \in (1,2)` has a set on its right
        return False
    try:
        return solve(relation, relation.free_symbols) in ([], true, false)
    except (NotImplementedError, ValueError):  # unsolvable, or an inequality of several unknowns: math-verify has not solved it either
        return False
