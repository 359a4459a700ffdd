"""Which of a step's rollouts are trained on: drops with their reasons counted, and the choice among surplus groups.

Selection comes after credit: a rollout that is left out still counted in its group's baseline.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.types import Rollout


@dataclass(slots=True, frozen=True, kw_only=True)
class Selection:
    keep: list[bool]
    """For each rollout."""
    num_groups: int
    """Groups of which anything is kept."""
    dropped: Counter[str]
    """Rollouts by why they are left out: zero_std, no_image, end, or surplus."""


def select(
    rollouts: Sequence[Rollout], advantages: Sequence[float | None], *,
    drop: Sequence[str], keep_ends: Sequence[str], num_groups: int, rank_by_std: bool,
) -> Selection:  # fmt: skip
    """Drop what `drop` names (zero_std, no_image, end) and, with rank_by_std, all but the num_groups groups whose rewards deviate most.

    A rollout is counted under the first reason that holds, in that order. Without rank_by_std surplus groups are kept and trained on too.
    Rollouts without an advantage are neither kept nor counted. Ties between groups go to the earlier one.
    """
    idle = {rollout.group for rollout in rollouts} - {r.group for r, value in zip(rollouts, advantages, strict=True) if value}
    tests = {
        "zero_std": lambda rollout: rollout.group in idle,
        "no_image": lambda rollout: not any(context.images for context in rollout.contexts),
        "end": lambda rollout: rollout.end not in keep_ends,
    }
    reasons: list[str | None] = []
    for rollout, value in zip(rollouts, advantages, strict=True):
        held = [name for name in tests if name in drop and tests[name](rollout)]
        reasons.append("uncredited" if value is None else held[0] if held else None)
    kept = {rollout.group for rollout, reason in zip(rollouts, reasons, strict=True) if reason is None}
    if rank_by_std and len(kept) > num_groups:
        spread = _spread(rollouts)
        surplus = set(sorted(kept, key=lambda group: (-spread[group], group))[num_groups:])
        reasons = ["surplus" if reason is None and r.group in surplus else reason for r, reason in zip(rollouts, reasons, strict=True)]
        kept -= surplus
    dropped = Counter(reason for reason in reasons if reason not in (None, "uncredited"))
    return Selection(keep=[reason is None for reason in reasons], num_groups=len(kept), dropped=dropped)


def _spread(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """The deviation of each group's rewards, members that were dropped included."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            rewards[rollout.group].append(rollout.reward)
    return {group: statistics.pstdev(values) for group, values in rewards.items()}
