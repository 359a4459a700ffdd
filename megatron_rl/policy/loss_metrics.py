"""Copies the metrics of an update from the device and reduces them over micro-batches and ranks.

The metrics are sums, losses, maxima and histograms, and the results of checks for non-finite
numbers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import NonFiniteValue
from megatron_rl.io.histogram import quantile
from megatron_rl.types import LossMetrics

CollectedMetrics = dict[str, dict[str, Any]]
"""Host copy of LossMetrics, {field: {metric name: value}}. Values are floats; in the field
`histograms` they are lists of counts.
"""


def read_metrics(collected: Sequence[LossMetrics]) -> list[CollectedMetrics]:
    """Copy the metrics of all micro-batches to the host.

    Waits for the device only once, regardless of the number of micro-batches and metrics.
    """
    tables = [{each.name: getattr(metrics, each.name) for each in fields(metrics)} for metrics in collected]
    tensors = [number for table in tables for named in table.values() for number in named.values() if isinstance(number, torch.Tensor)]
    known = iter(torch.cat([tensor.double().reshape(-1) for tensor in tensors]).tolist() if tensors else [])

    def on_host(number: torch.Tensor | float) -> float | list[float]:
        if not isinstance(number, torch.Tensor):
            return number
        return next(known) if number.dim() == 0 else list(islice(known, number.numel()))

    return [{what: {name: on_host(number) for name, number in named.items()} for what, named in table.items()} for table in tables]


def nonfinite_error(collected: Sequence[CollectedMetrics]) -> str:
    """Return an error message for the first non-finite tensor or loss, or '' if all are finite."""
    for number, metrics in enumerate(collected):
        for name, is_finite in metrics["checks"].items():
            if not is_finite:
                return f"micro-batch {number}: {name} is not finite"
        if not math.isfinite(metrics["losses"]["loss"]):
            return f"micro-batch {number}: the loss is {metrics['losses']['loss']}"
    return ""


def reduce_metrics(collected: Sequence[CollectedMetrics], *, error: str) -> dict[str, float]:
    """Reduce metrics over micro-batches and all ranks.

    Sums, losses and histograms are added; for each maximum, the largest value is kept. Loss terms
    are then divided by the global denominator, and sums are divided by the number of sampled
    tokens. Each histogram is replaced by the metric NAME_p99, its 99th percentile.

    Tensor-parallel ranks other than the first must pass an empty `collected`, because their metrics
    are copies of the first rank's metrics. Raises NonFiniteValue on every rank if any rank passes a
    non-empty `error`.
    """
    sums: dict[str, float] = {}
    losses: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for metrics in collected:
        _add(sums, metrics["sums"])
        _add(losses, metrics["losses"])
        _update_maxima(maxima, metrics["maxima"])
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (sums, losses, maxima, _histograms(collected), error))
    for rank, (*_, theirs) in enumerate(gathered):
        if theirs:
            raise NonFiniteValue(f"rank {rank}, {theirs}")
    sums, losses, maxima = {}, {}, {}
    histograms: dict[str, Counter[int]] = {}
    for their_sums, their_losses, their_maxima, their_histograms, _ in gathered:
        _add(sums, their_sums)
        _add(losses, their_losses)
        _update_maxima(maxima, their_maxima)
        for name, counts in their_histograms.items():
            histograms.setdefault(name, Counter()).update(counts)
    p99 = {f"{name}_p99": min(quantile(counts, 99), maxima[f"{name}_max"]) for name, counts in histograms.items()}
    tokens, denominator = sums.pop("tokens"), max(sums.pop("denominator"), 1.0)
    means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
    return {**{name: value / denominator for name, value in losses.items()}, "tokens": tokens, **means, **p99, **maxima}


def _histograms(collected: Sequence[CollectedMetrics]) -> dict[str, dict[int, int]]:
    """Return {name: {bin: count}}, summed over micro-batches, without empty bins."""
    counts: dict[str, Counter[int]] = {}
    for numbers in collected:
        for name, bins in numbers["histograms"].items():
            counts.setdefault(name, Counter()).update({place: int(count) for place, count in enumerate(bins) if count})
    return {name: dict(each) for name, each in counts.items()}


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _update_maxima(maxima: dict[str, float], more: dict[str, float]) -> None:
    """Update the running maxima with the values in `more`.

    If any value is NaN, the maximum becomes NaN and stays NaN.
    """
    for name, value in more.items():
        known = maxima.get(name, value)
        maxima[name] = math.nan if math.isnan(value) or math.isnan(known) else max(known, value)
