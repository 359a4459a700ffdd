"""Tests Blackjack: sums and payoffs by hand, and the exact value of a policy against simulated
games of this environment and of gymnasium's own."""

from itertools import product
from math import sqrt

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from megatron_rl.tasks.gym_cards.blackjack import Blackjack, BlackjackState, compute_payoff, draw_state, hand_total, is_natural
from megatron_rl.tasks.gym_cards.blackjack_table import (
    CARD_PROBABILITIES,
    POSITIONS,
    best_policy,
    dealer_distribution,
    evaluate_policy,
    stand_outcome,
)
from megatron_rl.tasks.gym_cards.cards import Card, render_card

BEST = best_policy()


def hand(names: str) -> tuple[Card, ...]:
    return tuple(map(Card.from_name, names.split()))


@pytest.mark.parametrize(
    ("names", "expected", "natural"),
    [
        ("AS 6H", (17, True), False), ("AS 6H KD", (17, False), False), ("AS AH", (12, True), False), ("AS AH 9C", (21, True), False),
        ("KS QH", (20, False), False), ("KS AH", (21, True), True), ("7S 7H 7D", (21, False), False), ("KS QH 2D", (22, False), False),
        ("AS AH AD AC", (14, True), False), ("10S AD", (21, True), True), ("5S 5H AS AD", (12, False), False),
    ],
)  # fmt: skip
def test_sums_by_hand(names: str, expected: tuple[int, bool], natural: bool) -> None:
    assert (hand_total(hand(names)), is_natural(hand(names))) == (expected, natural)


@pytest.mark.parametrize(
    ("player", "dealer", "plain", "with_natural", "sab"),
    [
        ("KS 9H", "KD 8C", 1, 1, 1), ("KS 8H", "KD 8C", 0, 0, 0), ("KS 7H", "KD 8C", -1, -1, -1), ("KS 2H", "KD 6C JS", 1, 1, 1),
        ("AS KH", "KD 8C", 1, 1.5, 1), ("AS KH", "AD KC", 0, 0, 0), ("AS KH", "7D 7C 7H", 0, 0, 1), ("7S 7H 7D", "AD KC", 0, 0, 0),
        ("7S 7H 7D", "9D 8C", 1, 1, 1),
    ],
)  # fmt: skip
def test_payoffs_by_hand(player: str, dealer: str, plain: float, with_natural: float, sab: float) -> None:
    table = BlackjackState(hand(player), hand(dealer), is_over=True)
    assert (compute_payoff(table), compute_payoff(table, natural=True), compute_payoff(table, sab=True)) == (plain, with_natural, sab)
    assert compute_payoff(table, natural=True, sab=True) == sab


def test_gymnasium_accepts_the_registered_environment() -> None:
    for symbolic in (False, True):
        check_env(gymnasium.make("gym_cards/Blackjack-v0", render_mode="rgb_array", symbolic=symbolic).unwrapped)
    one, two = Blackjack(), Blackjack()
    seen = set()
    for seed in range(30):
        assert one.reset(seed=seed)[1] == two.reset(seed=seed)[1]
        while True:
            (picture_one, *rest), (picture_two, *same) = one.step(int(seed % 2)), two.step(int(seed % 2))
            assert np.array_equal(picture_one, picture_two) and rest == same
            if rest[1]:
                break
        seen.add((*rest[-1]["Player"], *rest[-1]["Dealer"]))
    assert len(seen) == 30


def test_a_game_by_hand() -> None:
    game = Blackjack(symbolic=True)
    observed, info = game.reset(seed=1, options={"player": ["AS", "6H"], "dealer": "KD"})
    assert observed == (17, 10, 1) and info == {"Player": ["AS", "6H"], "Dealer": ["KD"]}
    _, reward, over, truncated, info = game.step(0)
    assert over and not truncated and info["Dealer"][0] == "KD" and hand_total(hand(" ".join(info["Dealer"])))[0] >= 17
    assert reward == np.sign(17 - (0 if hand_total(game.state.dealer)[0] > 21 else hand_total(game.state.dealer)[0]))
    game.reset(seed=1, options={"player": ["KS", "QH"], "dealer": "KD"})
    outcomes = []
    while not outcomes or not outcomes[-1][1]:
        outcomes.append(game.step(1)[1:3])
    assert outcomes[-1] == (-1.0, True) and hand_total(game.state.player)[0] > 21
    with pytest.raises(ValueError, match="^options="):
        game.reset(options={"player": ["KS"], "dealer": "KD"})


def test_ten_valued_cards_are_faces_and_all_values_come_as_often_as_they_should() -> None:
    """24,000 dealt cards have the values of CARD_PROBABILITIES, by a chi-square test at 99.9%.
    Cards of value 10 are faces."""
    game, cards = Blackjack(symbolic=True), []
    for seed in range(6000):
        game.reset(seed=seed)
        cards += [*game.state.player, *game.state.dealer]
    counts = {value: sum(card.value == value for card in cards) for value in CARD_PROBABILITIES}
    assert sum((counts[value] - 24_000 * share) ** 2 / (24_000 * share) for value, share in CARD_PROBABILITIES.items()) < 27.9, (
        "99.9%, 9 degrees"
    )
    assert {card.rank for card in cards if card.value == 10} == {11, 12, 13} and {card.suit for card in cards} == {*"SHDC"}


