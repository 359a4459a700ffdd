"""Solvers for EZPoints and Points24: exhaustive search over formulas, in integer arithmetic."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement
from math import factorial, prod

_Subexpression = tuple[int, int, str, "_Subexpression | None", "_Subexpression | None"]
"""(numerator, denominator, symbol, left, right). The value is numerator / denominator. `symbol` is
a number or an operator. `left` and `right` are the operands of an operator, or None for a number.
"""
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def _write_tokens(part: _Subexpression, least: int = 0) -> tuple[str, ...]:
    """Return the tokens of a formula, in parentheses if the formula's precedence is below `least`.

    The precedence of a formula is the precedence of its outermost operator.
    """
    _, _, symbol, left, right = part
    if left is None or right is None:
        return (symbol,)
    binds = PRECEDENCE[symbol]
    tokens = (*_write_tokens(left, binds), symbol, *_write_tokens(right, binds + (symbol in "-/")))
    return tokens if binds >= least else ("(", *tokens, ")")


def _combine(one: _Subexpression, two: _Subexpression) -> Iterator[_Subexpression]:
    """Yield the result of applying each operator to `one` and `two`, in both orders for - and /."""
    (a, b), (c, d) = one[:2], two[:2]
    yield a * d + c * b, b * d, "+", one, two
    yield a * c, b * d, "*", one, two
    yield a * d - c * b, b * d, "-", one, two
    yield c * b - a * d, b * d, "-", two, one
    if c:
        yield a * d, b * c, "/", one, two
    if a:
        yield c * b, d * a, "/", two, one


def _search_formula(parts: tuple[_Subexpression, ...], target: int) -> _Subexpression | None:
    tried = set()
    for first, second in combinations(range(len(parts)), 2):
        one, two = parts[first], parts[second]
        if (one[:2], two[:2]) in tried:
            continue
        tried.add((one[:2], two[:2]))
        rest = tuple(part for number, part in enumerate(parts) if number not in (first, second))
        for made in _combine(one, two):
            found = _search_formula((made, *rest), target) if rest else made if made[0] == target * made[1] else None
            if found:
                return found
    return None


@cache
def _solution(numbers: tuple[int, ...], target: int) -> tuple[str, ...] | None:
    found = _search_formula(tuple((number, 1, str(number), None, None) for number in numbers), target)
    return found and _write_tokens(found)


def find_solution(numbers: tuple[int, ...], target: int = 24) -> tuple[str, ...] | None:
    """Return the tokens of a formula that equals the target, or None if no such formula exists.

    The formula uses each number exactly once and may contain + - * / and parentheses. The result
    does not depend on the order of `numbers`.

    Example: the formula for (3, 3, 8, 8) is 8 / ( 3 - 8 / 3 ).
    """
    return _solution(tuple(sorted(numbers)), target)


def find_pair_solution(numbers: tuple[int, int], target: int = 12) -> tuple[str, ...] | None:
    """Return the tokens of an EZPoints formula for the target, or None if there is no solution.

    The formula joins the two numbers with + or *, in the given order.
    """
    one, two = numbers
    sign = "+" if one + two == target else "*" if one * two == target else ""
    return (str(one), sign, str(two)) if sign else None


def find_partner_numbers(target: int, first: int) -> tuple[int, ...]:
    """Return each number in 1..10 whose product or sum with `first` equals the target.

    The number whose product with `first` equals the target is returned first. If a number satisfies
    both conditions, the result contains the number twice.
    """
    by_product = (target // first,) if target % first == 0 else ()
    return tuple(number for number in (*by_product, target - first) if 1 <= number <= 10)


def pair_probabilities(target: int = 12) -> dict[tuple[int, int], Fraction]:
    """Return the exact probability with which EZPoints deals each ordered pair of ranks."""
    first_cards = [first for first in range(2, 14) if find_partner_numbers(target, min(first, 10))]
    dealt: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for first in first_cards:
        choices = find_partner_numbers(target, min(first, 10))
        for second in choices:
            for ranks in ((first, second), (second, first)):
                dealt[ranks] += Fraction(1, 2 * len(first_cards) * len(choices))
    return dict(dealt)


def hand_probabilities(*, faces_are_ten: bool = True) -> dict[tuple[int, ...], Fraction]:
    """Return the exact probability of each Points24 hand.

    The keys are hands, each written as its four numbers in ascending order.
    """
    ways = Counter(min(rank, 10) if faces_are_ten else rank for rank in range(1, 14))
    hands = {}
    for numbers in combinations_with_replacement(sorted(ways), 4):
        orders = factorial(4) // prod(map(factorial, Counter(numbers).values()))
        hands[numbers] = Fraction(orders * prod(ways[number] for number in numbers), 13**4)
    return hands
