"""Filters that exclude rollouts from training and record the reason in Rollout.filter_reason."""

from collections.abc import Mapping, Sequence

from megatron_rl.config import FilterSettings
from megatron_rl.types import Rollout

FILTERS = ("no_peer", "zero_std", "no_image", "stop_reason", "surplus")
"""Reasons for filtering a scored rollout, in the order in which they are checked. no_peer: no other
rollout of the group was scored. surplus: the step has more groups than needed, and this rollout's
group is not among those with the highest advantage spread. The other reasons are described at
FilterSettings.drop.
"""


def apply_filters(
    rollouts: Sequence[Rollout], settings: FilterSettings, *, num_groups: int, group_std: Mapping[int, float], needs_group: bool
) -> None:
    """Set Rollout.filter_reason of every scored rollout to the first reason that applies, or to "".

    Args:
        rollouts: Rollouts of the step.
        settings: Filters to apply.
        num_groups: Number of groups that the step needs. With prefer_high_std, only the num_groups
            groups with the highest `group_std` are kept; among groups with equal `group_std`,
            earlier groups are preferred. Without prefer_high_std, surplus groups are trained on
            too.
        group_std: Spread of each group's advantages, keyed by group (advantages.group_std).
        needs_group: True if the algorithm compares the rollouts of a group.
    """
    sizes = {group: sum(rollout.is_scored and rollout.group == group for rollout in rollouts) for group in group_std}
    holds = {
        "no_peer": lambda rollout: needs_group and sizes[rollout.group] < 2,
        "zero_std": lambda rollout: "zero_std" in settings.drop and group_std[rollout.group] == 0,
        "no_image": lambda rollout: "no_image" in settings.drop and not any(context.images for context in rollout.sequences),
        "stop_reason": lambda rollout: "stop_reason" in settings.drop and rollout.stop_reason not in settings.keep_stop_reasons,
    }
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    for rollout in scored:
        rollout.filter_reason = next((reason for reason, test in holds.items() if test(rollout)), "")
    kept = used_groups(rollouts)
    if settings.prefer_high_std and len(kept) > num_groups:
        surplus = set(sorted(kept, key=lambda group: (-group_std[group], group))[num_groups:])
        for rollout in scored:
            if rollout.group in surplus and not rollout.filter_reason:
                rollout.filter_reason = "surplus"


def used_groups(rollouts: Sequence[Rollout]) -> set[int]:
    """Return the indices of the groups with at least one rollout to train on."""
    return {rollout.group for rollout in rollouts if rollout.is_trained_on}
