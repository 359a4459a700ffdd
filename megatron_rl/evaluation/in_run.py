"""Evaluation: the same episodes on a task's evaluation split, greedy and at the training temperature."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config import Settings
from megatron_rl.observe.step_metrics import group_by_source
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.task import Task
from megatron_rl.run.failure_checks import make_failure, require_finite
from megatron_rl.types import Example, Rollout, Status


def evaluate_in_run(task: Task, settings: Settings, *, rollout_manager: RolloutManager) -> dict[str, float]:
    """Mean return and success over the evaluation examples, weighted as the task deals them where it says so.

    greedy: one episode an example, the most likely token each time. sampled: task.eval_samples episodes each, at algo.temperature.
    Whenever it takes place the episodes have the same seeds.
    """
    examples, max_turns = task.examples("eval"), settings.task.eval_max_turns or settings.task.max_turns
    metrics: dict[str, float] = {}
    for kind, temperature, samples in (("greedy", 0.0, 1), ("sampled", settings.algo.temperature, settings.task.eval_samples)):
        episode = replace(rollout_manager.episode_settings.at_step(-1), temperature=temperature, max_turns=max_turns)
        rollouts = rollout_manager.run_examples(examples, num_samples=samples, settings=episode)
        scores = compute_eval_scores(task, examples, rollouts, max_failed=settings.run.max_failed_fraction)
        metrics |= {f"eval/{kind}_{name}": value for name, value in scores.items()}
    return metrics


def compute_eval_scores(task: Task, examples: Sequence[Example], rollouts: list[Rollout], *, max_failed: float) -> dict[str, float]:
    """Weighted mean success, return, each part of the reward, share of episodes in which a tool ran, success on each data source, and the
    task's own figures.

    Group numbers are positions in `examples`. A part is a mean over the episodes that it has an opinion on.

    Over the episodes that were scored; where success is their plain mean, `episodes` is how many. Where a task says how often it deals an
    example, or works its success out, the examples are no sample. RunFailed when more than `max_failed` of them failed on our side, or no
    other is left; NonFiniteValue when one was rewarded what is no number: NaN is not above 0, and would be told as no success.
    """
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if len(failed) > max_failed * len(rollouts) or len(failed) == len(rollouts):
        line = f"evaluation: {len(failed)} of {len(rollouts)} episodes failed, run.max_failed_fraction={max_failed}"
        raise make_failure(failed, line, num=len(rollouts), limit=max_failed)
    require_finite(rollouts)
    scored = [rollout for rollout in rollouts if rollout.status is not Status.FAILED]
    weights = [1.0 if example.probability is None else example.probability for example in examples]
    total = sum(weights[rollout.group] for rollout in scored)
    success = sum(weights[rollout.group] * task.success(rollout) for rollout in scored)
    returns = sum(weights[rollout.group] * rollout.reward for rollout in scored)
    users = sum(weights[rollout.group] * rollout.used_tool for rollout in scored)
    shares = {"success": success / total, "return": returns / total, "tool_use": users / total}
    for name in dict.fromkeys(name for rollout in scored for name in rollout.reward_terms):
        judged = [(weights[rollout.group], rollout.reward_terms[name]) for rollout in scored if name in rollout.reward_terms]
        shares.setdefault(name, sum(weight * value for weight, value in judged) / sum(weight for weight, _ in judged))
    for name, of_source in group_by_source(scored).items():
        dealt = sum(weights[rollout.group] for rollout in of_source)
        shares[f"success/{name}"] = sum(weights[rollout.group] * task.success(rollout) for rollout in of_source) / dealt
    figures = task.extra_metrics(examples, scored)
    is_sample = "success" not in figures and all(example.probability is None for example in examples)
    counts = {"failed_fraction": len(failed) / len(rollouts), **({"episodes": len(scored)} if is_sample else {})}
    return {**shares, **figures, **counts}
