"""Metrics of a step's rollouts and updates; docs/algorithm.md explains each metric."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.algo.filtering import FILTERS, used_groups
from megatron_rl.observe.group_metrics import group_metrics
from megatron_rl.types import Rollout, Status, StopReason

MAX_SOURCES = 32
"""Maximum number of data sources per step that get separate metrics.

The remaining, less frequent sources are merged as `others`.
"""


def rollout_metrics(rollouts: list[Rollout], *, num_gen_batches: int) -> dict[str, float]:
    """Return the metrics of a step's rollouts; most metrics cover only the scored rollouts.

    `num_gen_batches` is the number of generation batches in the step.
    """
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    groups, moving = groups_with_advantages(rollouts)
    metrics = {
        "reward/mean": statistics.fmean(map(reward_of, scored)),
        "reward/std": statistics.pstdev(map(reward_of, scored)),
        "rollout/turns": statistics.fmean(len(rollout.turns) for rollout in scored),
        **_length_metrics(scored),
        "rollout/zero_std_fraction": len(groups - moving) / max(len(groups), 1),
        "rollout/all_groups_zero_std": float(not moving),
        "rollout/failed_fraction": (len(rollouts) - len(scored)) / len(rollouts),
        "rollout/num_gen_batches": float(num_gen_batches),
        "rollout/num_groups_used": float(len(used_groups(rollouts))),
    }
    metrics |= {f"rollout/filtered_{reason}": float(sum(rollout.filter_reason == reason for rollout in rollouts)) for reason in FILTERS}
    calls = [turn.tool_call for rollout in scored for turn in rollout.turns if turn.tool_call is not None]
    metrics["rollout/tool_use"] = statistics.fmean(rollout.used_tool for rollout in scored)
    metrics["rollout/tool_calls"] = len(calls) / len(scored)
    metrics["rollout/tool_errors"] = sum(bool(call.error) for call in calls) / max(len(calls), 1)
    metrics["time/episode"] = statistics.fmean(rollout.wall_s for rollout in scored)
    metrics["time/episode_max"] = max(rollout.wall_s for rollout in scored)
    metrics["time/episode_environment"] = statistics.fmean(rollout.env_s for rollout in scored)
    metrics["time/episode_scoring"] = statistics.fmean(rollout.scoring_s for rollout in scored)
    metrics |= {f"reward/{name}": value for name, value in _mean_rewards(scored).items()}
    metrics |= group_metrics(scored)
    for source, members in group_by_source(scored).items():
        metrics[f"source/{source}/reward"] = statistics.fmean(map(reward_of, members))
        metrics |= {f"source/{source}/{name}": value for name, value in _mean_rewards(members).items()}
    for status in Status:
        metrics[f"rollout/{status}"] = float(sum(rollout.status is status for rollout in rollouts))
    for end in StopReason:
        metrics[f"rollout/stop_{end}"] = float(sum(rollout.stop_reason is end for rollout in rollouts))
    return metrics


def reward_of(rollout: Rollout) -> float:
    """Return the reward of a scored rollout."""
    assert rollout.reward is not None, f"rollout {rollout.example_id}#{rollout.sample_index} is {rollout.status} but was never scored"
    return rollout.reward


def _length_metrics(scored: Sequence[Rollout]) -> dict[str, float]:
    replies = [turn.token_span[1] - turn.token_span[0] for rollout in scored for turn in rollout.turns]
    contexts = [len(context.token_ids) for rollout in scored for context in rollout.sequences]
    sampled = [rollout.num_sampled for rollout in scored]
    return {
        "rollout/sampled_tokens": float(sum(sampled)),
        "rollout/episode_tokens": statistics.fmean(sampled),
        "rollout/episode_tokens_max": float(max(sampled)),
        "rollout/response_tokens": statistics.fmean(replies) if replies else 0.0,
        "rollout/response_tokens_max": float(max(replies, default=0)),
        "rollout/sequence_tokens": statistics.fmean(contexts) if contexts else 0.0,
        "rollout/sequence_tokens_max": float(max(contexts, default=0)),
    }


def group_by_source(scored: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Group the rollouts by data source.

    The keys are source names converted to valid metric names. Rollouts without a source are left
    out, and infrequent sources are merged as `others`.
    """
    named = [(re.sub(r"[^\w.+-]", "_", rollout.source, flags=re.ASCII)[:64], rollout) for rollout in scored if rollout.source]
    frequent = {name for name, _ in Counter(name for name, _ in named).most_common(MAX_SOURCES)}
    found: dict[str, list[Rollout]] = {}
    for name, rollout in named:
        found.setdefault(name if name in frequent else "others", []).append(rollout)
    return found


