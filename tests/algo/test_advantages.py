"""Episode advantages against values computed by hand, textbook loops in plain floats, and
permutations of the rollouts.

Turn advantages are tested in test_credit_turns.py.
"""

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.algo.advantages import group_std
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout, Status, TokenSequence
from tests.support.rollout_factory import collect_token_advantages, collect_turn_advantages, make_rollout, set_kl_logprobs

PEERS = ["grpo", "rloo", "opo"]
"""One algorithm per method of comparing an episode with its group."""
WITHOUT_CRITIC = [name for name, row in ALGORITHMS.items() if not row.needs_critic and name != "distill"]
"""Algorithms with a critic are tested in test_gae.py."""


def credit(rollouts: Sequence[Rollout], name: str, **given: float | bool | str) -> list[float | None]:
    """Return the advantage of each rollout, which all its tokens must share; None if no advantage
    was set."""
    algo = AlgoSettings(name=name, **given)
    ALGORITHMS[name].advantage_fn(rollouts, algo)
    return [None if not any(context.advantages for context in each.sequences) else one(collect_token_advantages(each)) for each in rollouts]


def one(values: Sequence[float]) -> float:
    (value,) = set(values)
    return value


def of_group(rewards: Sequence[float], name: str = "grpo", *, lengths: Sequence[int] = (), **given: float | bool) -> list[float]:
    """Return the advantages of a group with these rewards, in a step with a second group."""
    group = [make_rollout(4, reward, lengths=(length,)) for reward, length in zip(rewards, lengths or [3] * len(rewards), strict=True)]
    return credit([make_rollout(9, 10.0), *group, make_rollout(9, 20.0, lengths=(5,))], name, **given)[1:-1]


def test_dr_grpo_subtracts_the_mean() -> None:
    """Without norm_adv_by_std (Dr. GRPO), the advantage is the reward minus the group mean."""
    # mean(1, 0, 2, 5) = 8 / 4 = 2
    assert of_group([1.0, 0.0, 2.0, 5.0], norm_adv_by_std=False) == [-1.0, -2.0, 0.0, 3.0]


