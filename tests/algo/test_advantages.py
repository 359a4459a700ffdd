"""Credit against hand numbers, numpy's textbook loop, and the order of the rollouts."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.advantages import credit, credit_report, group_advantages
from megatron_rl.types import Rollout, Status


def rollout(group: int, reward: float | None, sample: int = 0) -> Rollout:
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Rollout(task="t", example_id=f"e{group}", group=group, sample=sample, weight_version=0, status=status, reward=reward)


def test_dr_grpo_subtracts_the_mean():
    # mean(1, 0, 2, 5) = 8 / 4 = 2
    assert group_advantages([1.0, 0.0, 2.0, 5.0], normalize_std=False, std_eps=1e-6) == [-1.0, -2.0, 0.0, 3.0]


def test_grpo_divides_by_the_sample_deviation():
    # deviations -1 -2 0 3, squares 1 4 0 9, sum 14, divided by G - 1 = 3, root = 2.160246899469287
    std = math.sqrt(14 / 3)
    expected = [-1 / (std + 0.5), -2 / (std + 0.5), 0.0, 3 / (std + 0.5)]
    assert group_advantages([1.0, 0.0, 2.0, 5.0], normalize_std=True, std_eps=0.5) == pytest.approx(expected, abs=1e-15)
    # two rewards a, b: mean (a + b) / 2, deviation |a - b| / sqrt(2), so the advantages are +- 1 / sqrt(2)
    assert group_advantages([3.0, 7.0], normalize_std=True, std_eps=0.0) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-15)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [-2.0] * 7])
def test_equal_rewards_give_exact_zeros(rewards: list[float], normalize_std: bool):
    assert group_advantages(rewards, normalize_std=normalize_std, std_eps=0.0) == [0.0] * len(rewards)


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.booleans(), st.sampled_from([1e-6, 1e-4, 1.0]))
def test_agrees_with_numpy_and_sums_to_zero(rewards: list[float], normalize_std: bool, std_eps: float):
    advantages = group_advantages(rewards, normalize_std=normalize_std, std_eps=std_eps)
    centered = np.array(rewards) - np.mean(rewards)
    expected = centered / (np.std(rewards, ddof=1) + std_eps) if normalize_std else centered
    # numpy's mean is off by up to about G eps |r|, which the smallest std_eps magnifies
    slack = 1e-12 / (std_eps if normalize_std else 1.0)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=slack)
    assert abs(math.fsum(advantages)) <= 16 * slack


def test_credit_keeps_groups_apart_and_leaves_out_what_was_not_scored():
    pairs = [(4, 1.0), (9, 2.0), (4, None), (7, 5.0), (4, 3.0), (7, None), (9, 2.0), (8, None)]
    rollouts = [rollout(group, reward) for group, reward in pairs]
    # group 4: scored 1 and 3, mean 2, the failed member counts nowhere. Group 9: 2 and 2. Group 7: one scored. Group 8: none.
    advantages = credit(rollouts, normalize_std=False, std_eps=0.0)
    assert advantages == [-1.0, 0.0, None, None, 1.0, None, 0.0, None]
    report = credit_report(rollouts, advantages)
    assert (report.num_credited, report.num_failed, report.num_dropped) == (4, 3, 1)
    assert (report.num_groups, report.num_degenerate_groups, report.degenerate_fraction) == (2, 1, 0.5)


def test_truncated_rollouts_are_scored():
    rollouts = [rollout(0, 0.0), rollout(0, 4.0)]
    rollouts[1].status = Status.TRUNCATED
    assert credit(rollouts, normalize_std=False, std_eps=0.0) == [-2.0, 2.0]


def test_credit_of_nothing():
    assert credit([], normalize_std=True, std_eps=1e-6) == []
    assert credit_report([], []).degenerate_fraction == 0.0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.floats(-10, 10))), max_size=30),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_credit_is_the_textbook_loop_and_depends_on_no_order(
    pairs: list[tuple[int, float | None]], normalize_std: bool, shuffler: random.Random
):
    rollouts = [rollout(group, reward) for group, reward in pairs]
    advantages = credit(rollouts, normalize_std=normalize_std, std_eps=1e-4)
    for (group, reward), advantage in zip(pairs, advantages, strict=True):
        peers = [other for other_group, other in pairs if other_group == group and other is not None]
        if reward is None or len(peers) < 2:
            assert advantage is None
        else:
            expected = (reward - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-4 if normalize_std else 1.0)
            assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)
    order = list(range(len(rollouts)))
    shuffler.shuffle(order)
    shuffled = credit([rollouts[index] for index in order], normalize_std=normalize_std, std_eps=1e-4)
    assert shuffled == [advantages[index] for index in order]  # bit for bit


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float):
    with pytest.raises(ValueError, match="finite"):
        credit([rollout(0, 1.0), rollout(0, reward)], normalize_std=True, std_eps=1e-6)
