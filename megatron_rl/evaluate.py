"""Evaluation: the same episodes on a task's evaluation split, greedy and at the training temperature."""

from megatron_rl.config import Settings
from megatron_rl.rollout.collect import Crew, collect, evaluation_settings
from megatron_rl.tasks.base import Task
from megatron_rl.types import Example, Rollout, RunFailed, Status


def evaluate(task: Task, settings: Settings, *, crew: Crew) -> dict[str, float]:
    """Mean return and success over the evaluation examples, weighted as the task deals them where it says so.

    greedy: one episode an example, the most likely token each time. sampled: task.eval_samples episodes each, at algo.temperature.
    """
    examples = task.examples("eval")
    metrics: dict[str, float] = {}
    for kind, temperature, samples in (("greedy", 0.0, 1), ("sampled", settings.algo.temperature, settings.task.eval_samples)):
        how = evaluation_settings(settings, temperature=temperature)
        rollouts = collect(task, examples, crew=crew, samples=samples, settings=how)
        metrics |= {f"eval/{kind}_{name}": value for name, value in summarize(task, examples, rollouts).items()}
    return metrics


def summarize(task: Task, examples: list[Example], rollouts: list[Rollout]) -> dict[str, float]:
    """Weighted mean success, return and share of episodes in which a tool ran; group numbers are positions in `examples`.

    Failed rollouts are an error: a score needs all.
    """
    failed = [rollout.reason for rollout in rollouts if rollout.status is Status.FAILED]
    if failed:
        raise RunFailed(f"evaluation: {len(failed)} of {len(rollouts)} episodes failed on our side, first: {failed[0]}")
    weights = [1.0 if example.probability is None else example.probability for example in examples]
    total = sum(weights[rollout.group] for rollout in rollouts)
    success = sum(weights[rollout.group] * task.success(rollout) for rollout in rollouts)
    returns = sum(weights[rollout.group] * rollout.reward for rollout in rollouts)
    users = sum(weights[rollout.group] * rollout.used_tool for rollout in rollouts)
    return {"success": success / total, "return": returns / total, "tool_use": users / total}
