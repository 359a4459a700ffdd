"""FSDP shards of small and large worlds, split as torch does."""

from pathlib import Path

import pytest
import torch

from megatron_rl.weights.formats.fsdp import FsdpTensors
from tests.support.foreign_checkpoints import write_fsdp

TENSORS = {
    "even": torch.arange(96, dtype=torch.float32).reshape(24, 4),
    "uneven": torch.arange(51, dtype=torch.bfloat16).reshape(17, 3),
    "short": torch.arange(5, dtype=torch.float32),
}
"""Tensors with rows divisible by 12 ranks, rows not divisible by 12, and fewer rows than ranks."""


@pytest.mark.parametrize("mesh_shape", [(2,), (11,), (12,), (2, 6), (2, 11)])
def test_parts_stand_in_the_order_of_their_ranks(mesh_shape: tuple[int, ...], tmp_path: Path) -> None:
    """Shards are concatenated in the numeric order of ranks.

    With more than ten ranks the file names sort differently as text: rank_10 before rank_2.
    """
    write_fsdp(tmp_path / "actor", TENSORS, mesh_shape)
    read = FsdpTensors(tmp_path / "actor")
    assert read.specs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = read.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
