"""What was looked at and what was found, and what is normal for a precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

LAYER = 5e-5
"""Of a row's length, that two float32 forward passes of one layer may differ by; 1e-6 is typical."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Bound:
    """What is normal for logprobs of sampled tokens: the largest difference to a float32 forward pass of Hugging Face's, the 99th of a
    hundred, the mean (docs/numerics.md, docs/debugging.md)."""

    largest: float = float("inf")
    p99: float = float("inf")
    mean: float = float("inf")

    @property
    def token(self) -> float:
        """What one token may differ by before it is called the first that differs."""
        return min(self.largest, self.p99)

    @property
    def is_of_each(self) -> bool:
        """Whether every token has a bound, so narrow that one within it agrees."""
        return bool(np.isfinite(self.largest))

    def holds(self, gaps: Sequence[float]) -> bool:
        if not gaps:
            return True
        p99, sums = float(np.quantile(gaps, 0.99)), (max(gaps), float(np.mean(gaps)))
        return bool(np.isfinite(gaps).all()) and sums[0] <= self.largest and p99 <= self.p99 and sums[1] <= self.mean

    def __str__(self) -> str:
        named = {"largest": self.largest, "p99": self.p99, "mean": self.mean}
        return ", ".join(f"{name} {value:g}" for name, value in named.items() if np.isfinite(value))


BOUNDS = {"float32": Bound(largest=1e-4), "bfloat16": Bound(p99=0.5, mean=0.05)}


@dataclass(slots=True)
class Checked:
    """One thing that was looked at."""

    name: str
    num: int = 0
    """How often."""
    unit: str = "contexts"
    found: list[str] = field(default_factory=list)
    """A line for each thing that is wrong."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Compared:
    """Two who say something of the same sampled tokens."""

    name: str
    gaps: Sequence[float]
    bound: Bound
    first: str = ""
    """The first token that differs, in words."""

    @property
    def is_normal(self) -> bool:
        return self.bound.holds(self.gaps)


@dataclass(slots=True)
class Page:
    """All that is said."""

    title: list[str]
    checks: list[Checked] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    """Where two networks first differ."""
    explained: list[str] = field(default_factory=list)
    """What would make the numbers that differ."""
    skipped: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        return any(each.found for each in self.checks) or any(not each.is_normal for each in self.compared) or bool(self.layers)


def relative_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """By how much of its length each row differs: [rows]. What is all but zero is held against the rows' mean length."""
    one, other = (each.detach().double().flatten(1) for each in (one, other))
    lengths = other.norm(dim=1)
    return (one - other).norm(dim=1) / lengths.clamp(min=max(0.1 * lengths.mean().item(), 1e-30))
