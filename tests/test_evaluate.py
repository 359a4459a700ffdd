"""An evaluation's numbers from rollouts made by hand; failures of ours are in none of them."""

import pytest

from megatron_rl.evaluate import summarize
from megatron_rl.types import Example, Rollout, RunFailed, Status


class Positive:
    def success(self, rollout: Rollout) -> bool:
        return rollout.reward > 0


EXAMPLES = [Example("a", {}, probability=0.25), Example("b", {}, probability=0.75)]


def rollout(group: int, reward: float | None) -> Rollout:
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Rollout(task="t", example_id="e", group=group, sample=0, weight_version=0, status=status, reward=reward, reason="judge: 429")


def test_weights_are_those_of_the_scored() -> None:
    rollouts = [rollout(0, 2.0), rollout(0, None), rollout(1, -1.0), rollout(1, 1.0)]
    # 2 of weight 1/4, then -1 and 1 of weight 3/4: total 7/4
    scores = summarize(Positive(), EXAMPLES, rollouts, max_failed=0.25)
    assert scores == pytest.approx({"success": 1.0 / 1.75, "return": 0.5 / 1.75, "tool_use": 0.0, "failed_fraction": 0.25})


def test_too_many_failures_are_no_score() -> None:
    with pytest.raises(RunFailed, match="1 of 2 episodes failed, run.max_failed=0.1; first reason: judge: 429"):
        summarize(Positive(), EXAMPLES, [rollout(0, None), rollout(1, 1.0)], max_failed=0.1)
    with pytest.raises(RunFailed, match="2 of 2"):
        summarize(Positive(), EXAMPLES, [rollout(0, None)] * 2, max_failed=0.99)
