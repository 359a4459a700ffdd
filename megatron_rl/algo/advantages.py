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


def turn_credit(
    rollouts: Sequence[Rollout], advantages: Sequence[float | None], *,
    keep: Sequence[bool], scheme: str, discount: float, normalize_std: bool, std_eps: float,
) -> list[list[float] | None]:  # fmt: skip
    """One advantage a turn for each rollout that `credit` gave one and that `keep` keeps; the others still count in its group's means.

    broadcast: the episode's, outcome supervision (arXiv 2402.03300, section 4.1.2).
    turn_group: A(outcome) + A_t(score of turn t), with A_t over the group's members that have a turn t (as MT-GRPO, arXiv 2505.11821,
    adds the advantage of a turn's reward to that of the outcome).
    return_to_go: A_t(outcome + sum over s >= t of discount^(s - t) * score of turn s): process supervision, arXiv 2402.03300, section
    4.1.3, with the outcome as the last reward and turns compared with turns of the same number.
    """
    assert scheme in ("broadcast", "turn_group", "return_to_go"), scheme
    if scheme == "broadcast":
        credited = [None if value is None else [value] * len(rollout.turns) for rollout, value in zip(rollouts, advantages, strict=True)]
    else:
        scored = [None if value is None else rollout for rollout, value in zip(rollouts, advantages, strict=True)]
        credited = _by_turn(scored, scheme=scheme, discount=discount, normalize_std=normalize_std, std_eps=std_eps)
    return [turns if kept else None for turns, kept in zip(credited, keep, strict=True)]


def _by_turn(
    rollouts: Sequence[Rollout | None], *, scheme: str, discount: float, normalize_std: bool, std_eps: float
) -> list[list[float] | None]:
    values = [None if rollout is None else _turn_values(rollout, scheme, discount) for rollout in rollouts]
    base = [0.0] * len(rollouts)
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        if rollout is not None:
            members[rollout.group, -1].append(index)
            for number in range(len(rollout.turns)):
                members[rollout.group, number].append(index)
    credited = [None if value is None else [0.0] * len(value) for value in values]
    for (_, number), indices in members.items():
        given = [rollouts[index].outcome if number < 0 else values[index][number] for index in indices]
        for index, value in zip(indices, group_advantages(given, normalize_std=normalize_std, std_eps=std_eps), strict=True):
            if number < 0:
                base[index] = value if scheme == "turn_group" else 0.0
            else:
                credited[index][number] = value
    return [None if turns is None else [base[index] + value for value in turns] for index, turns in enumerate(credited)]


def _turn_values(rollout: Rollout, scheme: str, discount: float) -> list[float]:
    if scheme == "turn_group":
        return [turn.score for turn in rollout.turns]
    returns, later = [], 0.0
    for turn in reversed(rollout.turns):
        later = turn.score + discount * later
        returns.append(rollout.outcome + later)
    return returns[::-1]


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
