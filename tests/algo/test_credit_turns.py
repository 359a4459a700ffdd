"""Turn advantages against values computed by hand and textbook loops.

Every step has a second group with different rewards.

Expected policy gradients are tested in test_credit_gradients.py, and GiGPO in
test_credit_states.py.
"""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.advantages import TURN_SCHEMES, group_std
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Rollout
from tests.support.rollout_factory import compute_turn_advantages, make_rollout, set_kl_logprobs


def step() -> list[Rollout]:
    """Return a step in which group 5 has the rewards 1.5, 0.5, 1 and a failed rollout, and group 2
    the rewards 6 and 3."""
    return [
        make_rollout(5, outcome_reward=1.0, step_scores=(0.5, 0.0, 0.0)),
        make_rollout(2, outcome_reward=2.0, step_scores=(3.0, 1.0)),
        make_rollout(5, outcome_reward=0.0, step_scores=(0.5,)),
        make_rollout(5, outcome_reward=1.0, step_scores=(-0.1, 0.1), lengths=(3, 2), turn_sequences=(0, 1)),
        make_rollout(5, step_scores=(9.0, 9.0)),
        make_rollout(2, outcome_reward=0.0, step_scores=(1.0, 2.0)),
    ]


def check(given: Sequence[list[float] | None], expected: Sequence[list[float] | None], *, slack: float = 1e-14) -> None:
    assert [each if each is None else pytest.approx(each, abs=slack) for each in expected] == list(given)


def test_broadcast_gives_every_turn_the_episodes_advantage() -> None:
    """broadcast gives every turn the advantage of its episode."""
    check(compute_turn_advantages(step(), "broadcast"), [[0.5] * 3, [1.5] * 2, [-0.5], [0.0] * 2, None, [-1.5] * 2])


def test_outcome_and_turn_adds_the_turns_own_advantage_to_the_outcomes() -> None:
    """outcome_and_turn adds the advantage of the turn's score to the advantage of the outcome.

    Group 5 has outcomes 1 0 1, mean 2/3. The first turns score 0.5 0.5 -0.1, mean 0.3. Two of three
    members have a second turn, with scores 0 and 0.1: the advantage is 2/3 of their difference. The
    only third turn is compared with none. Group 2: outcomes -+1, first turns +-1, second turns
    -+0.5.
    """
    expected = [[1 / 3 + 0.2, 1 / 3 - 0.2 / 3, 1 / 3], [2.0, 0.5], [-2 / 3 + 0.2], [1 / 3 - 0.4, 1 / 3 + 0.2 / 3], None, [-2.0, -0.5]]
    check(compute_turn_advantages(step(), "outcome_and_turn"), expected)


def test_a_turn_that_is_no_step_has_the_outcomes_advantage_and_is_nobodys_baseline() -> None:
    """A turn without a step score has only the outcome's advantage and is left out of baselines.

    The step is that of the previous test with None in place of 0, so that turns compared with a 0
    have no peer. A score of 0 counts as a step.
    """
    rollouts = step()
    for turn in (rollouts[0].turns[1], rollouts[0].turns[2], rollouts[1].turns[1]):
        turn.step_score = None
    rollouts[5].turns[0].step_score = 0.0  # scores 3 and 0 are 1.5 from their mean
    expected = [[1 / 3 + 0.2, 1 / 3, 1 / 3], [2.5, 1.0], [-2 / 3 + 0.2], [1 / 3 - 0.4, 1 / 3], None, [-2.5, -1.0]]
    check(compute_turn_advantages(rollouts, "outcome_and_turn"), expected)


def test_return_to_go_compares_what_is_still_earned() -> None:
    """return_to_go compares the discounted returns from each turn on.

    Returns of group 5 at discount 1/2 are 1 + (0.5, 0, 0) = 1.5 1 1 | 0.5 | 1 + (-0.1 + 0.05, 0.1)
    = 0.95 1.1. Only the first episode has a third turn, which has the advantage of the episode, 1.5
    - 1. Group 2: 5.5 3 | 2 2.
    """
    mean = (1.5 + 0.5 + 0.95) / 3
    expected = [[1.5 - mean, -0.2 / 3, 0.5], [1.75, 0.5], [0.5 - mean], [0.95 - mean, 0.2 / 3], None, [-1.75, -0.5]]
    check(compute_turn_advantages(step(), "return_to_go", gamma=0.5), expected)
    check(compute_turn_advantages(step(), "return_to_go"), [[0.5, -0.2 / 3, 0.5], [1.5, 0.5], [-0.5], [0.0, 0.2 / 3], None, [-1.5, -0.5]])