def test_grpo_divides_by_the_sample_deviation() -> None:
    """GRPO divides by the sample standard deviation (G - 1) plus std_eps."""
    # Deviations -1 -2 0 3, squares 1 4 0 9, sum 14, divided by G - 1 = 3, root 2.160246899469287.
    std = math.sqrt(14 / 3)
    expected = [-1 / (std + 0.5), -2 / (std + 0.5), 0.0, 3 / (std + 0.5)]
    assert of_group([1.0, 0.0, 2.0, 5.0], std_eps=0.5) == pytest.approx(expected, abs=1e-15)
    # Two rewards a, b: mean (a + b) / 2, standard deviation |a - b| / sqrt(2), so the advantages
    # are +- 1 / sqrt(2).
    assert of_group([3.0, 7.0], std_eps=0.0) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-15)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    """RLOO subtracts the mean reward of the other rollouts of the group."""
    # Rewards 1 0 0 0: 1 - 0, and 0 - (1 + 0 + 0) / 3 for the others.
    # Rewards 1 2 6: 1 - 4, 2 - 3.5, 6 - 1.5.
    assert of_group([1.0, 0.0, 0.0, 0.0], "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], abs=1e-15)
    assert of_group([1.0, 2.0, 6.0], "rloo") == pytest.approx([-3.0, -1.5, 4.5], abs=1e-15)


def test_opo_weights_the_baseline_by_length() -> None:
    """OPO's baseline is the mean reward weighted by response length."""
    # 4 of 4 + 2 + 1 + 1 = 8 tokens have reward 1: baseline 1/2.
    # Lengths 1, 3 and rewards 4, 8: baseline (4 + 24) / 4 = 7.
    assert of_group([1.0, 0.0, 0.0, 0.0], "opo", lengths=[4, 2, 1, 1]) == [0.5, -0.5, -0.5, -0.5]
    assert of_group([4.0, 8.0], "opo", lengths=[1, 3]) == [-3.0, 1.0]


def test_reinforce_pp_whitens_over_the_tokens_of_the_step() -> None:
    """REINFORCE++ whitens returns over all tokens of the step.

    Returns are 1 1 | -1 | -1 -1 over two groups: mean -0.2, squares 2 * 1.44 + 3 * 0.64 = 4.8,
    variance 4.8 / 4 = 1.2.
    """
    rollouts = [make_rollout(0, 1.0, lengths=(2,)), make_rollout(0, -1.0), make_rollout(1, -1.0, lengths=(2,))]
    scale = math.sqrt(1.2 + 1e-8)
    assert credit(rollouts, "reinforce_pp") == pytest.approx([1.2 / scale, -0.8 / scale, -0.8 / scale], abs=1e-15)


def test_reinforce_pp_takes_the_kl_off_each_tokens_own_reward() -> None:
    """REINFORCE++ subtracts each token's KL penalty from the reward of that token.

    The first rollout has reward 1 on the last of three tokens in two sequences, with penalties 0.5
    * (2, 4, -2) = 1, 2, -1. The second has reward -2 and penalty 0.5 * 2.

    The returns from each token on are 1 - 1 - 2 + 1 = -1, 1 - 2 + 1 = 0, 1 + 1 = 2 and -2 - 1 = -3.
    Their mean is -1/2, the deviations are -0.5 0.5 2.5 -2.5, the squares sum to 13, and the
    variance is 13 / 3.
    """
    first = set_kl_logprobs(make_rollout(0, 1.0, lengths=(2, 1), turn_sequences=(0, 1), reward_deltas=(0.0, 0.0)), 2.0, 4.0, -2.0)
    second = set_kl_logprobs(make_rollout(1, -2.0), 2.0)
    algo = AlgoSettings(name="reinforce_pp", kl_coef=0.5, use_kl_in_reward=True)
    ALGORITHMS["reinforce_pp"].advantage_fn([first, second], algo)
    scale = math.sqrt(13 / 3 + 1e-8)
    assert collect_token_advantages(first) == pytest.approx([-0.5 / scale, 0.5 / scale, 2.5 / scale], abs=1e-15)
    assert collect_token_advantages(second) == pytest.approx([-2.5 / scale], abs=1e-15)


@pytest.mark.parametrize(
    ("name", "expected"),
    # 1 - 0.5 * (2 + 4 - 2) = -1 and 2 - 0.5 * -6 = 5. The mean weighted by the lengths
    # 3 and 1 is (-3 + 5) / 4 = 0.5.
    [("grpo", (-3.0, 3.0)), ("rloo", (-6.0, 6.0)), ("opo", (-1.5, 4.5))],
)
def test_the_kl_in_the_reward_comes_off_before_episodes_are_compared(name: str, expected: tuple[float, float]) -> None:
    """With use_kl_in_reward, the KL penalty is subtracted from the rewards before they are
    compared. A KL term of the loss does not change advantages."""

    def step() -> list[Rollout]:
        first = set_kl_logprobs(make_rollout(0, 1.0, lengths=(2, 1), turn_sequences=(0, 1), reward_deltas=(0.0, 0.0)), 2.0, 4.0, -2.0)
        return [
            first,
            set_kl_logprobs(make_rollout(1, 3.0), 9.0),
            set_kl_logprobs(make_rollout(0, 2.0), -6.0),
            set_kl_logprobs(make_rollout(1, 3.0), 9.0),
        ]

    kl = {"kl_coef": 0.5, "norm_adv_by_std": False}
    assert credit(step(), name, use_kl_in_reward=True, **kl) == [expected[0], 0.0, expected[1], 0.0]
    plain = credit(step(), name, **kl)
    assert plain[0] < 0 < plain[2] and plain != [expected[0], 0.0, expected[1], 0.0], "a KL term of the loss is no business of credit"


@pytest.mark.known_failure("observation-ends-return")
def test_reinforce_pp_follows_the_turns_of_alternating_sequences() -> None:
    """The KL costs of later turns reduce the return of a token, and those of earlier turns do not,
    although turn 2 is in the same sequence as turn 0."""
    rollout = make_rollout(0, 1.0, lengths=(1, 1, 1), turn_sequences=(0, 1, 0))
    for context, references in zip(rollout.sequences, ([-1.2, -1.8], [-1.4]), strict=True):  # the old logprobs are -1
        left = iter(references)
        context.old_logprobs = list(context.rollout_logprobs)
        context.reference_logprobs = [next(left) if sampled else 0.0 for sampled in context.loss_mask]
    ALGORITHMS["reinforce_pp"].advantage_fn([rollout], AlgoSettings(name="reinforce_pp", kl_coef=0.5, use_kl_in_reward=True))
    found = [rollout.sequences[turn.sequence].advantages[turn.token_span[0]] for turn in rollout.turns]
    returns = [1 - 0.1 - 0.2 - 0.4, 1 - 0.2 - 0.4, 1 - 0.4]
    mean, scale = statistics.fmean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    assert found == pytest.approx([(value - mean) / scale for value in returns], abs=1e-12)


@pytest.mark.parametrize(("name", "expected"), [("grpo", -3.0), ("rloo", -6.0), ("opo", -3.0), ("reinforce_pp", None)])
def test_what_is_not_trained_on_has_no_kl_to_take_off(name: str, expected: float | None) -> None:
    """A dropped rollout, whose tokens have no reference logprobs, counts in the group mean with its
    plain reward. The trained rollout has 1 - 0.5 * 4 = -1 and is compared with 5: -1 - 2, or -1 - 5
    if the mean excludes the rollout itself."""
    read, bare = set_kl_logprobs(make_rollout(0, 1.0), 4.0), make_rollout(0, 5.0)
    bare.filter_reason = "stop_reason"
    read.sequences.append(TokenSequence(token_ids=[1, 2], loss_mask=[0, 0], rollout_logprobs=[0.0, 0.0], weight_versions=[-1, -1]))
    credits = credit([read, bare], name, kl_coef=0.5, use_kl_in_reward=True, norm_adv_by_std=False)
    assert credits == ([expected, -expected] if expected else [0.0, 0.0])


@pytest.mark.known_failure("group-of-one")
@pytest.mark.parametrize("name", WITHOUT_CRITIC)
@pytest.mark.parametrize("norm_adv_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[3.0], [0.1, 0.1, 0.1], [-2.0] * 7, [0.7] * 11])
def test_equal_rewards_give_exact_zeros(name: str, rewards: list[float], norm_adv_by_std: bool) -> None:
    """Equal rewards give advantages of exactly 0, for every algorithm without a critic and with
    std_eps = 0."""
    others = rewards if name == "reinforce_pp" else [0.0, 1.0]
    beside = [make_rollout(1, reward, lengths=(1 + index % 3,)) for index, reward in enumerate(others)]
    rollouts = [make_rollout(0, reward, lengths=(1 + index % 3,)) for index, reward in enumerate(rewards)]
    credits = credit([*beside, *rollouts], name, norm_adv_by_std=norm_adv_by_std, std_eps=0.0)
    assert credits[len(others) :] == [0.0] * len(rewards)
    assert name == "reinforce_pp" or all(credits[: len(others)])


@pytest.mark.parametrize("name", PEERS)
def test_groups_stay_apart_and_what_was_not_scored_counts_nowhere(name: str) -> None:
    """Each group is compared only with itself, and rollouts without a reward have no advantage and
    no effect on others."""
    pairs = [(4, 1.0), (9, 2.0), (4, None), (7, 5.0), (4, 3.0), (7, None), (9, 2.0), (8, None)]
    # Group 4: scored rewards 1 and 3, mean 2; the failed member is not counted. Group 9: 2 and 2.
    # Group 7: one scored rollout. Group 8: none.
    scale = 2.0 if name == "rloo" else 1.0
    expected = [-scale, 0.0, None, 0.0, scale, None, 0.0, None]
    assert credit([make_rollout(group, reward) for group, reward in pairs], name, norm_adv_by_std=False) == expected


def test_what_is_dropped_has_credit_and_counts_but_not_in_the_whitening() -> None:
    """A dropped rollout has an advantage and counts in its group mean, but REINFORCE++ leaves it
    out of the whitening."""

    def step() -> list[Rollout]:
        rollouts = [make_rollout(0, reward) for reward in (1.0, 0.0, 5.0)] + [make_rollout(1, 2.0), make_rollout(1, 4.0)]
        rollouts[2].filter_reason = "stop_reason"
        return rollouts

    assert credit(step(), "grpo", norm_adv_by_std=False) == [-1.0, -2.0, 3.0, -1.0, 1.0]
    # 1, 0, 2, 4: mean 7/4, squares (9 + 49 + 1 + 81) / 16 = 35/4, variance 35/12
    expected = [value / math.sqrt(35 / 12 + 1e-8) for value in (-0.75, -1.75, 0.25, 2.25)]
    assert credit(step(), "reinforce_pp") == pytest.approx([*expected[:2], 0.0, *expected[2:]], abs=1e-15)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_truncated_rollouts_are_scored(name: str) -> None:
    """A truncated rollout has an advantage like a completed one."""
    rollouts = [make_rollout(0, 0.0), make_rollout(0, 4.0)]
    rollouts[1].status = Status.TRUNCATED
    low, high = credit(rollouts, name)
    assert low == -high < 0


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_credit_of_nothing(name: str) -> None:
    """A step without scored rollouts has no advantages and no group standard deviations."""
    assert credit([], name) == [] and credit([make_rollout(0)], name) == [None]
    assert group_std([], AlgoSettings(name=name)) == group_std([make_rollout(0)], AlgoSettings(name=name)) == {}


STEPS = st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.floats(-10, 10)), st.integers(1, 4), st.booleans()), max_size=30)


