"""Tests the game NumberLine: rules against a hand-written table, seeds, start states, images, and
the exact success of a policy."""

import itertools
from collections import Counter
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from PIL import ImageFont

from megatron_rl.tasks.gym_cards.number_line import (
    FONT_FILE,
    STATES,
    NumberLine,
    apply_action,
    compute_policy_success,
    deal_start,
    draw_state,
    optimal_action,
    start_probabilities,
)

# REWARDS[sign][target][current], written by hand from the rules: "x" pays 1 and ends the episode,
# "." pays 0, "!" pays -1.
# Two squares pay although nothing moves: the target is at the wall, and the player stays there.
REWARDS = {
    "-": ["xx....", "!!x...", "!!!x..", "!!!!x.", "!!!!!x", "!!!!!!"],
    "+": ["!!!!!!", "x!!!!!", ".x!!!!", "..x!!!", "...x!!", "....xx"],
}
AFTER = {"-": [0, 0, 1, 2, 3, 4], "+": [1, 2, 3, 4, 5, 5]}
PAYS = {"x": 1, ".": 0, "!": -1}
PAIRS = list(itertools.product(range(6), range(6)))


@pytest.mark.parametrize("sign", ["-", "+"])
def test_all_36_states_move_and_pay_as_the_table_says(sign: str) -> None:
    for current, target in PAIRS:
        expected = (AFTER[sign][current], target), PAYS[REWARDS[sign][target][current]]
        assert apply_action((current, target), "-+".index(sign)) == expected, (current, target)


@pytest.mark.parametrize("sign", ["-", "+"])
def test_environment_plays_the_table(sign: str) -> None:
    env = NumberLine()
    for current, target in STATES:
        env.reset(options={"current": current, "target": target})
        observed, reward, terminated, truncated, info = env.step("-+".index(sign))
        mark = REWARDS[sign][target][current]
        assert (reward, terminated, truncated) == (PAYS[mark], mark == "x", False), (current, target)
        assert info == {"Current": AFTER[sign][current], "Target": target}
        assert np.array_equal(observed, np.array(draw_state((AFTER[sign][current], target))))


def test_gymnasium_accepts_the_registered_environment() -> None:
    env = gymnasium.make("gym_cards/NumberLine-v0", render_mode="rgb_array")
    check_env(env.unwrapped)
    observed, _ = env.reset(seed=3)
    assert observed.shape == (300, 300, 3) and observed.dtype == np.uint8
    assert np.array_equal(env.render(), observed)


def test_an_episode_costs_no_arrays_that_nobody_asked_for() -> None:
    """The observation space, whose bounds are 270,000 numbers, is built only on access. An
    observation belongs to its caller, and changing it has no effect on later ones."""
    env = NumberLine()
    observed, _ = env.reset(options={"current": 1, "target": 3})
    env.step(1)
    assert "observation_space" not in vars(env) and env.observation_space.contains(observed)
    observed[:] = 7
    again, _ = NumberLine().reset(options={"current": 1, "target": 3})
    assert np.array_equal(again, np.array(draw_state((1, 3)))) and not np.array_equal(again, observed)


def test_a_seed_repeats_and_seeds_differ() -> None:
    one, two = NumberLine(), NumberLine()
    starts = []
    for seed in range(40):
        (seen, info), (again, same) = one.reset(seed=seed), two.reset(seed=seed)
        assert info == same and np.array_equal(seen, again)
        starts.append((info["Current"], info["Target"]))
    assert len(set(starts)) > 15
    one.reset(seed=7)
    two.reset(seed=7)
    unseeded = [(one.reset()[1], two.reset()[1]) for _ in range(40)]
    assert all(info == same for info, same in unseeded)
    assert len({tuple(info.values()) for info, _ in unseeded}) > 15, "the generator stands still without a seed"


def test_truncated_after_exactly_ten_steps_and_not_at_the_goal() -> None:
    env = NumberLine()
    env.reset(options={"current": 0, "target": 5})
    ends = [env.step(action)[2:4] for action in [0, 1] * 5]
    assert ends == [(False, False)] * 9 + [(False, True)]
    env.reset(options={"current": 1, "target": 0})
    ends = [env.step(action)[2:4] for action in [1, 0] * 4 + [1, 1]]
    assert ends[-1] == (False, True)
    env.reset(options={"current": 2, "target": 0})
    ends = [env.step(action)[2:4] for action in [1, 0] * 4 + [0, 0]]
    assert ends == [(False, False)] * 9 + [(True, False)], "the goal in the tenth step is the goal"


@pytest.mark.parametrize(
    "options",
    [{"current": 1}, {"current": 2, "target": 2}, {"current": 6, "target": 1}, {"current": "1", "target": 2}, {"current": 1, "goal": 2}],
)
def test_impossible_starts_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="^options="):
        NumberLine().reset(options=options)


def test_unknown_actions_are_refused() -> None:
    env = NumberLine()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="^action=2: "):
        env.step(2)


def test_dealing_probabilities_by_hand() -> None:
    doubled = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (5, 1)}
    assert start_probabilities() == {state: Fraction(2 if state in doubled else 1, 36) for state in STATES}
    assert sum(start_probabilities().values()) == 1 and len(STATES) == 30
    assert [deal_start(number, number)[1] for number in range(6)] == [1, 2, 3, 4, 0, 1]


