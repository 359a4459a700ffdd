"""Counts the judge requests of a run for per-step metrics and a summary line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatron_rl.types import Rollout

COUNTERS = ("called", "cached", "failed")
"""Names of the counters: results from a server, results from the cache, and failed requests."""
Counts = dict[str, int]


class CountedJudge(Protocol):
    """Subset of a judge's interface that JudgeStats uses."""

    model: str

    def get_counts(self) -> Counts:
        """Return the counts since this process started, keyed by the names in COUNTERS."""
        ...


class JudgeStats:
    """Sums the judge counters of all processes.

    The run stores `total`, the sum over all its attempts, in `History.judge`.
    """

    def __init__(self, judge: CountedJudge, *, gather: Callable[[Counts], Sequence[Counts]]) -> None:
        """Create the statistics. `gather` returns the counts of all ranks, on every rank."""
        self._judge, self._gather = judge, gather
        self._before = dict.fromkeys(COUNTERS, 0)

    def collect(self, total: Counts) -> dict[str, float]:
        """Return the counts since the last call as metrics, and add them to `total`.

        All ranks must call this method together.
        """
        now = self._judge.get_counts()
        parts = self._gather({name: now[name] - self._before[name] for name in COUNTERS})
        self._before = now
        return {f"judge/{name}": float(_add(total, name, sum(part[name] for part in parts))) for name in COUNTERS}

    def record_decided(self, rollouts: Sequence[Rollout], total: Counts) -> dict[str, float]:
        """Return the fraction of scored rollouts with a judge result in their reward.

        The number of these rollouts and the number of all scored rollouts are added to `total`.
        """
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        num = _add(total, "decided", sum(any(each.is_reward for each in rollout.verdicts) for rollout in scored))
        return {"judge/decided_fraction": num / max(_add(total, "answers", len(scored)), 1)}

    def format_summary(self, total: Mapping[str, int]) -> str:
        """Return the summary line for the end of a run."""
        called, cached, failed, answers = (total.get(name, 0) for name in (*COUNTERS, "answers"))
        name = f"judge {self._judge.model}".rstrip()
        if not called + cached + failed:
            remedy = "task.judge.always_ask=true sends every answer to the judge"
            return f"warning: {name} is configured but was never called: rules decided all {answers} answers; {remedy}"
        share = f"; the judge decided {total.get('decided', 0) / answers:.0%} of {answers} answers" if answers else ""
        return f"{name}: {called} verdicts requested, {cached} cached, {failed} requests failed{share}"


def _add(total: Counts, name: str, value: int) -> int:
    total[name] = total.get(name, 0) + value
    return value
