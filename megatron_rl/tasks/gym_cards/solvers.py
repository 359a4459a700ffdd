"""The solvers of EZPoints and Points24: every hand, by trying everything there is to write, in whole numbers."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, combinations_with_replacement
from math import factorial, prod

_Subexpression = tuple[int, int, str, "_Subexpression | None", "_Subexpression | None"]
"""Of a formula: its worth above / below, the number or the operator that is written, and the two parts that the operator joins."""
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def _write_tokens(part: _Subexpression, least: int = 0) -> tuple[str, ...]:
    """In parentheses where its operator binds less tightly."""
    _, _, symbol, left, right = part
    if left is None or right is None:
        return (symbol,)
    binds = PRECEDENCE[symbol]
    tokens = (*_write_tokens(left, binds), symbol, *_write_tokens(right, binds + (symbol in "-/")))
    return tokens if binds >= least else ("(", *tokens, ")")


def _combine(one: _Subexpression, two: _Subexpression) -> Iterator[_Subexpression]:
    """Everything that can be made of two parts, in both orders where these differ."""
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
    """The tokens of a formula of all these numbers, each used once, that makes the target; None where there is none.

    Of + - * / and parentheses. The same whatever the order of the numbers. Example: 3 3 8 8 gives 8 / ( 3 - 8 / 3 ).
    """
    return _solution(tuple(sorted(numbers)), target)


def find_pair_solution(numbers: tuple[int, int], target: int = 12) -> tuple[str, ...] | None:
    """The same for EZPoints: two numbers in the order of the cards, + or *."""
    one, two = numbers
    sign = "+" if one + two == target else "*" if one * two == target else ""
    return (str(one), sign, str(two)) if sign else None


def find_partner_numbers(target: int, first: int) -> tuple[int, ...]:
    """The numbers of 1..10 that make the target with the first, by * if that is possible, and by +. Of two ways both count."""
    by_product = (target // first,) if target % first == 0 else ()
    return tuple(number for number in (*by_product, target - first) if 1 <= number <= 10)


def pair_probabilities(target: int = 12) -> dict[tuple[int, int], Fraction]:
    """How often EZPoints deals each two ranks in their order, exactly."""
    first_cards = [first for first in range(2, 14) if find_partner_numbers(target, min(first, 10))]
    dealt: Counter[tuple[int, int]] = Counter()
    for first in first_cards:
        choices = find_partner_numbers(target, min(first, 10))
        for second in choices:
            for ranks in ((first, second), (second, first)):
                dealt[ranks] += Fraction(1, 2 * len(first_cards) * len(choices))
    return dict(dealt)


def hand_probabilities(*, faces_are_ten: bool = True) -> dict[tuple[int, ...], Fraction]:
    """Every four numbers of Points24, in rising order, with their exact share of the deals."""
    ways = Counter(min(rank, 10) if faces_are_ten else rank for rank in range(1, 14))
    hands = {}
    for numbers in combinations_with_replacement(sorted(ways), 4):
        orders = factorial(4) // prod(map(factorial, Counter(numbers).values()))
        hands[numbers] = Fraction(orders * prod(ways[number] for number in numbers), 13**4)
    return hands
