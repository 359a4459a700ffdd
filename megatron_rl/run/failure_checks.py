"""Checks that stop a run on failures, non-finite values, logprob mismatch or no improvement."""

import math
import statistics
from collections.abc import Mapping, Sequence

from megatron_rl.config import Settings
from megatron_rl.errors import InfraOutage, LogprobMismatch, NonFiniteValue, RunFailed
from megatron_rl.observe.step_metrics import mean_logprob_abs_diff
from megatron_rl.types import Rollout, Status, StopReason

MAX_LOGPROB_ABS_DIFF = {"float32": 1e-3, "bfloat16": 5e-2}
"""Upper bound on the mean absolute difference between engine and trainer logprobs, keyed by the
less precise of their two dtypes. Differences caused by rounding alone are below this bound
(measurements in docs/numerics.md).
"""
_CAUSES = (
    "likely causes: a part of the model that one of them does not implement (rope scaling, sliding window), a server with other weights, "
    "another temperature, other image sizes"
)


def check_failures(rollouts: list[Rollout], *, limit: float) -> None:
    """Check that at most the fraction `limit` of a step's rollouts failed.

    Raises:
        RunFailed: Too many rollouts failed. The error is built by `make_failure`.
    """
    failed, num = [rollout for rollout in rollouts if rollout.status is Status.FAILED], len(rollouts)
    if len(failed) > limit * num:
        raise make_failure(failed, f"{len(failed)} of {num} rollouts failed, above run.max_failed_fraction={limit}", num=num, limit=limit)


def make_failure(failed: Sequence[Rollout], line: str, *, num: int, limit: float) -> RunFailed:
    """Return the error to raise if more than the fraction `limit` of `num` rollouts failed.

    The error is a RunFailed if permanent failures (StopReason.PERMANENT_INFRA_ERROR) alone exceed
    the limit, and an InfraOutage otherwise.
    """
    lasting = [rollout.reason for rollout in failed if rollout.stop_reason is StopReason.PERMANENT_INFRA_ERROR]
    if len(lasting) > limit * num or len(lasting) == num:
        return RunFailed(f"{line}; first reason: {lasting[0]}")
    first = next(rollout.reason for rollout in failed if rollout.stop_reason is not StopReason.PERMANENT_INFRA_ERROR)
    return InfraOutage(f"{line}; first reason: {first}; the same command resumes the run")


def require_finite(rollouts: list[Rollout]) -> None:
    """Check that all rewards and all logprobs from the engine are finite.

    Raises:
        NonFiniteValue: A reward or a logprob is not finite. A non-finite logprob means that the
            engine serves broken weights.
    """
    for rollout in rollouts:
        name = f"{rollout.example_id}#{rollout.sample_index}"
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            raise NonFiniteValue(f"task={rollout.task}: {name} has the reward {rollout.reward}; fix its reward function")
        for number, context in enumerate(rollout.sequences):
            for place, logprob in enumerate(context.rollout_logprobs):
                if not math.isfinite(logprob):
                    raise NonFiniteValue(f"the engine's logprob of token {place} of sequence {number} of {name} is {logprob}")


class MismatchCheck:
    """Compares engine and trainer logprobs in the first update that contains on-policy tokens.

    The check runs once per attempt.
    """

    def __init__(self, settings: Settings) -> None:
        """Create the check.

        The check is disabled in replays, because other weights may have sampled the tokens.
        """
        self._accepted = settings.run.max_logprob_abs_diff
        self._dtype = "bfloat16" if "bfloat16" in (settings.model.dtype, settings.engine.dtype) else "float32"
        self._is_due = settings.run.mode != "replay"

    def __call__(self, update: Mapping[str, float]) -> None:
        """Check an update's metrics, reduced over all ranks, before the optimizer step.

        Raises:
            LogprobMismatch: The mean absolute logprob difference exceeds the bound.
        """
        if not self._is_due or update["tokens"] == 0 or update.get("rollout/on_policy_fraction") == 0:
            return
        self._is_due = False
        mean, largest = mean_logprob_abs_diff(update), update["rollout_mismatch/logprob_abs_diff_max"]
        bound = self._accepted or MAX_LOGPROB_ABS_DIFF[self._dtype]
        if not mean <= bound:  # also true for NaN
            source = "run.max_logprob_abs_diff" if self._accepted else f"of {self._dtype}"
            raise LogprobMismatch(
                f"engine and trainer differ: the mean absolute logprob difference over the sampled tokens is {mean:.2g} (largest "
                f"{largest:.2g}), above the bound {bound:g} ({source}); nothing was updated; {_CAUSES}"
            )


def check_improvement(returns: list[float]) -> None:
    """Check that the mean return of the last 10 steps exceeds the mean of the first 10 steps.

    Raises:
        RunFailed: The mean return did not increase.
    """
    first, last = statistics.fmean(returns[:10]), statistics.fmean(returns[-10:])
    if last <= first:
        raise RunFailed(f"no improvement: mean return {last:.3f} over the last 10 steps, {first:.3f} over the first 10")
