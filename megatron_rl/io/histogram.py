"""Histograms with fixed log-scale bins, which can be summed over micro-batches and ranks.

The sum is exact, and quantiles are computed from the summed bins. Bin k counts the values in
(edge(k - 1), edge(k)] with edge(k) = 2 ** (MIN_EXPONENT + k / BINS_PER_OCTAVE). A computed quantile
therefore exceeds the true quantile by at most 9%. The first bin counts all values up to edge(0);
the last bin counts all values above the largest edge, and NaN.
"""

import math
from collections.abc import Mapping

import torch

MIN_EXPONENT, MAX_EXPONENT, BINS_PER_OCTAVE = -27, 7, 8
"""Base-2 exponents of the smallest and largest edge, and number of bins per octave. The edges range
from 7e-9, which is below the float32 rounding error of a logprob, to 128.
"""
NUM_BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_OCTAVE + 2


def count_in_bins(value_R: torch.Tensor, *, mask_R: torch.Tensor | None = None) -> torch.Tensor:
    """Count the values in each bin; return int64 [NUM_BINS] on the device of value_R.

    The values must not be negative. mask_R (bool) selects the values to count. The function does
    not synchronize the host with the device.
    """
    place_R = ((value_R.log2() - MIN_EXPONENT) * BINS_PER_OCTAVE).ceil().nan_to_num(nan=math.inf).clamp(0, NUM_BINS - 1).long()
    return place_R.new_zeros(NUM_BINS).index_add_(0, place_R, torch.ones_like(place_R) if mask_R is None else mask_R.long())


def quantile(counts: Mapping[int, int], percent: int) -> float:
    """Return the upper edge of the bin that contains a quantile, or 0 if there are no values.

    The quantile is the smallest value v for which at least `percent` percent of all values are at
    most v. `counts` maps each bin index to the number of values in the bin. The result is infinity
    if the quantile is in the last bin.
    """
    below, wanted = 0, -(-sum(counts.values()) * percent // 100)
    for place in sorted(counts):
        below += counts[place]
        if below >= wanted > 0:
            return math.inf if place == NUM_BINS - 1 else 2.0 ** (MIN_EXPONENT + place / BINS_PER_OCTAVE)
    return 0.0
