"""GiGPO's credit, algo.turn_credit=gigpo: numbers by hand, plain loops over random groups, and what is left where no state is
shared."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.advantages import group_std
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout
from tests.support.rollout_factory import compute_turn_advantages, make_rollout, set_kl_logprobs

PLAIN = {"turn_credit": "gigpo", "gamma": 0.5}


def close(expected: list[list[float] | None]) -> list[object]:
    return [each if each is None else pytest.approx(each, abs=1e-12) for each in expected]


def step() -> list[Rollout]:
    """Group 3, at a discount of 1/2. The first walks a b a and earns -1 0 1, returns -0.75 0.5 1. The second walks a c and earns 0 2,
    returns 1 2. The third starts in a, earns 3 and an outcome of 1, return 4; the fourth failed.

    Rewards 0 2 4: episodes -2 0 2, deviation 2. State a: -0.75 1 1 4, mean 1.3125. b and c were seen once.
    Group 8 has names of states in common with group 3 and nothing else: rewards 10 and 0.
    """
    return [
        make_rollout(3, outcome_reward=0.0, reward_deltas=(-1.0, 0.0, 1.0), states=("a", "b", "a")),
        make_rollout(8, outcome_reward=10.0, reward_deltas=(0.0,), states=("a",)),
        make_rollout(3, outcome_reward=0.0, reward_deltas=(0.0, 2.0), states=("a", "c")),
        make_rollout(3, outcome_reward=1.0, reward_deltas=(3.0,), states=("a",)),
        make_rollout(3, reward_deltas=(9.0, 9.0), states=("a", "a")),
        make_rollout(8, outcome_reward=0.0, reward_deltas=(0.0, 0.0), states=("c", "")),
    ]


A = (-0.75 - 1.3125, 1 - 1.3125, 1 - 1.3125, 4 - 1.3125)


def test_a_turn_is_compared_with_all_that_began_where_it_did() -> None:
    expected = [[-2 + A[0], -2, -2 + A[1]], [5], [A[2], 0], [2 + A[3]], None, [-5, -5]]
    assert compute_turn_advantages(step(), **PLAIN) == close(expected)
    halved = [[-2 + A[0] / 2, -2, -2 + A[1] / 2], [5], [A[2] / 2, 0], [2 + A[3] / 2], None, [-5, -5]]
    assert compute_turn_advantages(step(), gigpo_step_weight=0.5, **PLAIN) == close(halved)


def test_each_part_has_its_own_deviation() -> None:
    """The paper's F_norm = std: of the three episodes 2, of the four turns in state a sqrt(sum of squares / 3), each with std_eps."""
    scale = math.sqrt(sum(value * value for value in A) / 3) + 0.25
    a = [value / scale for value in A]
    episodes = [-2 / 2.25, 0.0, 2 / 2.25]
    other = 5 / (math.sqrt(50) + 0.25)
    expected = [[episodes[0] + a[0], episodes[0], episodes[0] + a[1]], [other], [a[2], 0], [episodes[2] + a[3]], None, [-other, -other]]
    assert compute_turn_advantages(step(), norm_adv_by_std=True, std_eps=0.25, **PLAIN) == close(expected)


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_where_no_state_is_shared_it_is_grpo_bit_for_bit(norm_adv_by_std: bool) -> None:
    """The paper's rule for a state that one turn alone began in: it is its own mean. A turn without a state is compared with no other."""
    alone = step()
    for number, rollout in enumerate(alone):
        for place, turn in enumerate(rollout.turns):
            turn.state = f"{number} {place}" if number % 2 else ""
    plain = compute_turn_advantages(step(), "broadcast", norm_adv_by_std=norm_adv_by_std)
    assert compute_turn_advantages(alone, norm_adv_by_std=norm_adv_by_std, **PLAIN) == plain
    assert compute_turn_advantages(step(), gigpo_step_weight=0.0, norm_adv_by_std=norm_adv_by_std, **PLAIN) == plain


def test_episodes_that_earn_the_same_still_teach_by_their_turns() -> None:
    """Both earn 1 in all; from state b on the first earned 2 of it and the second 1. A selection of groups must not call that idle."""
    rollouts = [
        make_rollout(0, outcome_reward=0.0, reward_deltas=(-1.0, 2.0), states=("a", "b")),
        make_rollout(0, outcome_reward=0.0, reward_deltas=(0.0, 1.0), states=("c", "b")),
    ]
    assert compute_turn_advantages(rollouts, "gigpo") == [[0.0, 0.5], [0.0, -0.5]]
    assert group_std(rollouts, AlgoSettings(turn_credit="gigpo")) == {0: pytest.approx(math.sqrt(0.5 / 4))}
    assert group_std(rollouts, AlgoSettings()) == {0: 0.0}


def test_a_kl_in_the_reward_is_of_the_outcome() -> None:
    """Outcomes 1 less 0.5 * (2 + 4) and 1 less 0.5 * 2, -2 and 0: returns of the first turns at discount 1/2 -1 and 0."""
    rollouts = [
        set_kl_logprobs(make_rollout(0, outcome_reward=1.0, reward_deltas=(0.0, 0.0), states=("a", "b")), 2.0, 4.0),
        set_kl_logprobs(make_rollout(0, outcome_reward=1.0, reward_deltas=(0.0,), states=("a",)), 2.0),
    ]
    assert compute_turn_advantages(rollouts, kl_coef=0.5, use_kl_in_reward=True, **PLAIN) == [[-1.0 - 0.5, -1.0], [1.0 + 0.5]]


TURN = st.tuples(st.floats(-3, 3), st.sampled_from(["", "a", "b", "c"]))
STEP = st.lists(st.tuples(st.integers(0, 2), st.none() | st.floats(-2, 2), st.lists(TURN, min_size=1, max_size=5)), max_size=10)


def by_plain_loops(rollouts: list[Rollout], index: int, number: int, *, omega: float, discount: float, by_std: bool) -> float:
    """One turn's credit: every step of the group is looked at for it, twice."""

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
    rollouts = [
        make_rollout(group, outcome_reward=outcome, reward_deltas=[gain for gain, _ in turns], states=[state for _, state in turns])
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
