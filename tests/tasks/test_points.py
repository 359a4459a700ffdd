"""Tests EZPoints and Points24: rules by hand, the solvers against every possible formula, and dealt
hands against their exact probabilities."""

from collections import Counter
from fractions import Fraction
from itertools import permutations, product

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from megatron_rl.tasks.gym_cards.cards import DECK, Card, render_card
from megatron_rl.tasks.gym_cards.expressions import evaluate
from megatron_rl.tasks.gym_cards.points import EZPOINTS, POINTS24, EZPoints, Points24, PointsGame, PointsState, draw_state
from megatron_rl.tasks.gym_cards.solvers import find_pair_solution, find_solution, hand_probabilities, pair_probabilities


def played(game: PointsGame, cards: str, tokens: str) -> list[tuple[float, bool, bool]]:
    """Return (reward, terminated, truncated) of every token."""
    game.reset(options={"cards": cards.split()})
    return [game.step(game.rules.tokens.index(token))[1:4] for token in tokens.split()]


def pays(*rewards: int, truncated: bool = False) -> list[tuple[int, bool, bool]]:
    """Return the expected results of an episode that does not end before its last token."""
    *before, last = rewards
    return [*((reward, False, False) for reward in before), (last, not truncated, truncated)]


@pytest.mark.parametrize(
    ("cards", "tokens", "expected"),
    [
        ("2H KS", "2 + 10 =", pays(0, 0, 0, 10)),
        ("3H 4S", "4 * 3 =", pays(0, 0, 0, 10)),
        ("6H 6H", "6 + 6 =", pays(0, 0, 0, 10)),
        ("6H 6H", "6 * =", pays(0, 0, -1)),
        ("2H 10S", "10 + 2 * =", pays(0, 0, 0, 0, -1)),
        ("2H 10S", "=", pays(-1)),
        ("2H 10S", "3 2 + 10 =", pays(-1, 0, 0, 0, 10)),  # a blank before a formula changes nothing
        ("2H 10S", "2 2 + 10 =", pays(0, -1, 0, 0, 10)),
        ("AH 2S", "1 2 =", pays(0, 0, -1)),  # 12 by concatenation
        ("2H 10S", "+ + + + + + =", pays(0, 0, 0, 0, 0, 0, -1, truncated=True)),
        ("2H 10S", "2 + 10 + + + 3", pays(0, 0, 0, 0, 0, 0, -1, truncated=True)),
    ],
)
def test_ez_points_by_hand(cards: str, tokens: str, expected: list[tuple[int, bool, bool]]) -> None:
    assert played(EZPoints(), cards, tokens) == expected


@pytest.mark.parametrize(
    ("cards", "tokens", "strict", "legacy"),
    [
        ("2H 4S AD AC", "2 4 * 1 * 1 =", -1, 10),
        ("2H 3S 3D AC", "( 2 + 1 ) * * 3 - 3 =", -1, 10),
        ("5H 2S QD 2C", "( 5 / / 2 ) * 10 + 2 =", -1, -1),
        ("9H 2S 6D AC", "9 / / 2 * 6 * 1 =", -1, 10),
        ("6H AS AD 4C", "6 * 4 * 1 * 1 =", 10, 10),
        ("6H AS AD 4C", "6 * 4 =", -1, -1),
        ("KH KS 8D 4C", "( 10 * 10 - 4 ) / 8 =", -1, -1),
        ("KH QS 8D 4C", "10 - 10 + 4 * 8 =", -1, -1),
    ],
)
def test_points24_by_hand(cards: str, tokens: str, strict: int, legacy: int) -> None:
    length = len(tokens.split())
    assert played(Points24(), cards, tokens) == pays(*[0] * (length - 1), strict)
    assert played(Points24(legacy_rules=True), cards, tokens) == pays(*[0] * (length - 1), legacy)