def test_dealers_ends_equal_enumeration() -> None:
    """The distribution of the dealer's result equals an enumeration, on a plain stack, of every
    sequence of cards that a dealer with this card up can draw."""
    for up in CARD_PROBABILITIES:
        ends: dict[int, float] = {}
        runs = [((up,), 1.0)]
        while runs:
            cards, chance = runs.pop()
            points = sum(cards) + 10 * (1 in cards and sum(cards) <= 11)
            if len(cards) > 1 and points >= 17:
                end = 0 if points > 21 else 22 if points == 21 and len(cards) == 2 else points
                ends[end] = ends.get(end, 0.0) + chance
            elif chance > 1e-9:
                runs += [((*cards, value), chance * share) for value, share in CARD_PROBABILITIES.items()]
        points, is_soft = (11, True) if up == 1 else (up, False)
        assert dealer_distribution(points, is_soft, is_dealt=True) == pytest.approx(ends, abs=1e-6)


def test_the_published_figures() -> None:
    """Win rates equal the figures of seed_systems.md 3.6 and of issue 11: those measured on the
    original, and the known ones of the best policies."""
    assert evaluate_policy(BEST).wins == pytest.approx(0.4295, abs=5e-5)
    assert evaluate_policy(best_policy(criterion="wins")).wins == pytest.approx(0.4316, abs=5e-5)
    assert evaluate_policy(dict.fromkeys(POSITIONS, 0)).wins == pytest.approx(0.380, abs=3e-3)
    assert evaluate_policy({position: int(position[0] < 17) for position in POSITIONS}).wins == pytest.approx(0.408, abs=3e-3)
    assert evaluate_policy(dict.fromkeys(POSITIONS, 0.5)).wins == pytest.approx(0.283, abs=4e-3)
    simple = {(points, soft, up): int(points < 12 or (points < 17 and (up >= 7 or up == 1))) for points, soft, up in POSITIONS}
    assert evaluate_policy(simple).wins == pytest.approx(0.426, abs=3e-3)


def test_no_single_change_makes_the_best_table_better() -> None:
    """Changing a single decision of the best policy does not increase its return or, for the
    criterion "wins", its wins. Hard totals of 12 to 16 are played as in every book."""
    for by in ("reward", "wins"):
        table = best_policy(criterion=by)
        most = evaluate_policy(table)._asdict()[by]
        for position in POSITIONS[:: 3 if by == "reward" else 7]:
            assert evaluate_policy({**table, position: 1 - table[position]})._asdict()[by] <= most + 1e-12, position
    for points, up in product(range(13, 17), range(2, 7)):
        assert BEST[points, False, up] == 0
    for points, up in product(range(12, 17), (7, 8, 9, 10, 1)):
        assert BEST[points, False, up] == 1
    assert [BEST[12, False, up] for up in (2, 3, 4, 5, 6)] == [1, 1, 0, 0, 0]
    assert stand_outcome(21, 5, is_natural=True, natural=True).reward > stand_outcome(21, 5).reward


@pytest.mark.parametrize("rules", [{}, {"natural": True}, {"sab": True}], ids=str)
@pytest.mark.parametrize("whose", ["ours", "gymnasium"])
def test_what_a_table_is_worth_is_what_playing_it_earns(rules: dict[str, bool], whose: str) -> None:
    """The shares of wins and draws and the return of 10,000 games are within 3.9 standard errors of
    the exact values: 99.99%."""
    env = Blackjack(symbolic=True, **rules) if whose == "ours" else gymnasium.make("Blackjack-v1", **rules).unwrapped
    rewards = []
    for number in range(10_000):
        (points, up, is_soft), _ = env.reset(seed=None if number else 11)
        is_over = False
        while not is_over:
            (points, up, is_soft), reward, is_over, _, _ = env.step(BEST[int(points), bool(is_soft), int(up)])
        rewards.append(reward)
    worth, num = evaluate_policy(BEST, **rules), len(rewards)
    assert abs(np.mean(np.array(rewards) > 0) - worth.wins) < 3.9 * sqrt(worth.wins * (1 - worth.wins) / num)
    assert abs(np.mean(np.array(rewards) == 0) - worth.draws) < 3.9 * sqrt(worth.draws * (1 - worth.draws) / num)
    assert abs(np.mean(rewards) - worth.reward) < 3.9 * np.std(rewards) / sqrt(num)


@pytest.mark.parametrize("num", [2, 4, 5, 10, 11, 22])
def test_every_card_of_a_hand_is_seen(num: int) -> None:
    """Replacing any of the player's cards changes the image within the area of that card. Replacing
    the dealer's hidden card changes it only at the end."""
    cards = [Card(1, "S")] * num
    shown = np.array(draw_state(BlackjackState(tuple(cards), hand("KD 5S"))))
    width, height = next((width, height) for most, width, height in ((4, 70, 98), (10, 49, 69), (24, 32, 45)) if num <= most)
    for place in range(num):
        other = np.array(draw_state(BlackjackState((*cards[:place], Card(12, "H"), *cards[place + 1 :]), hand("KD 5S"))))
        rows, columns = np.nonzero((shown != other).any(-1))
        assert len(rows) > 100 and rows.min() >= 150 and rows.max() - rows.min() < height and columns.max() - columns.min() < width
        changed = other[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        whole = np.array(render_card(Card(12, "H"), width=width, height=height))
        assert (changed == whole[-1, -1]).all(-1).sum() <= (whole == whole[-1, -1]).all(-1).sum(), "nothing is laid over it"
    assert np.array_equal(shown, np.array(draw_state(BlackjackState(tuple(cards), hand("KD 9H")))))
    assert np.array_equal(np.array(render_card(hand("KD")[0], width=70, height=98)), shown[25:123, 5:75])
    assert not np.array_equal(shown, np.array(draw_state(BlackjackState(tuple(cards), hand("KD 5S"), is_over=True))))
