"""Histograms with fixed bins on a log scale, which add up exactly over micro-batches and ranks.

A quantile is read from the sum. Bin k counts the values in (edge(k - 1), edge(k)] with edge(k) = 2
** (MIN_EXPONENT + k / BINS_PER_OCTAVE), so that a quantile is at most 9% too large. The first bin
has everything below; the last one has everything above, and NaN.
"""

import math
from collections.abc import Mapping

import torch

MIN_EXPONENT, MAX_EXPONENT, BINS_PER_OCTAVE = -27, 7, 8
"""Range of the bins from 7e-9, below float32's own rounding of a logprob, to 128, in steps of an
eighth of an octave.
"""
NUM_BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_OCTAVE + 2


def count_in_bins(value_R: torch.Tensor, *, mask_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return the number of values in each bin, int64 [NUM_BINS], on the device of value_R.

    The values are not negative. mask_R (bool) selects the values that count. The host does not wait
    for the device.
    """
    place_R = ((value_R.log2() - MIN_EXPONENT) * BINS_PER_OCTAVE).ceil().nan_to_num(nan=math.inf).clamp(0, NUM_BINS - 1).long()
    return place_R.new_zeros(NUM_BINS).index_add_(0, place_R, torch.ones_like(place_R) if mask_R is None else mask_R.long())


def quantile(counts: Mapping[int, int], percent: int) -> float:
    """Return the upper edge of the bin with the `percent` quantile; 0 without values.

    The quantile is the smallest value that at least `percent` of all values do not exceed. `counts`
    has the number of values by bin.
    """
    below, wanted = 0, -(-sum(counts.values()) * percent // 100)
    for place in sorted(counts):
        below += counts[place]
        if below >= wanted > 0:
            return math.inf if place == NUM_BINS - 1 else 2.0 ** (MIN_EXPONENT + place / BINS_PER_OCTAVE)
    return 0.0
