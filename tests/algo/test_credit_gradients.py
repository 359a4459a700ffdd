"""Expected policy gradients of each advantage scheme, by exact enumeration of all groups.

The oracle is the gradient of the expected reward. An episode is one of a few kinds. The order of a
group's members has no effect, so each multiset of kinds is evaluated once and weighted by its
number of orderings.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from megatron_rl.algo.advantages import TURN_SCHEMES
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.config import AlgoSettings
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric, TurnRewardTerm
from tests.support.rollout_factory import collect_turn_advantages, make_reward_input, make_rollout


@dataclass(slots=True, frozen=True, kw_only=True)
class Kind:
    """A possible course of an episode, with its probability."""

    probability: float
    slopes: tuple[float, ...]
    """dlogprob / dtheta of the choice made in each turn."""
    numbers: dict[str, float | list]
    """Keyword arguments of `make_rollout`: outcome reward, step scores, reward deltas."""


def expected_gradient(kinds: Sequence[Kind], size: int, algo: AlgoSettings) -> float:
    """Return the mean over all groups of `size` of the summed advantage * dlogprob / dtheta.

    Each group is evaluated together with another group.
    """
    total = 0.0
    for group in itertools.combinations_with_replacement(range(len(kinds)), size):
        rollouts = [make_rollout(0, **kinds[kind].numbers) for kind in group]
        others = [
            make_rollout(1, outcome_reward=3.0, step_scores=(1.0, 0.0, 2.0)),
            make_rollout(1, outcome_reward=-1.0, step_scores=(0.5, 4.0, 0.0)),
        ]
        ALGORITHMS[algo.name].advantage_fn([*rollouts, *others], algo)
        gradient = 0.0
        for rollout, kind in zip(rollouts, group, strict=True):
            gradient += sum(credit * slope for credit, slope in zip(collect_turn_advantages(rollout), kinds[kind].slopes, strict=True))
        ways = math.factorial(size) / math.prod(map(math.factorial, Counter(group).values()))
        total += ways * math.prod(kinds[kind].probability for kind in group) * gradient
    return total


def by_rubric(*steps: float | None, right: bool) -> dict[str, float | list]:
    """Return `make_rollout` arguments of an episode with these steps, scored by a rubric whose turn
    term is a mean with weight 0.5."""

    async def accuracy(_: RewardInput) -> float:
        return float(right)

    async def evidence(_: RewardInput) -> list[float | None]:
        return list(steps)

    rubric = Rubric(terms={"accuracy": RewardTerm(accuracy)}, turn_terms={"evidence": TurnRewardTerm(evidence, weight=0.5)})
    score = asyncio.run(rubric.score(make_reward_input(*make_rollout(0, 0.0, reward_deltas=[0.0] * len(steps)).turns)))
    assert score.reward == right + 0.5, "the reward must not depend on the choice"
    return {"outcome_reward": score.outcome_reward, "step_scores": score.step_scores, "reward_deltas": score.reward_deltas}


def choices(call: float, right: float) -> list[Kind]:
    """Return the kinds of an episode that, after a good first call, makes a useless second call
    with probability `call` or answers. The answer is right with probability `right`, independently
    of that choice."""
    kinds = []
    for probability, answer in ((right, True), (1 - right, False)):
        once, twice = by_rubric(1.0, None, right=answer), by_rubric(1.0, 1.0, None, right=answer)
        kinds.append(Kind(probability=(1 - call) * probability, slopes=(0.0, -call), numbers=once))
        kinds.append(Kind(probability=call * probability, slopes=(0.0, 1 - call, 0.0), numbers=twice))
    return [kind for kind in kinds if kind.probability]


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
@pytest.mark.parametrize("norm_adv_by_std", [True, False])
@pytest.mark.parametrize("call", [0.5, 0.2])
def test_a_choice_that_does_not_change_the_reward_is_not_taught(scheme: str, norm_adv_by_std: bool, call: float) -> None:
    """The expected gradient is 0 over all 2^8 groups of episodes that earn 1.5 with or without a
    second call."""
    algo = AlgoSettings(turn_credit=scheme, norm_adv_by_std=norm_adv_by_std)
    kinds = choices(call, right=1.0)
    assert len(kinds) == 2 and abs(expected_gradient(kinds, 8, algo)) <= 1e-12


@pytest.mark.parametrize("scheme", TURN_SCHEMES)
@pytest.mark.parametrize("call", [0.5, 0.2])
def test_a_choice_is_not_taught_by_the_luck_of_those_who_made_it(scheme: str, call: float) -> None:
    """The expected gradient is 0 over all 4^8 groups if answers are right at random, with
    probability 0.7."""
    kinds = choices(call, right=0.7)
    assert len(kinds) == 4 and abs(expected_gradient(kinds, 8, AlgoSettings(turn_credit=scheme, norm_adv_by_std=False))) <= 1e-12


P, Q = 0.6, 0.3
LEAVES = {
    "stop": Kind(probability=1 - P, slopes=(-P,), numbers={"outcome_reward": 0.3, "reward_deltas": [1.0]}),
    "go, stop": Kind(probability=P * (1 - Q), slopes=(1 - P, -Q), numbers={"outcome_reward": 2.0, "reward_deltas": [-1.0, 0.5]}),
    "go, go": Kind(probability=P * Q, slopes=(1 - P, 1 - Q, 0.0), numbers={"outcome_reward": -1.0, "reward_deltas": [-1.0, 2.0, 0.25]}),
}
"""Two decisions: to continue after the first turn (probability P) and after the second (Q)."""
R_STOP, R_GO_STOP, R_GO_GO = (kind.numbers["outcome_reward"] + sum(kind.numbers["reward_deltas"]) for kind in LEAVES.values())
SLOPES = {
    "first": P * (1 - P) * ((1 - Q) * R_GO_STOP + Q * R_GO_GO - R_STOP),
    "second": P * Q * (1 - Q) * (R_GO_GO - R_GO_STOP),
}
"""Derivatives of the expected reward (1 - P) R_STOP + P ((1 - Q) R_GO_STOP + Q R_GO_GO)
with respect to the logits of P and of Q."""


@pytest.mark.parametrize(("name", "scheme"), [("grpo", "broadcast"), ("grpo", "return_to_go"), ("rloo", "broadcast")])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("decision", SLOPES)
def test_the_expected_gradient_is_that_of_the_reward(name: str, scheme: str, size: int, decision: str) -> None:
    """The expected sum over the group of A dlogprob is G times the derivative of the expected
    reward for RLOO. It is (G - 1) times the derivative if the group mean includes the member
    itself.

    Episodes differ in length, so in some groups one member is alone in its last turns.
    """
    turn = list(SLOPES).index(decision)
    slopes = {leaf: tuple(slope * (place == turn) for place, slope in enumerate(kind.slopes)) for leaf, kind in LEAVES.items()}
    kinds = [replace(kind, slopes=slopes[leaf]) for leaf, kind in LEAVES.items()]
    algo = AlgoSettings(name=name, turn_credit=scheme, norm_adv_by_std=False)
    scale = size if name == "rloo" else size - 1
    assert expected_gradient(kinds, size, algo) == pytest.approx(scale * SLOPES[decision], abs=1e-12)
