"""Which of a step's rollouts are trained on: what is left out says why in Rollout.filter_reason."""

from collections.abc import Mapping, Sequence

from megatron_rl.config import FilterSettings
from megatron_rl.types import Rollout

FILTERS = ("no_peer", "zero_std", "no_image", "stop_reason", "surplus")
"""Why a scored rollout is left out, in the order they are looked at: its group has no other that was scored, config.DROPS, or its group is
one more than are needed and teaches less."""


def apply_filters(
    rollouts: Sequence[Rollout], settings: FilterSettings, *, num_groups: int, group_std: Mapping[int, float], needs_group: bool
) -> None:
    """Write Rollout.filter_reason of every scored rollout: what settings.drop names and, with prefer_high_std, all but the num_groups
    groups that spread most.

    `group_std` is that of each group's credits (advantages.group_std). A rollout is left out for the first reason that holds. Without
    prefer_high_std surplus groups are trained on too. Ties between groups go to the earlier one. needs_group: credit compares the members
    of a group.
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
    """Groups of which anything is trained on."""
    return {rollout.group for rollout in rollouts if rollout.is_trained_on}
