"""Evaluation on the task's evaluation split during training."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config import Settings
from megatron_rl.observe.step_metrics import group_by_source, reward_of
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.task import Task
from megatron_rl.run.failure_checks import make_failure, require_finite
from megatron_rl.types import Example, Rollout, Status


def evaluate_in_run(task: Task, settings: Settings, *, rollout_manager: RolloutManager) -> dict[str, float]:
    """Return the mean return, the success rate and other scores on the evaluation examples.

    The metrics `eval/greedy_*` are computed from one greedily decoded episode per example. The
    metrics `eval/sampled_*` are computed from task.eval_samples episodes per example, sampled at
    temperature algo.temperature; there are none if it is 0. If the task defines probabilities for
    examples, each example is weighted by its probability. Every evaluation uses the same seeds.
    """
    examples, max_turns = task.examples("eval"), settings.task.eval_max_turns or settings.task.max_turns
    passes = [("greedy", 0.0, 1)]
    if settings.task.eval_samples:
        passes.append(("sampled", settings.algo.temperature, settings.task.eval_samples))
    metrics: dict[str, float] = {}
    for kind, temperature, samples in passes:
        episode = replace(rollout_manager.episode_settings.at_step(-1), temperature=temperature, max_turns=max_turns)
        rollouts = rollout_manager.run_examples(examples, num_samples=samples, settings=episode)
        scores = compute_eval_scores(task, examples, rollouts, max_failed=settings.run.max_failed_fraction)
        metrics |= {f"eval/{kind}_{name}": value for name, value in scores.items()}
    return metrics


def compute_eval_scores(task: Task, examples: Sequence[Example], rollouts: list[Rollout], *, max_failed: float) -> dict[str, float]:
    """Return the weighted mean scores of the scored rollouts.

    The scores are success, return, tool use (fraction of episodes that ran a tool), each reward
    term, success by data source, and the task's extra metrics. A reward term is averaged over the
    episodes in which it did not abstain. The score `episodes`, the number of scored rollouts, is
    included only if success is the unweighted mean over these rollouts. If examples have a
    probability or the task computes success itself, `episodes` is omitted, because the rollouts are
    then not a random sample.

    Args:
        task: Task of the rollouts.
        examples: Examples of the evaluation; `Rollout.group` is an index into this list.
        rollouts: Rollouts of all examples, including failed ones.
        max_failed: Maximum fraction of failed rollouts.

    Raises:
        RunFailed: The fraction of failed rollouts is above `max_failed`, or all rollouts failed.
        NonFiniteValue: A reward is not finite. Without this check, NaN would count as no success,
            because it is not above 0.
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
    returns = sum(weights[rollout.group] * reward_of(rollout) for rollout in scored)
    users = sum(weights[rollout.group] * rollout.used_tool for rollout in scored)
    shares = {"success": success / total, "return": returns / total, "tool_use": users / total}
    for name in dict.fromkeys(name for rollout in scored for name in rollout.reward_terms):
        judged = [(weights[rollout.group], rollout.reward_terms[name]) for rollout in scored if name in rollout.reward_terms]
        shares.setdefault(name, sum(weight * value for weight, value in judged) / sum(weight for weight, _ in judged))
    for name, of_source in group_by_source(scored).items():
        source_weight = sum(weights[rollout.group] for rollout in of_source)
        shares[f"success/{name}"] = sum(weights[rollout.group] * task.success(rollout) for rollout in of_source) / source_weight
    figures = task.extra_metrics(examples, scored)
    is_sample = "success" not in figures and all(example.probability is None for example in examples)
    counts = {"failed_fraction": len(failed) / len(rollouts), **({"episodes": len(scored)} if is_sample else {})}
    return {**shares, **figures, **counts}
