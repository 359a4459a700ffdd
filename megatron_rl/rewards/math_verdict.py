"""Comparison of two LaTeX expressions by math-verify.

Expressions that math-verify misreads are left undecided (parsed_math.py). Only the helper process
of algebra.py imports this module, because SymPy loads slowly.
"""

from collections.abc import Sequence
from dataclasses import replace

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from sympy import Basic, Expr

from megatron_rl.rewards import parsed_math as checks
from megatron_rl.rewards.equations import rounding_of


def verdict(truth: str, answer: str, chains: Sequence[tuple[str, str, bool]] = ()) -> bool | None:
    """Return True if two expressions are equal, False if not, None if undecided.

    `chains` contains the pairs of values that `equations.links` returned for both texts. If the
    values of a pair do not agree, the result is None.
    """
    one, other = _parsed(truth), _parsed(answer)
    if one is None or other is None or not all(_agree(*pair) for pair in chains):
        return None
    sides, are_unevaluated = checks.replace_unevaluated([checks.with_exact_exponents(side) for side in (one, other)])
    if any(map(checks.is_undefined, sides)):
        return None
    is_same = _are_same(*sides)
    if is_same and sides[0] != sides[1] and (all(map(checks.is_always_or_never_true, sides)) or checks.are_lost_in_rounding(*sides)):
        return None
    if is_same and not checks.differ_beyond_tolerance(*sides) and not checks.are_interval_and_list(*sides):
        return True
    return None if are_unevaluated else False


def _parsed(text: str) -> Basic | None:
    as_written = replace(LatexExtractionConfig().normalization_config, units=False)
    reader = [LatexExtractionConfig(normalization_config=as_written)]
    found = parse(
        _quoted(text),
        reader,
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  # None is documented, but missing from the annotation
    )
    return next(iter(found), None)


def _are_same(one: Basic, other: Basic) -> bool:
    return all(verify(*pair, allow_set_relation_comp=True, timeout_seconds=None) for pair in ((one, other), (other, one)))


def _agree(one: str, other: str, is_last: bool) -> bool:
    """Return True if two adjacent values of an equation agree.

    Numbers may differ by the rounding error of the less precise decimal.
    """
    value, next_value = _parsed(one), _parsed(other)
    if value is None or next_value is None:
        return not is_last
    if checks.are_numbers(value, next_value):
        assert isinstance(value, Expr) and isinstance(next_value, Expr)
        return not checks.differ_beyond(value, next_value, rounding_of(one, other))
    return not is_last or _are_same(value, next_value)


def _quoted(text: str) -> str:
    """Return the text as one LaTeX formula between dollar signs.

    A percent sign is placed after the closing dollar sign, where math-verify expects it.
    """
    inside = text.strip().strip("$").strip()
    bare = inside.removesuffix("%").removesuffix("\\")
    return f"${bare}$%" if inside.endswith("%") else f"${inside}$"
