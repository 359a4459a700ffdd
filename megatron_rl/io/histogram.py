"""Counts in fixed bins on a log scale: those of micro-batches and ranks add up exactly, and a quantile is read off their sum.

Bin k holds what lies in (edge(k - 1), edge(k)], edge(k) = 2 ** (LOWEST + k / STEPS): a quantile is too large by 9% at most. The first bin
holds everything below, the last one everything above and what is no number.
"""

import math
from collections.abc import Mapping

import torch

MIN_EXPONENT, MAX_EXPONENT, BINS_PER_OCTAVE = -27, 7, 8
"""From 7e-9, under float32's own rounding of a logprob, to 128, in steps of an eighth of an octave."""
NUM_BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_OCTAVE + 2


def count_in_bins(value_R: torch.Tensor, *, mask_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return the number of these values, none negative, in each bin: int64 [NUM_BINS], on the device of value_R.

    mask_R (bool): count only where it holds. No host waits for a device.
    """
    place_R = ((value_R.log2() - MIN_EXPONENT) * BINS_PER_OCTAVE).ceil().nan_to_num(nan=math.inf).clamp(0, NUM_BINS - 1).long()
    return place_R.new_zeros(NUM_BINS).index_add_(0, place_R, torch.ones_like(place_R) if mask_R is None else mask_R.long())


def quantile(counts: Mapping[int, int], percent: int) -> float:
    """The upper edge of the bin of the smallest value that at least `percent` of all values do not exceed; counts by bin. 0 of nothing."""
    below, wanted = 0, -(-sum(counts.values()) * percent // 100)
    for place in sorted(counts):
        below += counts[place]
        if below >= wanted > 0:
            return math.inf if place == NUM_BINS - 1 else 2.0 ** (MIN_EXPONENT + place / BINS_PER_OCTAVE)
    return 0.0
