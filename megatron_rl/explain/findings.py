"""Results of checks and comparisons, and tolerances for each precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

LAYER_TOLERANCE = 5e-5
"""Maximum relative difference of a row between two float32 forward passes of one layer.

A typical difference is 1e-6.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class LogprobTolerance:
    """Tolerance for the logprobs of sampled tokens.

    The reference is a float32 forward pass of Hugging Face's model. The limits apply to the largest
    difference, the 99th percentile and the mean (docs/numerics.md, docs/debugging.md).
    """

    max_abs: float = float("inf")
    p99: float = float("inf")
    mean: float = float("inf")

    @property
    def per_token(self) -> float:
        """Difference above which a single token counts as differing."""
        return min(self.max_abs, self.p99)

    @property
    def is_per_token(self) -> bool:
        """True if the limit per token is tight enough to prove that a single token agrees."""
        return bool(np.isfinite(self.max_abs))

    def is_within(self, abs_diffs: Sequence[float]) -> bool:
        """Return True if the absolute differences are within all limits."""
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
    """Result of one check."""

    name: str
    num_checked: int = 0
    """Number of checked items."""
    unit: str = "contexts"
    problems: list[str] = field(default_factory=list)
    """One line per problem."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LogprobComparison:
    """Compares one implementation's logprobs of the sampled tokens with the reference logprobs."""

    name: str
    abs_diffs: Sequence[float]
    tolerance: LogprobTolerance
    first_difference: str = ""
    """Description of the first token that differs."""

    @property
    def is_within_tolerance(self) -> bool:
        """True if the differences are within the tolerance."""
        return self.tolerance.is_within(self.abs_diffs)


@dataclass(slots=True)
class FindingsPage:
    """All findings about a step."""

    title: list[str]
    checks: list[CheckResult] = field(default_factory=list)
    comparisons: list[LogprobComparison] = field(default_factory=list)
    layer_differences: list[str] = field(default_factory=list)
    """For each implementation that differs, a description of its first differing layer."""
    explanations: list[str] = field(default_factory=list)
    """Hypotheses that reproduce the differing logprobs of an implementation."""
    skipped: list[str] = field(default_factory=list)

    @property
    def has_differences(self) -> bool:
        """True if a check, a comparison or a layer shows a difference."""
        return (
            any(each.problems for each in self.checks)
            or any(not each.is_within_tolerance for each in self.comparisons)
            or bool(self.layer_differences)
        )


def relative_row_diffs(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the relative difference of each row, as a tensor [rows].

    For a row that is almost zero, the difference is relative to a tenth of the mean norm of all
    rows.
    """
    values, reference = (each.detach().double().flatten(1) for each in (values, reference))
    lengths = reference.norm(dim=1)
    return (values - reference).norm(dim=1) / lengths.clamp(min=max(0.1 * lengths.mean().item(), 1e-30))