def test_truncation_comes_at_action_7_and_22() -> None:
    assert played(EZPoints(), "2H KS", "+ " * 7) == pays(*[0] * 6, -1, truncated=True)
    assert played(Points24(), "2H KS 3D AC", "( " * 22) == pays(*[0] * 21, -1, truncated=True)
    assert (EZPOINTS.max_steps, POINTS24.max_steps) == (7, 22)


@pytest.mark.parametrize("name", ["EZPoints", "Points24"])
def test_gymnasium_accepts_the_registered_environment(name: str) -> None:
    env = gymnasium.make(f"gym_cards/{name}-v0", render_mode="rgb_array")
    check_env(env.unwrapped)
    assert env.spec.max_episode_steps == 300
    one, two = (gymnasium.make(f"gym_cards/{name}-v0").unwrapped for _ in range(2))
    hands = []
    for seed in range(30):
        (seen, info), (again, same) = one.reset(seed=seed), two.reset(seed=seed)
        assert info == same and np.array_equal(seen, again)
        hands.append(tuple(info["Cards"]))
    assert len(set(hands)) > 20
    unseeded = [tuple(one.reset()[1]["Cards"]) for _ in range(30)]
    assert len(set(unseeded)) > 20


def test_ez_points_deals_as_the_rules_say_exactly() -> None:
    """The probabilities of dealt pairs equal a recomputation that lists the draws: first rank, coin
    toss, order."""
    expected: Counter[tuple[int, int]] = Counter()
    for first, toss, swap in product(range(2, 14), (0, 1), (0, 1)):
        number = min(first, 10)
        second = 12 // number if 12 % number == 0 and toss else 12 - number
        expected[(second, first) if swap else (first, second)] += Fraction(1, 48)
    assert pair_probabilities() == dict(expected) and len(expected) == 19
    assert {tuple(sorted(min(rank, 10) for rank in ranks)) for ranks in expected} == {
        (2, 6),
        (2, 10),
        (3, 4),
        (3, 9),
        (4, 8),
        (5, 7),
        (6, 6),
    }
    assert all(find_pair_solution((min(one, 10), min(two, 10))) for one, two in expected)
    env, counts = EZPoints(), Counter()
    env.np_random = np.random.default_rng(5)
    for _ in range(12_000):
        counts[tuple(card.rank for card in env.deal_hand())] += 1
    chi_square = sum((counts[ranks] - 12_000 * float(share)) ** 2 / (12_000 * float(share)) for ranks, share in expected.items())
    assert counts.keys() == expected.keys() and chi_square < 42.3, "the 99.9% quantile of chi-square with 18 degrees of freedom"


def makes_24(hands: np.ndarray, target: int) -> np.ndarray:
    """Return for each hand whether it has a formula: all orders, all signs, and the five ways to
    place parentheses, in float64."""
    signs = [np.add, np.subtract, np.multiply, np.divide]
    found = np.zeros(len(hands), bool)
    for order in permutations(range(4)):
        a, b, c, d = (hands[:, place].astype(float) for place in order)
        for one, two, three in product(signs, repeat=3):
            worths = (three(two(one(a, b), c), d), three(one(a, two(b, c)), d), two(one(a, b), three(c, d)),
                      one(a, three(two(b, c), d)), one(a, two(b, three(c, d))))  # fmt: skip
            found |= np.any([np.abs(worth - target) < 1e-6 for worth in worths], axis=0)
    return found


@pytest.mark.parametrize("target", [24, 36])
def test_points24_is_solved_wherever_a_formula_exists(target: int) -> None:
    """The solver finds a formula exactly for the hands for which brute force finds one, and the
    formula makes the target with the numbers of the hand."""
    hands = hand_probabilities()
    numbers = np.array(list(hands))
    with np.errstate(all="ignore"):
        exists = makes_24(numbers, target)
    for hand, has_one in zip(hands, exists.tolist(), strict=True):
        tokens = find_solution(hand, target)
        assert (tokens is not None) == has_one, hand
        if tokens:
            assert evaluate(tokens) == target and sorted(int(token) for token in tokens if token.isdigit()) == list(hand)
            assert len(tokens) + 1 <= POINTS24.max_formula_tokens
    assert len(hands) == 715 and sum(hands.values()) == 1
    if target == 24:
        assert float(sum(share for hand, share in hands.items() if find_solution(hand))) == pytest.approx(0.731, abs=5e-4), "3.6: measured"


