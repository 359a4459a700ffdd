"""Running TIES merge of task vectors (arXiv 2306.01708), in one pass over the checkpoints.

A task vector is the change of a checkpoint's weights since the start. TIES keeps the entries with
the largest magnitudes of each task vector, elects the sign with the larger weighted sum for each
entry, and averages the values with this sign. The sums of positive and of negative values and of
their weights are enough for this, so that checkpoints need not be kept.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

BUFFERS = ("positive", "negative", "positive_weight", "negative_weight")
"""Names of the sums per entry: weighted magnitudes of positive and of negative values, and their
weights.
"""
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and number of bits of each digit of the bit pattern of a non-negative float32 number."""
_PIECE = 1 << 24
"""Number of entries that are counted at once."""


def add_task_vector(sums: dict[str, torch.Tensor], change: torch.Tensor, *, weight: float, threshold: float) -> None:
    """Add one tensor's change to its sums, in place.

    `weight` is the weight of the change; the sums so far have the weight 1 - `weight`. Entries with
    a magnitude below `threshold` are trimmed.
    """
    kept = change.where(change.abs() >= threshold, 0.0)
    for side, values in (("positive", kept.clamp(min=0)), ("negative", kept.neg().clamp_(min=0))):
        sums[f"{side}_weight"].lerp_((values > 0).float(), weight)
        sums[side].lerp_(values, weight)


def merged_change(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the merged change: the weighted mean of the values with the elected sign.

    If both signs have the same sum, the positive sign is elected. An entry that was trimmed in
    every checkpoint does not change.
    """
    positive, negative, positive_weight, negative_weight = (sums[name] for name in BUFFERS)
    means = [side / weight.where(weight > 0, 1.0) for side, weight in ((positive, positive_weight), (negative, negative_weight))]
    return means[0].where(positive >= negative, -means[1])


def find_threshold(tensors: Callable[[], Iterator[torch.Tensor]], num_kept: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the magnitude of the `num_kept`-th largest entry of all ranks of a group.

    The result is exact. Ranks exchange histograms of one digit of the magnitudes' bit patterns at a
    time, because the bit patterns of non-negative float32 numbers have the order of the numbers.

    Args:
        tensors: Function that returns this rank's float32 tensors; called once for each digit. An
            entry that several ranks hold must be returned on one of them only.
        num_kept: Number of entries to keep, at least 1 and at most the number of all entries.
        group: Process group of the ranks.
        device: Device of the exchanged histograms.
    """
    prefix, remaining = 0, num_kept
    for shift, bits in _DIGITS:
        counts = torch.zeros(1 << bits, dtype=torch.int64)
        for tensor in tensors():
            for piece in tensor.flatten().split(_PIECE):
                codes = piece.abs().view(torch.int32)
                codes = codes[codes >> (shift + bits) == prefix]
                counts += torch.bincount((codes >> shift) & ((1 << bits) - 1), minlength=1 << bits)
        counts = counts.to(device)
        dist.all_reduce(counts, group=group)
        num_at_least = counts.cpu().flip(0).cumsum(0)
        place = int((num_at_least < remaining).sum())
        remaining -= int(num_at_least[place - 1]) if place else 0
        prefix = (prefix << bits) | ((1 << bits) - 1 - place)
    return torch.tensor(prefix, dtype=torch.int32).view(torch.float32).item()