def test_50000_seeded_resets_are_dealt_as_stated() -> None:
    """The start states of 50,000 seeds have the stated probabilities, by a chi-square test at
    99.9%."""
    env = NumberLine()
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(50_000):
        info = env.reset(seed=seed)[1]
        counts[info["Current"], info["Target"]] += 1
    assert counts.keys() == set(STATES)
    expected = {state: 50_000 * float(probability) for state, probability in start_probabilities().items()}
    chi_square = sum((counts[state] - expected[state]) ** 2 / expected[state] for state in STATES)
    assert chi_square < 58.3, "the 99.9% quantile of chi-square with 29 degrees of freedom"


def test_the_30_pictures_differ_and_hold_their_text_inside() -> None:
    assert FONT_FILE.is_file() and (FONT_FILE.parent / "LICENSE_DEJAVU.txt").is_file()
    arrays = {state: np.array(draw_state(state)) for state in STATES}
    assert len({array.tobytes() for array in arrays.values()}) == 30
    for array in arrays.values():
        rows, columns = np.nonzero((array < 128).all(axis=2))
        upper, lower = rows[rows < 150], rows[rows >= 150]
        assert 60 <= upper.min() < upper.max() < 120 and 180 <= lower.min() < lower.max() < 240
        assert columns.min() >= 30 and columns.max() < 290
        assert (array[..., 0] == array[..., 1]).all() and (array[..., 1] == array[..., 2]).all()


def test_each_line_changes_with_its_own_number_only() -> None:
    """Changing the target changes only the upper half of the image, changing the current number
    only the lower half."""
    base = np.array(draw_state((2, 4)))
    other_target, other_current = np.array(draw_state((2, 5))), np.array(draw_state((3, 4)))
    assert (base != other_target)[:150].any() and not (base != other_target)[150:].any()
    assert (base != other_current)[150:].any() and not (base != other_current)[:150].any()


def test_text_is_drawn_where_the_fonts_own_measure_puts_it() -> None:
    """The drawn text fills the box that the font's own measure states."""
    font = ImageFont.truetype(FONT_FILE, 36, layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = font.getbbox("Target: 4")
    array = np.array(draw_state((2, 4)))[:150, :, 0]
    rows, columns = np.nonzero(array < 255)
    assert (columns.min(), rows.min()) == (30 + left, 60 + top)
    assert rows.max() + 1 == 60 + bottom
    assert 30 + right - 3 <= columns.max() + 1 <= 30 + right, "the measure ends with the last digit's advance, a little right of its ink"


def exhaustive_success(probability_right: dict[tuple[int, int], Fraction]) -> Fraction:
    """Play every sequence of ten actions from every pair of draws, and return the probability of
    success. The plain loop uses none of the game's code."""
    total = Fraction(0)
    for current, drawn in PAIRS:
        target = drawn if drawn != current else (drawn + 1) % 5
        for actions in itertools.product((-1, 1), repeat=10):
            place, gained, chance = current, 0, Fraction(1, 36)
            for number, action in enumerate(actions):  # noqa: B007 (read after the loop)
                right = (action > 0) == (target > place)
                chance *= probability_right[place, target] if right else 1 - probability_right[place, target]
                before, place = abs(target - place), max(0, min(5, place + action))
                gained += 1 if place == target else -1 if abs(target - place) >= before else 0
                if place == target:
                    break
            if all(action > 0 for action in actions[number + 1 :]):  # sequences that differ only after the goal count once
                total += chance * (gained > 0)
    return total


def as_table(probability_right: dict[tuple[int, int], Fraction]) -> dict[tuple[int, int], tuple[float, float]]:
    table = {}
    for state, right in probability_right.items():
        up = right if state[1] > state[0] else 1 - right
        table[state] = (float(1 - up), float(up))
    return table


def test_success_of_random_and_perfect_play() -> None:
    """Random play succeeds with probability 163/576, by exhaustive enumeration; perfect play
    always, and inverted play never."""
    random_play = {state: Fraction(1, 2) for state in STATES}
    assert exhaustive_success(random_play) == Fraction(163, 576)
    assert compute_policy_success(as_table(random_play)) == pytest.approx(0.2830, abs=5e-5)
    assert compute_policy_success(as_table(random_play)) == pytest.approx(163 / 576, abs=1e-12)
    assert compute_policy_success(as_table({state: Fraction(1) for state in STATES})) == pytest.approx(1, abs=1e-12)
    assert compute_policy_success(as_table({state: Fraction(0) for state in STATES})) == 0


def test_success_of_uneven_play_equals_exhaustive_enumeration() -> None:
    uneven = {(current, target): Fraction(1 + (7 * current + 3 * target) % 8, 9) for current, target in STATES}
    assert compute_policy_success(as_table(uneven)) == pytest.approx(float(exhaustive_success(uneven)), abs=1e-12)


def test_success_counts_invalid_replies_and_few_turns_as_losses() -> None:
    """Invalid responses and too few turns lower the success to the hand-computed value."""
    half_invalid = {state: (0.0, 0.5) if optimal_action(state) else (0.5, 0.0) for state in STATES}
    assert compute_policy_success(half_invalid) == pytest.approx(163 / 576, abs=1e-12)
    perfect = as_table({state: Fraction(1) for state in STATES})
    assert compute_policy_success(perfect, max_turns=1) == pytest.approx(14 / 36, abs=1e-12), "the starts next to their target"
