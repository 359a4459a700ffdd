"""Figures of a run, and the bands in which a new run is expected.

The band of a figure is a 99% prediction interval for one more run: mean +/- t * s * sqrt(1 + 1/n),
with the standard deviation s of the n runs in the history and Student's t for n - 1 degrees of
freedom (Hahn, Journal of Quality Technology 2, 1970). The half-width is at least the figure's
floor, because runs of a short history may be equal by accident, and at most its cap. Times and
mismatches have fixed factors: their floor is their cap. Entropies, times and mismatches are
compared as logarithms, because they vary by factors.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

LEVEL = 0.99
"""Probability that a run of the same distribution lies inside of one band."""
MIN_RUNS = 3
"""Smallest number of runs in a history."""
TAIL = 4
"""A figure of the start or the end of a run is the mean over 1/TAIL of its steps."""
StepMetrics = Sequence[Mapping[str, float]]


def mean_of_first(values: Sequence[float]) -> float:
    """Return the mean over the first quarter of the steps."""
    return statistics.fmean(values[: max(1, len(values) // TAIL)])


def mean_of_last(values: Sequence[float]) -> float:
    """Return the mean over the last quarter of the steps."""
    return statistics.fmean(values[-max(1, len(values) // TAIL) :])


def largest(values: Sequence[float]) -> float:
    """Return the maximum, which is NaN if any value is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def middle(values: Sequence[float]) -> float:
    """Return the median, which is NaN if any value is."""
    return math.nan if any(math.isnan(value) for value in values) else statistics.median(values)


@dataclass(slots=True, frozen=True, kw_only=True)
class Figure:
    """A number of a run, computed from one metric of all its steps."""

    metric: str
    reduce: Callable[[Sequence[float]], float]
    floor: float
    """Smallest half-width of the band: a difference, or the logarithm of a factor."""
    cap: float = math.inf
    """Largest half-width of the band, in the same unit."""
    is_log: bool = False
    """True if the band is symmetric in the logarithm."""
    has_lower_bound: bool = True
    """False if small values are never a fault."""


FIGURES: Mapping[str, Figure] = {
    "reward_first": Figure(metric="reward/mean", reduce=mean_of_first, floor=0.1),
    "reward_last": Figure(metric="reward/mean", reduce=mean_of_last, floor=0.1),
    "entropy_first": Figure(metric="policy/entropy", reduce=mean_of_first, floor=math.log(1.5), cap=math.log(3), is_log=True),
    "entropy_last": Figure(metric="policy/entropy", reduce=mean_of_last, floor=math.log(2), cap=math.log(10), is_log=True),
    "mismatch_max": Figure(
        metric="rollout_mismatch/logprob_abs_diff_max",
        reduce=largest,
        floor=math.log(10),
        cap=math.log(10),
        is_log=True,
        has_lower_bound=False,
    ),
    "step_seconds": Figure(metric="time/total", reduce=middle, floor=math.log(8), cap=math.log(8), is_log=True),
}


@dataclass(slots=True, frozen=True)
class Band:
    """Closed interval of a figure; NaN lies outside."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Return whether a value lies inside."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


def compute_figures(steps: StepMetrics) -> dict[str, float]:
    """Return the figures of a run from its lines of metrics.jsonl.

    Lines without rewards are left out.

    Raises:
        ValueError: no line has rewards, or a line lacks a metric.
    """
    trained = [line for line in steps if "reward/mean" in line]
    if not trained:
        raise ValueError("no line has reward/mean; give the directory of a run of stage=rl")
    found = {}
    for name, figure in FIGURES.items():
        lacking = [line["step"] for line in trained if figure.metric not in line]
        if lacking:
            raise ValueError(f"step {lacking[0]:.0f} has no {figure.metric}; this metric is needed for {name}")
        found[name] = figure.reduce([line[figure.metric] for line in trained])
    return found


def compute_band(name: str, values: Sequence[float]) -> Band:
    """Return the band of a figure from its values in the history.

    Raises:
        ValueError: there are fewer than MIN_RUNS values, or a value is not finite, or not positive
            where logarithms are compared.
    """
    figure, num = FIGURES[name], len(values)
    if num < MIN_RUNS:
        raise ValueError(f"{name}: the history has {num} runs; record at least {MIN_RUNS}")
    if not all(math.isfinite(value) and (value > 0 or not figure.is_log) for value in values):
        raise ValueError(f"{name}: the history has the values {list(values)}; remove the run with an invalid value")
    scaled = [math.log(value) for value in values] if figure.is_log else list(values)
    quantile = float(student_t.ppf((1 + LEVEL) / 2, num - 1))
    half = min(figure.cap, max(figure.floor, quantile * statistics.stdev(scaled) * math.sqrt(1 + 1 / num)))
    mean = statistics.fmean(scaled)
    low, high = (math.exp(mean - half), math.exp(mean + half)) if figure.is_log else (mean - half, mean + half)
    return Band(low if figure.has_lower_bound else -math.inf, high)
