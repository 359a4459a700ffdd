"""Search for a formula, written as text that a policy can learn to write.

A state of the search is a list of numbers in descending order. A move replaces two of them with
their quotient, difference, sum or product, so that a hand of four cards needs three moves. The text
lists first moves in a fixed order, each with the numbers that remain and a verdict: "y" if the
target can be made from them, else "n". It ends with the first move that can be continued and the
moves that continue it:

    10 7 4 2: 10/2=5 7 5 4 n. 4/2=2 10 7 2 y. 7*2=14 14 10. 14+10=24.

All values are integers of at least 0. Source: Stream of Search (arXiv 2404.03683) trains language
models on the text of searches.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import NamedTuple

from megatron_rl.tasks.gym_cards.solvers import PRECEDENCE

OPERATOR_ORDER = "/-+*"
"""Order in which operators are tried.

Of the 24 orders, the one with the fewest moves in the searches of random solvable hands (3.0).
"""


class Move(NamedTuple):
    """Replacement of two numbers, of which `left` is not the smaller one, with `value`."""

    left: int
    operator: str
    right: int
    value: int
    rest: tuple[int, ...]
    """Numbers after the move, in descending order."""


def list_moves(numbers: tuple[int, ...]) -> Iterator[Move]:
    """Yield the moves of a state in the order in which the search tries them.

    Of several moves with the same remaining numbers, only the first is included.
    """
    known = set()
    for operator in OPERATOR_ORDER:
        for first, second in sorted(set(combinations(numbers, 2)), reverse=True):
            value = _apply(first, operator, second)
            if value is None:
                continue
            rest = list(numbers)
            rest.remove(first)
            rest.remove(second)
            rest = tuple(sorted((*rest, value), reverse=True))
            if rest not in known:
                known.add(rest)
                yield Move(first, operator, second, value, rest)


def _apply(left: int, operator: str, right: int) -> int | None:
    if operator == "/":
        return left // right if right and left % right == 0 else None
    return {"-": left - right, "+": left + right, "*": left * right}[operator]


@cache
def can_make(numbers: tuple[int, ...], target: int) -> bool:
    """Return True if the search can make the target from all of the numbers."""
    return numbers == (target,) or any(can_make(move.rest, target) for move in list_moves(numbers))


class _Operand(NamedTuple):
    tokens: tuple[str, ...]
    precedence: int

    def with_parentheses(self, least: int) -> tuple[str, ...]:
        return self.tokens if self.precedence >= least else ("(", *self.tokens, ")")


def write_search(numbers: tuple[int, ...], target: int) -> tuple[str, tuple[str, ...]] | None:
    """Return the text of the search and the tokens of the formula that it finds.

    The result does not depend on the order of `numbers`. It is None if the search cannot make the
    target, for example if every formula needs a fraction.
    """
    state = tuple(sorted(numbers, reverse=True))
    if not can_make(state, target):
        return None
    text = " ".join(map(str, state)) + ":"
    operands = [(number, _Operand((str(number),), 3)) for number in state]
    for move in list_moves(state):
        if can_make(move.rest, target):
            break
        text += f" {_write_move(move)} n."
    text += f" {_write_move(move)} y."
    operands = _join(operands, move)
    while len(move.rest) > 1:
        move = next(move for move in list_moves(move.rest) if can_make(move.rest, target))
        text += f" {_write_move(move)}."
        operands = _join(operands, move)
    return text, operands[0][1].tokens


def _write_move(move: Move) -> str:
    remaining = move.rest if len(move.rest) > 1 else ()
    return " ".join(map(str, (f"{move.left}{move.operator}{move.right}={move.value}", *remaining)))


def _join(operands: list[tuple[int, _Operand]], move: Move) -> list[tuple[int, _Operand]]:
    rest, binds = list(operands), PRECEDENCE[move.operator]
    left, right = (rest.pop([value for value, _ in rest].index(number))[1] for number in (move.left, move.right))
    tokens = (*left.with_parentheses(binds), move.operator, *right.with_parentheses(binds + (move.operator in "-/")))
    return [*rest, (move.value, _Operand(tokens, binds))]
