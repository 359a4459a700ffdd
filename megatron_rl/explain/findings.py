"""What was looked at and what was found, and what is normal for a precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

LAYER_TOLERANCE = 5e-5
"""Of a row's length, that two float32 forward passes of one layer may differ by; 1e-6 is typical."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LogprobTolerance:
    """What is normal for logprobs of sampled tokens: the largest difference to a float32 forward pass of Hugging Face's, the 99th of a
    hundred, the mean (docs/numerics.md, docs/debugging.md)."""

    max_abs: float = float("inf")
    p99: float = float("inf")
    mean: float = float("inf")

    @property
    def per_token(self) -> float:
        """What one token may differ by before it is called the first that differs."""
        return min(self.max_abs, self.p99)

    @property
    def is_per_token(self) -> bool:
        """Whether every token has a bound, so narrow that one within it agrees."""
        return bool(np.isfinite(self.max_abs))

    def is_within(self, abs_diffs: Sequence[float]) -> bool:
        if not abs_diffs:
            return True
        p99, sums = float(np.quantile(abs_diffs, 0.99)), (max(abs_diffs), float(np.mean(abs_diffs)))
        return bool(np.isfinite(abs_diffs).all()) and sums[0] <= self.max_abs and p99 <= self.p99 and sums[1] <= self.mean

    def __str__(self) -> str:
        named = {"largest": self.max_abs, "p99": self.p99, "mean": self.mean}
        return ", ".join(f"{name} {value:g}" for name, value in named.items() if np.isfinite(value))


TOLERANCES = {"float32": LogprobTolerance(max_abs=1e-4), "bfloat16": LogprobTolerance(p99=0.5, mean=0.05)}


@dataclass(slots=True)
class CheckResult:
    """One thing that was looked at."""

    name: str
    num_checked: int = 0
    """How often."""
    unit: str = "contexts"
    problems: list[str] = field(default_factory=list)
    """A line for each thing that is wrong."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LogprobComparison:
    """Two who say something of the same sampled tokens."""

    name: str
    abs_diffs: Sequence[float]
    tolerance: LogprobTolerance
    first_difference: str = ""
    """The first token that differs, in words."""

    @property
    def is_within_tolerance(self) -> bool:
        return self.tolerance.is_within(self.abs_diffs)


@dataclass(slots=True)
class FindingsPage:
    """All that is said."""

    title: list[str]
    checks: list[CheckResult] = field(default_factory=list)
    comparisons: list[LogprobComparison] = field(default_factory=list)
    layer_differences: list[str] = field(default_factory=list)
    """Where two networks first differ."""
    explanations: list[str] = field(default_factory=list)
    """What would make the numbers that differ."""
    skipped: list[str] = field(default_factory=list)

    @property
    def has_differences(self) -> bool:
        return (
            any(each.problems for each in self.checks)
            or any(not each.is_within_tolerance for each in self.comparisons)
            or bool(self.layer_differences)
        )


def relative_row_diffs(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """By how much of its length each row differs: [rows]. What is all but zero is held against the rows' mean length."""
    values, reference = (each.detach().double().flatten(1) for each in (values, reference))
    lengths = reference.norm(dim=1)
    return (values - reference).norm(dim=1) / lengths.clamp(min=max(0.1 * lengths.mean().item(), 1e-30))
