"""What happened in a step, as metrics: of its episodes, and of its updates. docs/algorithm.md explains each."""

import math
import statistics
from collections.abc import Sequence

from megatron_rl.algo.select import REASONS, kept_groups
from megatron_rl.types import End, Rollout, Status


def rollout_metrics(rollouts: list[Rollout], *, rounds: int) -> dict[str, float]:
    """What happened in a step's episodes, over those that were scored. `rounds` of prompts were rolled out."""
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    groups, moving = credited_groups(rollouts)
    metrics = {
        "reward/mean": statistics.fmean(rollout.reward for rollout in scored),
        "reward/std": statistics.pstdev(rollout.reward for rollout in scored),
        "rollout/turns": statistics.fmean(len(rollout.turns) for rollout in scored),
        "rollout/sampled_tokens": float(sum(rollout.num_sampled for rollout in scored)),
        "rollout/degenerate_groups": len(groups - moving) / max(len(groups), 1),
        "rollout/nothing_learned": float(not moving),
        "rollout/failed_fraction": (len(rollouts) - len(scored)) / len(rollouts),
        "rollout/rounds": float(rounds),
        "rollout/kept_groups": float(len(kept_groups(rollouts))),
    }
    metrics |= {f"rollout/dropped_{reason}": float(sum(rollout.dropped == reason for rollout in rollouts)) for reason in REASONS}
    calls = [turn.call for rollout in scored for turn in rollout.turns if turn.call is not None]
    metrics["rollout/tool_use"] = statistics.fmean(rollout.used_tool for rollout in scored)
    metrics["rollout/tool_calls"] = len(calls) / len(scored)
    metrics["rollout/tool_errors"] = sum(bool(call.error) for call in calls) / max(len(calls), 1)
    metrics["time/episode"] = statistics.fmean(rollout.wall_s for rollout in scored)
    metrics["time/episode_max"] = max(rollout.wall_s for rollout in scored)
    metrics["time/episode_environment"] = statistics.fmean(rollout.environment_s for rollout in scored)
    metrics["time/episode_scoring"] = statistics.fmean(rollout.scoring_s for rollout in scored)
    for name in dict.fromkeys(name for rollout in scored for name in rollout.rewards):
        metrics[f"reward/{name}"] = statistics.fmean(rollout.rewards[name] for rollout in scored if name in rollout.rewards)
    for status in Status:
        metrics[f"rollout/{status}"] = float(sum(rollout.status is status for rollout in rollouts))
    for end in End:
        metrics[f"rollout/end_{end}"] = float(sum(rollout.end is end for rollout in rollouts))
    return metrics


def credited_groups(rollouts: Sequence[Rollout]) -> tuple[set[int], set[int]]:
    """Groups that could be credited, and those of them that were: whose members are not all alike."""
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    moving = {rollout.group for rollout in scored for context in rollout.contexts if any(context.advantages)}
    return {rollout.group for rollout in scored if rollout.dropped != "alone"}, moving


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """One step's metrics from its updates: means, and maxima where the name says so.

    The gap between engine and trainer is that of the first update, whose weights sampled; so is policy/first_ratio, which must be 1. It
    is left out where a step makes one update, whose old logprobs are its own. Empty where every rollout of the step was dropped.
    """
    if not updates:
        return {}
    first = updates[0]
    values = {name: [update[name] for update in updates] for name in first}
    merged = {name: _largest(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()}
    if "policy/ratio" not in first:  # a critic alone was trained
        return merged
    ratio = {"policy/first_ratio": first["policy/ratio"]} if len(updates) > 1 else {}
    return {**merged, **ratio, **{name: value for name, value in first.items() if name.startswith("engine/logprob_gap")}}


def value_metrics(values: Sequence[float], returns: Sequence[float]) -> dict[str, float]:
    """What a critic expected of a step's actions, and what they earned. explained_variance = 1 - var(return - value) / var(return): 1 for a
    critic that knows, 0 for one that says the mean; left out where all returns are equal. Empty where nothing was trained on."""
    if not returns:
        return {}
    errors = [earned - value for value, earned in zip(values, returns, strict=True)]
    metrics = {
        "value/mean": statistics.fmean(values),
        "value/return": statistics.fmean(returns),
        "value/error": math.sqrt(statistics.fmean(error * error for error in errors)),
    }
    spread = statistics.pvariance(returns)
    return metrics | ({"value/explained_variance": 1.0 - statistics.pvariance(errors) / spread} if spread > 0 else {})


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