def _mean_rewards(scored: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each reward term over the rollouts that have this term."""
    names = dict.fromkeys(name for rollout in scored for name in rollout.reward_terms)
    return {name: statistics.fmean(rollout.reward_terms[name] for rollout in scored if name in rollout.reward_terms) for name in names}


def staleness_metrics(rollouts: Sequence[Rollout], *, step: int, num_stale: int) -> dict[str, float]:
    """Return the staleness metrics of the rollouts that a step trains on.

    Staleness is the number of weight updates since the oldest token of a rollout was sampled.
    `num_stale` is the number of rollouts that were dropped before the step because they were too
    stale.
    """
    trained = [rollout for rollout in rollouts if rollout.is_trained_on and rollout.num_sampled]
    ages = [step - rollout.oldest_version for rollout in trained]
    versions = [len({each for context in rollout.sequences for each in context.weight_versions if each >= 0}) for rollout in trained]
    return {
        "rollout/staleness": statistics.fmean(ages) if ages else 0.0,
        "rollout/staleness_max": float(max(ages, default=0)),
        "rollout/versions": statistics.fmean(versions) if versions else 0.0,
        "rollout/filtered_stale": float(num_stale),
        "rollout/stale_fraction": num_stale / (len(rollouts) + num_stale),
    }


class EngineBusyCounter:
    """Measures how many seconds an engine was busy between two calls of `busy_since_last`."""

    def __init__(self) -> None:
        self._busy_s: Callable[[], float] = lambda: 0.0
        self._before: float | None = None

    def start(self, busy_s: Callable[[], float]) -> float:
        """Set the function that returns the engine's busy seconds, and return its current value.

        Counting begins with the first call of this method.
        """
        self._busy_s, busy = busy_s, busy_s()
        self._before = busy if self._before is None else self._before
        return busy

    def busy_since_last(self) -> float:
        """Return the busy seconds since the last call, or since counting began."""
        before, self._before = self._before, self._busy_s()
        return self._before - (before or 0.0)


def idle_metrics(times: Mapping[str, float], *, busy_s: float) -> dict[str, float]:
    """Return two fractions of a step's time: the engine's idle time and the trainer's waiting time.

    Args:
        times: result of StepTimer.collect. The trainer waits during time/engine and
            time/environment.
        busy_s: busy seconds of this process's engine from the end of the last step to the end of
            this step, including updates and evaluations.
    """
    waited, total = times.get("time/engine", 0.0) + times.get("time/environment", 0.0), times["time/total"]
    return {"rollout/engine_idle_fraction": 1 - busy_s / total, "trainer/idle_fraction": waited / total}


def groups_with_advantages(rollouts: Sequence[Rollout]) -> tuple[set[int], set[int]]:
    """Return the groups that can get advantages, and the groups with a nonzero advantage.

    A group can get advantages if it has a scored rollout that was not filtered as "no_peer".
    """
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    moving = {rollout.group for rollout in scored for context in rollout.sequences if any(context.advantages)}
    return {rollout.group for rollout in scored if rollout.filter_reason != "no_peer"}, moving


def merge_update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's updates.

    Metrics with names that end in _max are maxima over the updates; all others are means.

    The mismatch between engine and trainer is taken from the first update, which starts from the
    weights that generated the rollouts. The metric policy/first_ratio is also taken from the first
    update and must be 1. This metric is omitted if the step has a single update, because that
    update uses its own logprobs as old logprobs. Tokens that were sampled with earlier weights are
    excluded from the mismatch. The metric rollout/on_policy_fraction is the fraction of tokens that
    remain.
    The result is empty if all rollouts of the step were filtered out.
    """
    if not updates:
        return {}
    updates = [divide_by_data_tokens(add_effective_sample_size(update)) for update in updates]
    first = updates[0]
    values = {name: [update[name] for update in updates] for name in first}
    merged = {name: _max_or_nan(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()}
    if "policy/ratio" not in first:  # only a critic was trained
        return merged
    ratio = {"policy/first_ratio": first["policy/ratio"]} if len(updates) > 1 else {}
    gaps = {name: value for name, value in first.items() if name.startswith("rollout_mismatch/logprob_abs_diff")}
    gaps |= {"rollout_mismatch/logprob_abs_diff": mean_logprob_abs_diff(first)} if "rollout_mismatch/logprob_abs_diff" in gaps else {}
    return {**merged, **ratio, **gaps}


def divide_by_data_tokens(update: Mapping[str, float]) -> dict[str, float]:
    """Convert metrics of demonstrations and of responses of a teacher to means over their tokens.

    An update's own values are divided by the number of sampled tokens, as are the token counts.
    """
    metrics = dict(update)
    for name, count in (("distill/data_divergence", "distill/data_tokens"), ("distill/response_nll", "distill/response_tokens")):
        if num_tokens := metrics.pop(count, 0.0):
            metrics[name] /= num_tokens
    return metrics


def mean_logprob_abs_diff(update: Mapping[str, float]) -> float:
    """Return the mean absolute logprob difference over tokens sampled with the current weights.

    An update's own value of rollout_mismatch/logprob_abs_diff is a mean over all tokens of the
    update, in which tokens from older weights count as 0. This function converts that mean to a
    mean over the tokens sampled with the current weights. The result is 0 if no token was sampled
    with the current weights.
    """
    return update["rollout_mismatch/logprob_abs_diff"] / (update.get("rollout/on_policy_fraction", 1.0) or 1.0)


def add_effective_sample_size(update: Mapping[str, float]) -> dict[str, float]:
    """Replace the mean square of the tokens' IS weights with the effective sample size.

    The effective sample size is (sum w)^2 / (n sum w^2), the fraction of tokens that would carry as
    much information with equal weights. The effective sample size is 1 if all weights are equal,
    and 0 if all tokens are masked. Without a rollout correction, importance ratios are used instead
    of IS weights.
    """
    metrics = dict(update)
    corrected, square = metrics.get("rollout_mismatch/is_weight"), metrics.pop("rollout_mismatch/is_weight_squared", None)
    importance, squared = metrics.pop("rollout_mismatch/importance", None), metrics.pop("rollout_mismatch/importance_squared", None)
    mean, square = (corrected, square) if square is not None else (importance, squared)
    if square is not None:
        assert mean is not None, "an update reports a mean together with its mean square"
        metrics["rollout_mismatch/is_eff_sample_size"] = mean**2 / square if square > 0 else 0.0
    return metrics


def value_metrics(values: Sequence[float], returns: Sequence[float]) -> dict[str, float]:
    """Return metrics that compare a critic's values with the returns of a step's actions.

    The metric explained_variance is 1 - var(return - value) / var(return). It is 1 for a perfect
    critic and 0 for a critic that always predicts the mean return. It is omitted if all returns are
    equal. The result is empty if `returns` is empty.
    """
    if not returns:
        return {}
    errors = [earned - value for value, earned in zip(values, returns, strict=True)]
    metrics = {
        "value/mean": statistics.fmean(values),
        "value/return": statistics.fmean(returns),
        "value/rmse": math.sqrt(statistics.fmean(error * error for error in errors)),
    }
    spread = statistics.pvariance(returns)
    return metrics | ({"value/explained_variance": 1.0 - statistics.pvariance(errors) / spread} if spread > 0 else {})


def _max_or_nan(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
