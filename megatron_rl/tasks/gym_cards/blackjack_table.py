"""Exact evaluation and optimization of Blackjack policies by dynamic programming.

A position is a tuple (points, is_soft, up). `points` are the player's points, `is_soft` is True if
an ace counts as 11, and `up` is the value of the dealer's visible card. All cards are drawn with
replacement: each value from 1 to 9 has probability 1/13, and the value 10 has probability 4/13.
"""

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

Position = tuple[int, bool, int]
CARD_PROBABILITIES = {value: (4 if value == 10 else 1) / 13 for value in range(1, 11)}
DEALER_NATURAL = 22
"""Point total that represents a dealer's natural (21 points with two cards)."""


class ExpectedOutcome(NamedTuple):
    """Probabilities of a win and of a draw, and the expected reward."""

    wins: float
    draws: float
    reward: float


LOSS = ExpectedOutcome(0.0, 0.0, -1.0)


def add_card(points: int, is_soft: bool, value: int) -> tuple[int, bool]:
    """Return the points after one more card, and True if an ace then counts as 11.

    Example: `add_card(17, True, 10)` returns (17, False).
    """
    hard = points - 10 * is_soft + value
    soft = (is_soft or value == 1) and hard <= 11
    return hard + 10 * soft, soft


POSITIONS: tuple[Position, ...] = tuple(
    (points, is_soft, up) for points, is_soft, up in product(range(4, 22), (False, True), CARD_PROBABILITIES) if points >= 12 or not is_soft
)
"""All 280 positions in which the player has a choice. Hands with fewer than 12 points are never
soft, because an ace that counts as 11 is worth at least 12 points together with any other card.
"""


@cache
def dealer_distribution(points: int, is_soft: bool, is_dealt: bool = False) -> dict[int, float]:
    """Return the probability of each final point total of the dealer.

    A total of 0 represents a bust.

    Args:
        points: Current points of the dealer.
        is_soft: True if an ace counts as 11.
        is_dealt: True if the dealer has only the visible card, in which case 21 points with the
            next card are a natural.
    """
    ends: dict[int, float] = {}
    for value, chance in CARD_PROBABILITIES.items():
        after, soft = add_card(points, is_soft, value)
        end = (
            {0: 1.0}
            if after > 21
            else {DEALER_NATURAL if is_dealt and after == 21 else after: 1.0}
            if after >= 17
            else dealer_distribution(after, soft)
        )
        for final, share in end.items():
            ends[final] = ends.get(final, 0.0) + chance * share
    return ends


@cache
def stand_outcome(points: int, up: int, *, is_natural: bool = False, natural: bool = False, sab: bool = False) -> ExpectedOutcome:
    """Return the expected outcome if the player stands with `points` and the dealer shows `up`."""
    wins = draws = 0.0
    for final, share in dealer_distribution(*add_card(0, False, up), is_dealt=True).items():
        dealer = min(final, 21)
        beats = points > dealer or (sab and is_natural and final != DEALER_NATURAL)
        wins += share * beats
        draws += share * (not beats and points == dealer)
    bonus = 1.5 if natural and not sab and is_natural else 1.0
    return ExpectedOutcome(wins, draws, bonus * wins - (1 - wins - draws))


def evaluate_policy(
    hit_probabilities: Mapping[Position, float],
    *,
    natural: bool = False,
    sab: bool = False,
    forfeit_probabilities: Mapping[Position, float] | None = None,
) -> ExpectedOutcome:
    """Return the expected outcome of a policy over complete games.

    Args:
        hit_probabilities: Probability of hitting in each position.
        natural: Rule of the same name in `BlackjackOptions`.
        sab: Rule of the same name in `BlackjackOptions`.
        forfeit_probabilities: Probability of forfeiting the game in each position; None means 0 in
            all positions. The player stands with the remaining probability.
    """

    @cache
    def worth(points: int, is_soft: bool, up: int, is_natural: bool = False) -> ExpectedOutcome:
        if points > 21:
            return LOSS
        stood, hits = stand_outcome(points, up, is_natural=is_natural, natural=natural, sab=sab), hit_probabilities[points, is_soft, up]
        gone = forfeit_probabilities[points, is_soft, up] if forfeit_probabilities else 0.0
        after = [(hits * chance, worth(*add_card(points, is_soft, value), up)) for value, chance in CARD_PROBABILITIES.items() if hits]
        return mix_outcomes([(1 - hits - gone, stood), (gone, LOSS), *after])

    return mix_outcomes([(chance, worth(points, is_soft, up, is_natural)) for chance, points, is_soft, up, is_natural in _initial_deals()])


def best_policy(*, criterion: str = "reward") -> dict[Position, int]:
    """Return the optimal action in every position: 0 to stand, 1 to hit.

    `criterion` names the field of ExpectedOutcome to maximize, which is `reward` or `wins`. If both
    actions are equally good, the player stands. The best policy never hits a natural, so the
    options `natural` and `sab` do not change the result.
    """

    @cache
    def choices(points: int, is_soft: bool, up: int) -> tuple[ExpectedOutcome, ExpectedOutcome]:
        """Return the outcome of standing, and the outcome of hitting and then acting optimally."""
        after = [(chance, add_card(points, is_soft, value)) for value, chance in CARD_PROBABILITIES.items()]
        hit = mix_outcomes([(chance, LOSS if then[0] > 21 else max(choices(*then, up), key=of)) for chance, then in after])
        return stand_outcome(points, up), hit

    def of(worth: ExpectedOutcome) -> float:
        return worth.wins if criterion == "wins" else worth.reward

    return {position: int(of(choices(*position)[1]) > of(choices(*position)[0])) for position in POSITIONS}


def mix_outcomes(weighted_outcomes: list[tuple[float, ExpectedOutcome]]) -> ExpectedOutcome:
    """Return the weighted sum of the outcomes in (weight, outcome) pairs."""
    return ExpectedOutcome(*(sum(share * worth[place] for share, worth in weighted_outcomes) for place in range(3)))


def _initial_deals() -> list[tuple[float, int, bool, int, bool]]:
    """Return each possible initial deal with its probability.

    Each entry is a tuple (probability, points, is_soft, up, is_natural). The position is
    (points, is_soft, up), and is_natural is True if the player has a natural.
    """
    return [
        (
            CARD_PROBABILITIES[one] * CARD_PROBABILITIES[two] * CARD_PROBABILITIES[up],
            *add_card(*add_card(0, False, one), two),
            up,
            {one, two} == {1, 10},
        )
        for one, two, up in product(CARD_PROBABILITIES, repeat=3)
    ]