def test_the_longest_episode_learns_from_turns_that_nobody_else_reached() -> None:
    """A turn that no other member reached has the advantage of its whole episode.

    Rewards are -4 -2 1 0, mean -1.25. Second turns have the returns -3 and -1 in a group of four:
    the advantage is 3/4 of their difference.
    """
    group = [make_rollout(0, outcome_reward=0.0, reward_deltas=gains) for gains in ([-1.0] * 4, [-1.0] * 2, [1.0], [0.0])]
    others = [make_rollout(1, outcome_reward=8.0, reward_deltas=[1.0] * 4), make_rollout(1, outcome_reward=4.0, reward_deltas=[1.0] * 3)]
    expected = [[-2.75, -1.5, -2.75, -2.75], [-0.75, 1.5], [2.25], [1.25], [2.5, 2.5, 2.5, 2.5], [-2.5, -2.5, -2.5]]
    check(compute_turn_advantages([*group, *others], "return_to_go"), expected)


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
def test_the_kl_in_the_reward_is_taken_off_every_return(scheme: str) -> None:
    """The KL penalty in the reward is subtracted from every return.

    The outcomes are 1 - 0.5 * (2 + 4) = -2 and 1 - 0.5 * 2 = 0. Each rollout has one step, with
    score 1.
    """
    rollouts = [
        set_kl_logprobs(make_rollout(0, outcome_reward=1.0, step_scores=(1.0, None)), 2.0, 4.0),
        set_kl_logprobs(make_rollout(0, outcome_reward=1.0, step_scores=(1.0,)), 2.0),
    ]
    rollouts += [set_kl_logprobs(make_rollout(1, outcome_reward=outcome, step_scores=(0.0,)), 9.0) for outcome in (1.0, 2.0)]
    check(compute_turn_advantages(rollouts, scheme, kl_coef=0.5, use_kl_in_reward=True), [[-1.0, -1.0], [1.0], [-0.5], [0.5]])
    assert group_std(rollouts, AlgoSettings(turn_credit=scheme, kl_coef=0.5, use_kl_in_reward=True)) == {0: 0.0, 1: 0.5}, (
        "known before any KL is"
    )


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
def test_what_is_left_out_still_counts_in_its_groups_means(scheme: str) -> None:
    """Dropped rollouts still count in the means of their group.

    Two rollouts are right, and two wrong ones ran out of turns and are dropped; the right ones keep
    1 - 1/2, as if nothing were dropped.
    """
    rollouts = [make_rollout(group, outcome_reward=outcome, step_scores=(0.0,)) for group in (0, 1) for outcome in (1.0, group, 0.0, 1.0)]
    for rollout in rollouts:
        rollout.filter_reason = "" if rollout.outcome_reward else "stop_reason"
    check(compute_turn_advantages(rollouts, scheme), [[0.5], [-0.5], [-0.5], [0.5], [0.25], [0.25], [-0.75], [0.25]])


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_one_alone_in_its_group_and_equal_turns_have_exact_zeros(scheme: str, norm_adv_by_std: bool) -> None:
    """A rollout without peers, and turns that are equal in all rollouts of a group, have advantages
    of exactly 0. A group with different rewards does not."""
    alone = [make_rollout(0, outcome_reward=3.0, step_scores=(1.0, 2.0)), make_rollout(0, step_scores=(1.0,))]
    equal = [make_rollout(1, outcome_reward=0.1, step_scores=(0.7, None, 0.3)) for _ in range(3)]
    moving = [make_rollout(2, outcome_reward=outcome, step_scores=(0.0,)) for outcome in (0.0, 1.0)]
    given = compute_turn_advantages([*alone, *moving, *equal], scheme, norm_adv_by_std=norm_adv_by_std, std_eps=0.0)
    assert given[:2] == [[0.0, 0.0], None] and given[4:] == [[0.0] * 3] * 3
    assert given[2][0] == -given[3][0] < 0
    assert group_std([*alone, *moving, *equal], AlgoSettings(turn_credit=scheme)) == {0: 0.0, 2: 0.5, 1: 0.0}


def test_the_weight_of_a_turn_part_counts_when_credit_is_normalized() -> None:
    """The weight of a turn term changes normalized advantages.

    Outcomes are 1 and 0, first turns score 0 and w, and second turns are no steps: 0.5 - w/2, 0.5 |
    -0.5 + w/2, -0.5, divided by the root of a third of the sum of their squares. For w = 1 the
    scale is sqrt(1/6), which gives 0 and sqrt(1.5).

    The other group has its own scale: 4, 4 | -4, -4.
    """
    first = {}
    for weight in (1.0, 0.5, 0.01):
        rollouts = [
            make_rollout(0, outcome_reward=1.0, step_scores=(0.0, None)),
            make_rollout(0, outcome_reward=0.0, step_scores=(weight, None)),
        ]
        others = [
            make_rollout(1, outcome_reward=8.0, step_scores=(0.0, None)),
            make_rollout(1, outcome_reward=0.0, step_scores=(0.0, None)),
        ]
        given = compute_turn_advantages([*rollouts, *others], "outcome_and_turn", norm_adv_by_std=True, std_eps=0.0)
        turn = 0.5 - weight / 2
        scale = math.sqrt(2 * (turn**2 + 0.25) / 3)
        check(given, [[turn / scale, 0.5 / scale], [-turn / scale, -0.5 / scale], [math.sqrt(0.75)] * 2, [-math.sqrt(0.75)] * 2])
        first[weight] = given[0][0]
    assert first[1.0] == 0 < first[0.5] < first[0.01] < math.sqrt(0.75)