def textbook(name: str, peers: list[tuple[float, int]], reward: float, *, norm_adv_by_std: bool) -> float:
    """Compute the advantage of a reward in a group of (reward, length) pairs with plain loops."""
    rewards = [peer for peer, _ in peers]
    mean = sum(rewards) / len(rewards)
    if name == "rloo":
        return (reward - mean) * len(peers) / (len(peers) - 1) if len(peers) > 1 else 0.0
    if name == "opo":
        return reward - sum(n * r for r, n in peers) / sum(n for _, n in peers)
    squares = sum((peer - mean) ** 2 for peer in rewards)
    std = math.sqrt(squares / (len(peers) - 1)) if len(peers) > 1 else 0.0
    return (reward - mean) / (std + 1e-4 if norm_adv_by_std else 1.0)


@pytest.mark.parametrize("name", [*PEERS, "reinforce_pp"])
@settings(deadline=None, max_examples=40)
@given(STEPS, st.booleans(), st.randoms(use_true_random=False))
@example([(0, 0.0, 1, False), (0, 1e-12, 1, False)], True, random.Random(0))
def test_credit_is_the_textbook_loop_and_depends_on_no_order(
    name: str, step: list[tuple[int, float | None, int, bool]], norm_adv_by_std: bool, shuffler: random.Random
) -> None:
    """Advantages equal a textbook loop on random steps, and permuting the rollouts changes no bit.

    A step lists group, reward (None if failed), length, and whether the rollout is dropped. Rewards
    that differ by at most 1e-12 count as equal, and are divided by at least 1e-4.
    """
    rollouts = []
    for group, reward, length, dropped in step:
        rollouts.append(make_rollout(group, reward, lengths=(length,)))
        rollouts[-1].filter_reason = "stop_reason" if dropped else ""
    options = {"norm_adv_by_std": norm_adv_by_std, "std_eps": 1e-4}
    credits = credit(rollouts, name, **options)
    tokens = [reward for _, reward, length, dropped in step if reward is not None and not dropped for _ in range(length)]
    for (group, reward, _, dropped), value in zip(step, credits, strict=True):
        peers = [(other, length) for other_group, other, length, _ in step if other_group == group and other is not None]
        if reward is None:
            assert value is None
        elif name != "reinforce_pp":
            assert value == pytest.approx(textbook(name, peers, reward, norm_adv_by_std=norm_adv_by_std), rel=1e-9, abs=1e-8)
        elif dropped:
            assert value == 0.0
        else:
            scale = math.sqrt((statistics.variance(tokens) if len(tokens) > 1 else 0.0) + 1e-8)
            assert value == pytest.approx((reward - sum(tokens) / len(tokens)) / scale, rel=1e-9, abs=1e-8)
    order = list(range(len(rollouts)))
    shuffler.shuffle(order)
    assert credit([rollouts[index] for index in order], name, **options) == [credits[index] for index in order]  # bit for bit


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.booleans(), st.sampled_from([1e-6, 1e-4, 1.0]))
def test_grpo_agrees_with_numpy_and_sums_to_zero(rewards: list[float], norm_adv_by_std: bool, std_eps: float) -> None:
    """GRPO's advantages equal numpy's mean and standard deviation on random rewards, and sum to
    zero."""
    advantages = of_group(rewards, norm_adv_by_std=norm_adv_by_std, std_eps=std_eps)
    centered = np.array(rewards) - np.mean(rewards)
    expected = centered / (np.std(rewards, ddof=1) + std_eps) if norm_adv_by_std else centered
    # The error of numpy's mean is up to about G eps |r|, divided by std_eps here.
    slack = 1e-12 / (std_eps if norm_adv_by_std else 1.0)
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=slack)
    assert abs(math.fsum(advantages)) <= 16 * slack


def test_a_turn_has_its_credit_in_its_own_context() -> None:
    """Each turn's advantage is stored in the sequence and span of that turn.

    Three turns lie in two sequences, out of order; the two episodes have the advantages -1 and 1.
    """
    there_and_back = make_rollout(0, 0.0, lengths=(2, 1, 3), turn_sequences=(1, 0, 1), reward_deltas=(0.0,) * 3)
    credit([there_and_back, make_rollout(0, 2.0)], "grpo", norm_adv_by_std=False)
    assert [context.advantages for context in there_and_back.sequences] == [[0, -1, 0], [0, -1, -1, 0, 0, -1, -1, -1, 0]]
    assert collect_turn_advantages(there_and_back) == [-1.0] * 3
