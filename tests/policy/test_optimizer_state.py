"""Splitting a range of a flat tensor into boxes of the tensor, against the flat tensor itself."""

import math

import pytest
import torch

from megatron_rl.policy.optimizer_state import split_into_boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 2), (2, 1, 3, 2)])
def test_every_stretch_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    """For every range of every shape, the entries of the boxes in order equal the range, and there
    are at most 2 * dimensions - 1 boxes."""
    entries = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(entries.numel() + 1):
        for stop in range(start, entries.numel() + 1):
            found = list(split_into_boxes(shape, start, stop))
            parts = [entries[tuple(map(slice, at, (a + b for a, b in zip(at, size, strict=True))))] for at, size in found]
            assert [tuple(part.shape) for part in parts] == [size for _, size in found]
            assert [entry for part in parts for entry in part.flatten().tolist()] == list(range(start, stop))
            assert len(found) <= 2 * len(shape) - 1


def test_the_example() -> None:
    """`split_into_boxes` returns the boxes in the example of its docstring."""
    assert list(split_into_boxes((3, 4), 2, 11)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