def test_solvable_deals_are_the_solvable_ones_of_all_deals() -> None:
    """With `solvable`, the dealt hands are the solvable ones of an unrestricted deal with the same
    seed."""
    every, solvable = Points24(), Points24(solvable=True)
    every.np_random, solvable.np_random = np.random.default_rng(3), np.random.default_rng(3)
    dealt = [every.deal_hand() for _ in range(300)]
    kept = [cards for cards in dealt if find_solution(tuple(card.value for card in cards))]
    assert 180 < len(kept) < 255
    assert [solvable.deal_hand() for _ in kept] == kept


def test_eleven_to_thirteen_count_so_where_faces_are_their_rank() -> None:
    """With faces="rank", face cards count 11 to 13."""
    game = Points24(faces="rank")
    assert game.reset(options={"cards": ["JS", "KD", "AS", "AD"]})[1]["Numbers"] == [11, 13, 1, 1]
    assert played(game, "JS KD AS AD", "( 11 + 13 ) * 1 * 1 =")[-1] == (10, True, False)
    with pytest.raises(ValueError, match="^target=97: "):
        EZPoints(target=97)


@pytest.mark.parametrize("options", [{"cards": ["2H"]}, {"cards": ["2H", "1S"]}, {"cards": "2H"}, {"hand": []}, {"cards": [2, 3]}])
def test_impossible_hands_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="^(options|card)="):
        EZPoints().reset(options=options)


@pytest.mark.parametrize("art", ["large", "classic", "night"])
@pytest.mark.parametrize("width", [135, 70, 67, 49, 32])
def test_all_52_cards_are_read_at_the_nanos_size(art: str, width: int) -> None:
    """All cards are distinguishable at the size at which the nano model receives them, 140 pixels
    for an image of 300. With noise of a tenth of white, the nearest card is always the right one.
    """
    small = []
    for card in DECK:
        drawn = render_card(card, width=width, height=width * 7 // 5, art=art)
        small.append(np.array(drawn.resize((width * 140 // 300, width * 7 // 5 * 140 // 300), 3), float).ravel() / 255)
        assert Card.from_name(str(card)) == card
    clean, noise = np.array(small), np.random.default_rng(0)
    for _ in range(5):
        noisy = clean + noise.normal(0, 0.1, clean.shape)
        assert ((clean**2).sum(1) - 2 * noisy @ clean.T).argmin(1).tolist() == list(range(52))


def test_the_picture_shows_cards_and_formula() -> None:
    hand = tuple(map(Card.from_name, ("2H", "KS")))
    bare, written = (np.array(draw_state(EZPOINTS, PointsState(hand, formula))) for formula in ((), ("2", "+", "10")))
    rows = np.nonzero((bare != written).any(axis=(1, 2)))[0]
    assert rows.min() >= 258 and rows.max() < 290, "only the line of the formula changed"
    longest = ("10", "+", "10", "*", "10", "*", "10", "-", *"(((())))-----")
    full = np.array(draw_state(POINTS24, PointsState(hand * 2, longest)))
    assert (full[:, 299] == full[0, 0]).all(), "the longest formula stays inside"
    colors = bare.reshape(-1, 3)
    assert (bare[0, 0] == (0x35, 0x65, 0x4D)).all() and (colors == 255).all(axis=1).sum() > 15_000
    assert np.array_equal(np.array(render_card(hand[0], width=135, height=189)), bare[55:244, 5:140])
