"""Checks that end a run: too many failed rollouts, numbers that are not finite, no improvement."""

import math
import statistics
from collections.abc import Sequence

from megatron_rl.types import End, NotFinite, Outage, Rollout, RunFailed, Status


def check_failures(rollouts: list[Rollout], *, limit: float) -> None:
    """End the run when more than `limit` of a step's rollouts failed through our own fault."""
    failed, num = [rollout for rollout in rollouts if rollout.status is Status.FAILED], len(rollouts)
    if len(failed) > limit * num:
        raise failure_of(failed, f"{len(failed)} of {num} rollouts failed, above run.max_failed={limit}", num=num, limit=limit)


def failure_of(failed: Sequence[Rollout], line: str, *, num: int, limit: float) -> RunFailed:
    """What ends a run of whose `num` rollouts these failed, more than `limit` of them: an Outage, unless those that no waiting mends
    (End.LASTING_FAULT) are enough for it."""
    lasting = [rollout.reason for rollout in failed if rollout.end is End.LASTING_FAULT]
    if len(lasting) > limit * num or len(lasting) == num:
        return RunFailed(f"{line}; first reason: {lasting[0]}")
    first = next(rollout.reason for rollout in failed if rollout.end is not End.LASTING_FAULT)
    return Outage(f"{line}; first reason: {first}; the same command goes on")


def require_finite(rollouts: list[Rollout]) -> None:
    """NotFinite: a reward is no number, or an engine's logprob is none: the weights that it serves are broken."""
    for rollout in rollouts:
        name = f"{rollout.example_id}#{rollout.sample}"
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            raise NotFinite(f"task={rollout.task}: {name} was rewarded {rollout.reward}; mend its reward function")
        for number, context in enumerate(rollout.contexts):
            for place, logprob in enumerate(context.engine_logprobs):
                if not math.isfinite(logprob):
                    raise NotFinite(f"the engine's logprob of token {place} of context {number} of {name} is {logprob}")


def check_improvement(returns: list[float]) -> None:
    """End the run with an error unless its last 10 steps return more than its first 10."""
    first, last = statistics.fmean(returns[:10]), statistics.fmean(returns[-10:])
    if last <= first:
        raise RunFailed(f"no improvement: mean return {last:.3f} over the last 10 steps, {first:.3f} over the first 10")
