"""The state that a run carries from step to step; checkpoints contain it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.types import Rollout, StopReason


@dataclass(slots=True, kw_only=True)
class History:
    """State that a run carries from step to step, except for the weights.

    The history is the same on every rank.
    """

    returns: list[float] = field(default_factory=list)
    """Mean reward of the scored rollouts of each step."""
    num_generation_batches: int = 0
    """Number of prompt batches scheduled so far. The prompt sampler of a resumed run skips these
    batches.
    """
    in_flight_prompts: list[int] = field(default_factory=list)
    """Indices of prompts that were scheduled but not yet trained on, in scheduling order. With
    run.max_staleness > 0, episodes of these prompts may still be running. The next attempt
    schedules these prompts first.
    """
    prompts: dict[str, list[float]] = field(default_factory=dict)
    """Maps each example id to [number of scored episodes, sum of these episodes' rewards, last step
    with a scored episode].
    """
    num_learning_steps: int = 0
    """Number of steps with at least one nonzero advantage."""
    bad_examples: dict[str, str] = field(default_factory=dict)
    """Maps each example id to the first permanent error (StopReason.PERMANENT_INFRA_ERROR)."""
    judge: dict[str, int] = field(default_factory=dict)
    """Judge counters summed over all steps: the counters of observe/judge_stats.py, the number of
    scored answers, and the number of answers that the judge decided. Empty without a judge.
    """
    kl_coef: float | None = None
    """KL coefficient for the next step if algo.kl_target is set; None before the first adaptation.
    """
    pending_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of a step that was trained but is not yet recorded, for example because the run
    stopped during the evaluation after the step. Empty if all trained steps are recorded.
    """

    def add(self, step: int, rollouts: Sequence[Rollout], *, num_new_batches: int, unfinished_prompts: Sequence[int] = ()) -> None:
        """Update the history with the rollouts of a step."""
        self.returns.append(statistics.fmean(rollout.reward for rollout in rollouts if rollout.reward is not None))
        self.num_generation_batches += num_new_batches
        self.in_flight_prompts = list(unfinished_prompts)
        for rollout in rollouts:
            if rollout.reward is not None:
                episodes, rewards, _ = self.prompts.get(rollout.example_id, (0, 0.0, 0))
                self.prompts[rollout.example_id] = [episodes + 1, rewards + rollout.reward, step]
            if rollout.stop_reason is StopReason.PERMANENT_INFRA_ERROR:
                self.bad_examples.setdefault(rollout.example_id, rollout.reason)
