"""The checks that end a run, against hand numbers."""

import pytest

from megatron_rl.algo.advantages import credit, credit_report
from megatron_rl.run import check_failures, check_improvement, rollout_metrics
from megatron_rl.types import Context, Rollout, RunFailed, Status


def rollout(group: int, reward: float | None, sampled: int = 2) -> Rollout:
    context = Context()
    context.extend([1])
    context.extend([2] * sampled, logprobs=[-1.0] * sampled)
    failed = reward is None
    return Rollout(
        task="t", example_id="e", group=group, sample=0, weight_version=0, contexts=[context], reward=reward,
        rewards={} if failed else {"return": reward}, status=Status.FAILED if failed else Status.COMPLETED,
        reason="sandbox down" if failed else "goal", wall_s=9.0 if failed else 1.0 + group, scoring_s=0.5,
    )  # fmt: skip


def test_failed_rollouts_end_the_run_above_the_limit() -> None:
    rollouts = [rollout(0, 1.0)] * 9 + [rollout(0, None)]
    check_failures(rollouts, limit=0.1)
    with pytest.raises(RunFailed, match="1 of 10 rollouts failed, above run.max_failed=0.09; first reason: sandbox down"):
        check_failures(rollouts, limit=0.09)


def test_a_failed_rollout_is_in_no_mean() -> None:
    rollouts = [rollout(0, 1.0), rollout(0, -1.0, sampled=4), rollout(0, None), rollout(1, 3.0), rollout(1, 3.0)]
    advantages = credit(rollouts, normalize_std=False, std_eps=0.0)
    assert advantages == [1.0, -1.0, None, 0.0, 0.0]
    metrics = rollout_metrics(rollouts, credit_report(rollouts, advantages))
    assert metrics["reward/mean"] == metrics["reward/return"] == 1.5
    assert metrics["rollout/sampled_tokens"] == 2 + 4 + 2 + 2
    assert (metrics["rollout/failed"], metrics["rollout/completed"], metrics["rollout/failed_fraction"]) == (1, 4, 0.2)
    assert metrics["rollout/degenerate_groups"] == 0.5
    times = [metrics[f"time/{name}"] for name in ("episode", "episode_max", "episode_environment", "episode_scoring")]
    assert times == [1.5, 2.0, 0.0, 0.5]


def test_a_run_must_improve() -> None:
    check_improvement([0.0] * 10 + [0.1] * 10)
    with pytest.raises(RunFailed, match="no improvement: mean return 0.000 over the last 10 steps, 0.000 over the first 10"):
        check_improvement([0.0] * 20)
