"""Functions of the user that are called during training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.distributed.world import run_on_rank_zero

Callback = Callable[[int, Mapping[str, float]], object]
"""Function of (number of completed steps, metrics); returning True ends training early."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Callbacks:
    """Functions that are called on rank 0 after a step and after an evaluation.

    Example: stop as soon as the evaluation is good enough.

        Callbacks(after_evaluation=lambda step, scores: scores["greedy_success"] > 0.9)
    """

    after_step: Callback | None = None
    """Receives the metrics of the step, as in metrics.jsonl."""
    after_evaluation: Callback | None = None
    """Receives the scores of an evaluation, as in eval.json, after the call of `after_step`."""

    def call(self, step: int, metrics: Mapping[str, float], *, has_step: bool = True) -> bool:
        """Call the functions; return True on every rank if one of them returned True.

        Args:
            step: Number of completed steps.
            metrics: Metrics of the step, and `eval/` metrics if an evaluation was run.
            has_step: False after the final evaluation, which belongs to no step.
        """
        scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        due = [(self.after_step, metrics)] if has_step else []
        due += [(self.after_evaluation, scores)] if scores else []
        called = [(function, given) for function, given in due if function is not None]
        if not called:
            return False
        return run_on_rank_zero(lambda: any([function(step, given) is True for function, given in called]))


NO_CALLBACKS = Callbacks()
