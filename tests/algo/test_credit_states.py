"""GiGPO's advantages (algo.turn_credit=gigpo) against values computed by hand and plain loops over
random groups.

If no two turns share a state, the advantages must equal GRPO's.
"""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.advantages import group_std
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout
from tests.support.rollout_factory import compute_turn_advantages, make_rollout, set_kl_logprobs, set_states

PLAIN = {"turn_credit": "gigpo", "gamma": 0.5}


def close(expected: list[list[float] | None]) -> list[object]:
    return [each if each is None else pytest.approx(each, abs=1e-12) for each in expected]


def step() -> list[Rollout]:
    """Return a training step with group 3 (three scored rollouts, one failed) and group 8 (two
    scored rollouts).

    Group 3, at discount 1/2: rollout 1 visits states a b a with rewards -1 0 1, so its returns are
    -0.75 0.5 1. Rollout 2 visits a c with rewards 0 2, so its returns are 1 2. Rollout 3 visits a
    with reward 3 and outcome 1, so its return is 4. Rollout 4 failed.

    Episode rewards are 0 2 4: advantages -2 0 2, standard deviation 2. Returns in state a are -0.75
    1 1 4, mean 1.3125. States b and c occur once each.

    Group 8 shares only state names with group 3. Its rewards are 10 and 0.
    """
    return [
        set_states(make_rollout(3, outcome_reward=0.0, reward_deltas=(-1.0, 0.0, 1.0)), "a", "b", "a"),
        set_states(make_rollout(8, outcome_reward=10.0, reward_deltas=(0.0,)), "a"),
        set_states(make_rollout(3, outcome_reward=0.0, reward_deltas=(0.0, 2.0)), "a", "c"),
        set_states(make_rollout(3, outcome_reward=1.0, reward_deltas=(3.0,)), "a"),
        set_states(make_rollout(3, reward_deltas=(9.0, 9.0)), "a", "a"),
        set_states(make_rollout(8, outcome_reward=0.0, reward_deltas=(0.0, 0.0)), "c", ""),
    ]


A = (-0.75 - 1.3125, 1 - 1.3125, 1 - 1.3125, 4 - 1.3125)


def test_a_turn_is_compared_with_all_that_began_where_it_did() -> None:
    """A turn's advantage is that of its episode plus that of its return among all turns of the
    group in the same state. gigpo_step_weight scales the second summand."""
    expected = [[-2 + A[0], -2, -2 + A[1]], [5], [A[2], 0], [2 + A[3]], None, [-5, -5]]
    assert compute_turn_advantages(step(), **PLAIN) == close(expected)
    halved = [[-2 + A[0] / 2, -2, -2 + A[1] / 2], [5], [A[2] / 2, 0], [2 + A[3] / 2], None, [-5, -5]]
    assert compute_turn_advantages(step(), gigpo_step_weight=0.5, **PLAIN) == close(halved)


def test_each_part_has_its_own_deviation() -> None:
    """Episode and state advantages are each divided by their own standard deviation plus std_eps
    (the paper's F_norm = std). The deviation is 2 over the three episodes and sqrt(sum of squares /
    3) over the four turns in state a."""
    scale = math.sqrt(sum(value * value for value in A) / 3) + 0.25
    a = [value / scale for value in A]
    episodes = [-2 / 2.25, 0.0, 2 / 2.25]
    other = 5 / (math.sqrt(50) + 0.25)
    expected = [[episodes[0] + a[0], episodes[0], episodes[0] + a[1]], [other], [a[2], 0], [episodes[2] + a[3]], None, [-other, -other]]
    assert compute_turn_advantages(step(), norm_adv_by_std=True, std_eps=0.25, **PLAIN) == close(expected)


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_where_no_state_is_shared_it_is_grpo_bit_for_bit(norm_adv_by_std: bool) -> None:
    """If no two turns share a state, or the step weight is 0, the advantages equal GRPO's bit for
    bit. By the paper's rule, a state with one turn is its own mean. A turn without a state is
    compared with no other turn."""
    alone = step()
    for number, rollout in enumerate(alone):
        for place, turn in enumerate(rollout.turns):
            turn.state = f"{number} {place}" if number % 2 else ""
    plain = compute_turn_advantages(step(), "broadcast", norm_adv_by_std=norm_adv_by_std)
    assert compute_turn_advantages(alone, norm_adv_by_std=norm_adv_by_std, **PLAIN) == plain
    assert compute_turn_advantages(step(), gigpo_step_weight=0.0, norm_adv_by_std=norm_adv_by_std, **PLAIN) == plain


