"""Pads the vocabulary to a multiple of the tensor-parallel size (name_mapping.padded_vocab).

Padding rows are appended after the rows of the vocabulary. The padding rows stay zero, because they
are initialized to zero, are never looked up or sampled, and have no gradient. Checkpoints contain
no padding rows, so checkpoints can be read with any parallel layout.
"""

from dataclasses import replace
from typing import TypeVar, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import nn

Part = TypeVar("Part")

PADDED_KEYS = ("language.embedding.word_embeddings.weight", "language.output_layer.weight")
"""Keys of the tensors with one row per vocabulary entry."""


def strip_padding(weights: ShardedStateDict, vocab_size: int) -> ShardedStateDict:
    """Return a model's sharded state dict without padding rows."""
    return cast("ShardedStateDict", dict_list_map_outplace(lambda part: strip_tensor_padding(part, vocab_size), weights))


def strip_tensor_padding(part: Part, vocab_size: int) -> Part:
    """Return a sharded tensor without its padding rows.

    Any object other than a padded vocabulary tensor is returned unchanged.
    """
    if not isinstance(part, ShardedTensor) or part.key not in PADDED_KEYS or part.global_shape[0] == vocab_size:
        return part
    rows = min(part.local_shape[0], vocab_size - part.global_offset[0])
    assert rows > 0, f"{part.key}: the shard from row {part.global_offset[0]} on is only padding, vocab_size={vocab_size}"
    assert part.data is not None
    # The shards of different ranks now differ in size, so they do not form a regular grid
    # (megatron-core 0.16.1, dist_checkpointing/mapping.py, has_regular_grid).
    return replace(
        part, data=part.data[:rows], local_shape=(rows, *part.local_shape[1:]), global_shape=(vocab_size, *part.global_shape[1:]),
        axis_fragmentations=None, allow_shape_mismatch=False,
    )  # fmt: skip


def add_padding(weights: dict[str, torch.Tensor], num_rows: int) -> dict[str, torch.Tensor]:
    """Return loaded weights with padding rows of zeros appended.

    `num_rows` is the number of rows on this rank, including padding.
    """
    return {name: nn.functional.pad(w, (0, 0, 0, num_rows - len(w))) if name in PADDED_KEYS else w for name, w in weights.items()}
