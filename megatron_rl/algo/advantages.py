"""Credit: what an episode is worth against the others that started from the same example.

Plain floats, no tensors. Sums are exact (`statistics`), so a result depends neither on the order of the rollouts nor on the rank.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.types import Rollout, Status


def group_advantages(rewards_G: Sequence[float], *, normalize_std: bool, std_eps: float) -> list[float]:
    """Outcome supervision, GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / (std(r) + std_eps).

    Without normalize_std A_i = r_i - mean(r), Dr. GRPO (arXiv 2503.20783, section 3.2). std is the sample deviation (divisor
    G - 1): the paper leaves it open, and the common implementations take torch.std's default. Rewards that are all equal, one alone
    included, give exact zeros.
    """
    if len(set(rewards_G)) <= 1:
        return [0.0 for _ in rewards_G]
    mean = statistics.fmean(rewards_G)
    scale = statistics.stdev(rewards_G) + std_eps if normalize_std else 1.0
    return [(reward - mean) / scale for reward in rewards_G]


def credit(rollouts: Sequence[Rollout], *, normalize_std: bool, std_eps: float) -> list[float | None]:
    """One advantage a rollout, in the order given; None is not trained on.

    None are the failed rollouts and, as nothing is left to compare with, the members of a group with fewer than two scored ones.
    Rollout.group must tell apart all groups of the step. ValueError for a reward that is not a finite number.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        if rollout.status is not Status.FAILED:
            members[rollout.group].append(index)
    advantages: list[float | None] = [None] * len(rollouts)
    for indices in members.values():
        if len(indices) < 2:
            continue
        values = group_advantages([_reward(rollouts[index]) for index in indices], normalize_std=normalize_std, std_eps=std_eps)
        for index, value in zip(indices, values, strict=True):
            advantages[index] = value
    return advantages


@dataclass(slots=True, frozen=True, kw_only=True)
class CreditReport:
    """Counts of one step's rollouts; global, because every rank sees all rollouts."""

    num_credited: int
    num_failed: int
    num_dropped: int
    """Scored, but alone in their group."""
    num_groups: int
    """Groups that were credited."""
    num_degenerate_groups: int
    """Those whose rewards are all equal: they teach nothing."""

    @property
    def degenerate_fraction(self) -> float:
        return self.num_degenerate_groups / self.num_groups if self.num_groups else 0.0


def credit_report(rollouts: Sequence[Rollout], advantages: Sequence[float | None]) -> CreditReport:
    """What `credit` did with these rollouts. A group is degenerate when all its advantages are zero."""
    num_failed = sum(rollout.status is Status.FAILED for rollout in rollouts)
    credited = [(rollout.group, value) for rollout, value in zip(rollouts, advantages, strict=True) if value is not None]
    groups = {group for group, _ in credited}
    return CreditReport(
        num_credited=len(credited),
        num_failed=num_failed,
        num_dropped=len(rollouts) - num_failed - len(credited),
        num_groups=len(groups),
        num_degenerate_groups=len(groups - {group for group, value in credited if value != 0.0}),
    )


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None, f"rollout {rollout.example_id}#{rollout.sample} is {rollout.status} but was never scored"
    if not math.isfinite(rollout.reward):
        raise ValueError(f"task={rollout.task}: {rollout.example_id} was rewarded {rollout.reward}; a rubric must return finite numbers")
    return rollout.reward
