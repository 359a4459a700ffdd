"""Prompts and replies of EZPoints and Points24, and the formulas that demonstrators write."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_rl.tasks.gym_cards.cards import Card
from megatron_rl.tasks.gym_cards.points import CardStyle, PointsRules, PointsState
from megatron_rl.tasks.gym_cards.solvers import find_pair_solution, find_solution

SIGN_MISTAKES = {"+": "*", "*": "+", "-": "+", "/": "*"}


def write_prompt(rules: PointsRules, state: PointsState) -> str:
    """Return the prompt for a state: rules, current formula and allowed tokens."""
    name, faces = ("EZPoints", "10") if rules.num_cards == 2 else ("Points24", "10" if rules.faces_are_ten else "11, 12 and 13")
    return (
        f"{name}: write a formula that makes {rules.target} and uses each card once; J, Q and K count {faces}. "
        f'Current formula: "{state.formula_text}". Append one of {" ".join(rules.tokens)}, of which = is the end. '
        'Answer with one JSON object: {"cards": list of text, "current formula": text, "thoughts": text, "action": text}'
    )


def solve_hand(rules: PointsRules, cards: Sequence[Card]) -> tuple[str, ...] | None:
    """Return the tokens of a solution, including "=", or None if the hand has no solution."""
    numbers: Any = tuple(map(rules.card_number, cards))
    found = (find_pair_solution if rules.num_cards == 2 else find_solution)(numbers, rules.target)
    return found and (*found, "=")


class FormulaPlan(NamedTuple):
    """Formula for a hand, including "=". The first `num_written` tokens are already written."""

    rules: PointsRules
    cards: tuple[Card, ...]
    tokens: tuple[str, ...]
    num_written: int
    search: str = ""
    """Text of the search that found the formula; empty if the demonstrator does not search."""
    style: CardStyle = ("large", 1.0)

    @property
    def state(self) -> PointsState:
        """State of the game after the first `num_written` tokens."""
        return PointsState(self.cards, self.tokens[: self.num_written])


def write_reply(plan: FormulaPlan) -> str:
    """Return a correct response. Its action is the next token of the planned formula."""
    symbols = [card.symbol for card in plan.cards]
    thoughts = f"{plan.search} {''.join(plan.tokens)}{plan.rules.target}".lstrip()
    action = plan.tokens[plan.num_written]
    return json.dumps({"cards": symbols, "current formula": plan.state.formula_text, "thoughts": thoughts, "action": action})


def corrupt_formula(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the formula with its first operator replaced by a wrong operator.

    Example: the formula `3 + 9 =` becomes `3 * 9 =`. A corrupted formula for two cards never equals
    the target.
    """
    place = next(place for place, token in enumerate(tokens) if token in SIGN_MISTAKES)
    return (*tokens[:place], SIGN_MISTAKES[tokens[place]], *tokens[place + 1 :])