@pytest.mark.parametrize("scheme", ["outcome_and_turn", "return_to_go"])
def test_turns_are_divided_by_one_number_a_group(scheme: str) -> None:
    """norm_adv_by_std divides all turn advantages of a group by one standard deviation plus
    std_eps."""
    plain, normalized = compute_turn_advantages(step(), scheme), compute_turn_advantages(step(), scheme, norm_adv_by_std=True, std_eps=0.25)
    for members in ([0, 2, 3], [1, 5]):
        values = [value for index in members for value in plain[index]]
        scale = math.sqrt(sum(value * value for value in values) / (len(values) - 1)) + 0.25
        check([normalized[index] for index in members], [[value / scale for value in plain[index]] for index in members])


SCORE = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))
STEP = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.floats(-3, 3)), st.lists(SCORE, min_size=1, max_size=4)), max_size=12)


def others_mean(own: float, others: list[float], size: int) -> float:
    return (own - sum(others) / len(others)) * (size - 1) / size if others else 0.0


def textbook(members: list[Rollout], index: int, number: int, scheme: str, discount: float) -> float:
    """Compute the advantage of one turn with plain loops over the other members."""
    own, others, size = members[index], members[:index] + members[index + 1 :], len(members)
    if scheme in ("broadcast", "gigpo"):  # no turn here has a state
        return others_mean(own.reward, [each.reward for each in others], size)
    if scheme == "outcome_and_turn":
        value = others_mean(own.outcome_reward, [each.outcome_reward for each in others], size)
        steps = [each.turns[number].step_score for each in others if len(each.turns) > number and each.turns[number].step_score is not None]
        return value if own.turns[number].step_score is None else value + others_mean(own.turns[number].step_score, steps, size)

    def to_go(rollout: Rollout) -> float:
        return rollout.outcome_reward + sum(turn.reward_delta * discount**later for later, turn in enumerate(rollout.turns[number:]))

    reached = [to_go(each) for each in others if len(each.turns) > number]
    return others_mean(to_go(own), reached, size) if reached else others_mean(own.reward, [each.reward for each in others], size)


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
@settings(deadline=None, max_examples=40)
@given(STEP, st.sampled_from([1.0, 0.5, 0.0]), st.booleans(), st.randoms(use_true_random=False))
def test_turn_credit_is_the_textbook_loop_and_depends_on_no_order(
    scheme: str, given_step: list, discount: float, norm_adv_by_std: bool, shuffler: random.Random
) -> None:
    """Turn advantages equal a textbook loop on random steps, and permuting the rollouts changes no
    bit. A step lists group, outcome (None if failed) and turn scores; turns that are steps also
    have rewards."""
    rollouts = [
        make_rollout(group, outcome_reward=outcome, step_scores=None if outcome is None else scores)
        for group, outcome, scores in given_step
    ]
    plain = compute_turn_advantages(rollouts, scheme, gamma=discount)
    for group in range(3):
        members = [index for index, rollout in enumerate(rollouts) if rollout.group == group and rollout.is_scored]
        peers = [rollouts[index] for index in members]
        for place, index in enumerate(members):
            expected = [textbook(peers, place, number, scheme, discount) for number in range(len(rollouts[index].turns))]
            assert plain[index] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    order = list(range(len(rollouts)))
    shuffler.shuffle(order)
    options = {"gamma": discount, "norm_adv_by_std": norm_adv_by_std}
    whole = compute_turn_advantages(rollouts, scheme, **options)
    assert compute_turn_advantages([rollouts[index] for index in order], scheme, **options) == [
        whole[index] for index in order
    ]  # bit for bit


@pytest.mark.parametrize("scheme", ["outcome_and_turn", "return_to_go"])
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3), st.floats(-2, 2)), max_size=12), st.booleans())
def test_with_one_turn_an_episode_all_schemes_are_grpo(scheme: str, given_step: list, norm_adv_by_std: bool) -> None:
    """With one turn per episode, outcome_and_turn and return_to_go equal broadcast.

    A step lists group, outcome, and the score of the only turn.
    """
    rollouts = [make_rollout(group, outcome_reward=outcome, step_scores=(score,)) for group, outcome, score in given_step]
    options = {"norm_adv_by_std": norm_adv_by_std, "std_eps": 1e-2, "gamma": 0.5}
    check(compute_turn_advantages(rollouts, scheme, **options), compute_turn_advantages(rollouts, "broadcast", **options), slack=1e-11)
    spread = group_std(rollouts, AlgoSettings())
    assert group_std(rollouts, AlgoSettings(turn_credit=scheme)) == pytest.approx(spread, abs=1e-12)