def test_episodes_that_earn_the_same_still_teach_by_their_turns() -> None:
    """A group of two episodes with equal rewards has a nonzero `group_std` if turns in a shared
    state differ. Both episodes earn 1 in total; from state b on, the first earns 2 and the second
    1."""
    rollouts = [
        set_states(make_rollout(0, outcome_reward=0.0, reward_deltas=(-1.0, 2.0)), "a", "b"),
        set_states(make_rollout(0, outcome_reward=0.0, reward_deltas=(0.0, 1.0)), "c", "b"),
    ]
    assert compute_turn_advantages(rollouts, "gigpo") == [[0.0, 0.5], [0.0, -0.5]]
    assert group_std(rollouts, AlgoSettings(turn_credit="gigpo")) == {0: pytest.approx(math.sqrt(0.5 / 4))}
    assert group_std(rollouts, AlgoSettings()) == {0: 0.0}


def test_a_kl_in_the_reward_is_of_the_outcome() -> None:
    """A KL penalty in the reward is subtracted from the outcome.

    The outcomes are 1 - 0.5 * (2 + 4) = -2 and 1 - 0.5 * 2 = 0. At discount 1/2 the returns of the
    first turns are -1 and 0.
    """
    rollouts = [
        set_kl_logprobs(set_states(make_rollout(0, outcome_reward=1.0, reward_deltas=(0.0, 0.0)), "a", "b"), 2.0, 4.0),
        set_kl_logprobs(set_states(make_rollout(0, outcome_reward=1.0, reward_deltas=(0.0,)), "a"), 2.0),
    ]
    assert compute_turn_advantages(rollouts, kl_coef=0.5, use_kl_in_reward=True, **PLAIN) == [[-1.0 - 0.5, -1.0], [1.0 + 0.5]]


REWARD = st.integers(-3000, 3000).map(lambda number: number / 1000)
"""Rewards that differ by more than rounding, or not at all: differences of 1e-9 count as none."""
TURN = st.tuples(REWARD, st.sampled_from(["", "a", "b", "c"]))
STEP = st.lists(st.tuples(st.integers(0, 2), st.none() | REWARD, st.lists(TURN, min_size=1, max_size=5)), max_size=10)


def by_plain_loops(rollouts: list[Rollout], index: int, number: int, *, omega: float, discount: float, by_std: bool) -> float:
    """Compute one turn's advantage with plain loops over all turns of its group."""

    def return_of(rollout: Rollout, start: int) -> float:
        rewards = [turn.reward_delta for turn in rollout.turns]
        rewards[-1] += rollout.outcome_reward
        return sum(reward * discount**later for later, reward in enumerate(rewards[start:]))

    def relative(own: float, every: list[float]) -> float:
        if len(set(every)) == 1:
            return 0.0
        return (own - statistics.mean(every)) / (statistics.stdev(every) + 1e-2 if by_std else 1.0)

    own, rewards, returns = rollouts[index], [], []
    for rollout in rollouts:
        if rollout.group != own.group or not rollout.is_scored:
            continue
        rewards.append(rollout.reward)
        for place, turn in enumerate(rollout.turns):
            if turn.state and turn.state == own.turns[number].state:
                returns.append(return_of(rollout, place))
    return relative(own.reward, rewards) + (omega * relative(return_of(own, number), returns) if returns else 0.0)


@settings(deadline=None, max_examples=100)
@given(STEP, st.sampled_from([1.0, 0.95, 0.0]), st.sampled_from([0.0, 1.0, 2.5]), st.booleans(), st.randoms(use_true_random=False))
def test_it_is_the_plain_loop_and_depends_on_no_order(
    given_step: list, discount: float, omega: float, by_std: bool, shuffler: random.Random
) -> None:
    """Advantages equal plain loops on random steps, and permuting the rollouts changes no bit."""
    rollouts = [
        set_states(make_rollout(group, outcome_reward=outcome, reward_deltas=[gain for gain, _ in turns]), *(state for _, state in turns))
        for group, outcome, turns in given_step
    ]
    options = {"gamma": discount, "gigpo_step_weight": omega, "norm_adv_by_std": by_std, "std_eps": 1e-2}
    whole = compute_turn_advantages(rollouts, "gigpo", **options)
    for index, rollout in enumerate(rollouts):
        if rollout.is_scored:
            numbers = range(len(rollout.turns))
            expected = [by_plain_loops(rollouts, index, number, omega=omega, discount=discount, by_std=by_std) for number in numbers]
            assert whole[index] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    order = list(range(len(rollouts)))
    shuffler.shuffle(order)
    assert compute_turn_advantages([rollouts[index] for index in order], "gigpo", **options) == [
        whole[index] for index in order
    ]  # bit for bit
