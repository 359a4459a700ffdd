"""What Blackjack is worth, exactly: any table's shares of wins and draws and its mean return, and the best table, by dynamic programming.

A position is (sum, whether an ace counts 11, value of the dealer's card up). All cards are drawn with replacement: 1 to 9 with probability
1/13 each, ten-valued ones with 4/13.
"""

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

Position = tuple[int, bool, int]
CARD_PROBABILITIES = {value: (4 if value == 10 else 1) / 13 for value in range(1, 11)}
DEALER_NATURAL = 22
"""Stands for a dealer's 21 of two cards."""


class ExpectedOutcome(NamedTuple):
    """What is to be expected."""

    wins: float
    draws: float
    reward: float


LOSS = ExpectedOutcome(0.0, 0.0, -1.0)


def add_card(points: int, is_soft: bool, value: int) -> tuple[int, bool]:
    """The sum with one more card. Example: (17, True) and 10 is (17, False)."""
    hard = points - 10 * is_soft + value
    soft = (is_soft or value == 1) and hard <= 11
    return hard + 10 * soft, soft


POSITIONS: tuple[Position, ...] = tuple(
    (points, is_soft, up) for points, is_soft, up in product(range(4, 22), (False, True), CARD_PROBABILITIES) if points >= 12 or not is_soft
)
"""All 280 in which there is something to decide; sums below 12 hold no ace, or it would count 11."""


@cache
def dealer_distribution(points: int, is_soft: bool, is_dealt: bool = False) -> dict[int, float]:
    """The dealer's final sum, 0 for a bust, from these points on. is_dealt: they are the card up, and with the next one 21 is a natural."""
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
    """Of a whole game as dealt, by a player who hits in each position with the probability that the table says, gives the game up with that
    of `forfeit_probabilities` (nowhere, without it), and stands otherwise."""

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
    """The action that leaves the most to be expected in every position: of `reward`, or of `wins`; equal ones stand.

    Two cards that are a natural are never hit, so all rules of Blackjack share their tables.
    """

    @cache
    def choices(points: int, is_soft: bool, up: int) -> tuple[ExpectedOutcome, ExpectedOutcome]:
        """Of standing, and of hitting and then playing best."""
        after = [(chance, add_card(points, is_soft, value)) for value, chance in CARD_PROBABILITIES.items()]
        hit = mix_outcomes([(chance, LOSS if then[0] > 21 else max(choices(*then, up), key=of)) for chance, then in after])
        return stand_outcome(points, up), hit

    def of(worth: ExpectedOutcome) -> float:
        return worth.wins if criterion == "wins" else worth.reward

    return {position: int(of(choices(*position)[1]) > of(choices(*position)[0])) for position in POSITIONS}


def mix_outcomes(weighted_outcomes: list[tuple[float, ExpectedOutcome]]) -> ExpectedOutcome:
    return ExpectedOutcome(*(sum(share * worth[place] for share, worth in weighted_outcomes) for place in range(3)))


def _initial_deals() -> list[tuple[float, int, bool, int, bool]]:
    """(probability, the player's sum, whether an ace counts 11, the card up, whether it is a natural)."""
    return [
        (
            CARD_PROBABILITIES[one] * CARD_PROBABILITIES[two] * CARD_PROBABILITIES[up],
            *add_card(*add_card(0, False, one), two),
            up,
            {one, two} == {1, 10},
        )
        for one, two, up in product(CARD_PROBABILITIES, repeat=3)
    ]
