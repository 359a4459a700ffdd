"""The result of a run, as the commands print it and the Python interface returns it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.run.paths import FINAL_FOLDER


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    """Result of a run, the same on every rank."""

    folder: Path
    step: int
    """Number of completed steps."""
    num_steps: int
    metrics: dict[str, float]
    """Scores of the last evaluation, such as greedy_success, as in eval.json. If the run stopped
    early, these are the scores of the last evaluation in this attempt; empty without an evaluation.
    """
    is_finished: bool
    """False if the run stopped early. A run that stopped early can be resumed with the same
    settings.
    """
    is_new: bool = True
    """False if the run was already finished and this call did nothing."""
    reason: str = ""
    """Message of the InfraOutage that stopped the run; empty if no outage stopped it."""

    def __str__(self) -> str:
        if not self.is_finished:
            return f"stopped at step {self.step} of {self.num_steps}; {self.reason or 'the same command resumes the run'}"
        left = self.folder / FINAL_FOLDER if (self.folder / FINAL_FOLDER).exists() else self.folder
        if self.step < self.num_steps:
            return f"ended by a callback at step {self.step} of {self.num_steps}: {describe_evaluation(self.metrics)}; {left}"
        return f"{'done' if self.is_new else f'{self.folder} is finished'}: {describe_evaluation(self.metrics)}; {left}"


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Return evaluation scores as text, such as `greedy 83.3%, sampled 74.3%`."""
    rates = {kind: metrics.get(f"{kind}_success") for kind in ("greedy", "sampled")}
    return ", ".join(f"{kind} {rate:.1%}" for kind, rate in rates.items() if rate is not None) or "not evaluated"
