"""Padding of the vocabulary where tensor parallelism does not divide it (mapping.padded_vocab): rows of zeros behind it that no token looks
up and that are never sampled. They have no gradient and stay zeros. Nothing of them is written: a checkpoint is read at every layout."""

from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import nn

PADDED_KEYS = ("language.embedding.word_embeddings.weight", "language.output_layer.weight")
"""Keys of what has a row for each entry of the vocabulary."""


def strip_padding(weights: ShardedStateDict, vocab_size: int) -> ShardedStateDict:
    """The same description of a model's weights without rows beyond the vocabulary."""
    return dict_list_map_outplace(lambda part: strip_tensor_padding(part, vocab_size), weights)


def strip_tensor_padding(part: object, vocab_size: int) -> object:
    """A description of a tensor without its rows beyond the vocabulary; of another tensor, or without any, as it is."""
    if not isinstance(part, ShardedTensor) or part.key not in PADDED_KEYS or part.global_shape[0] == vocab_size:
        return part
    rows = min(part.local_shape[0], vocab_size - part.global_offset[0])
    assert rows > 0, f"{part.key} from {part.global_offset[0]} on is padding of {vocab_size} entries"
    # Ranks have different sizes now: no regular grid (megatron-core 0.16.1, dist_checkpointing/mapping.py, has_regular_grid).
    return replace(
        part, data=part.data[:rows], local_shape=(rows, *part.local_shape[1:]), global_shape=(vocab_size, *part.global_shape[1:]),
        axis_fragmentations=None, allow_shape_mismatch=False,
    )  # fmt: skip


def add_padding(weights: dict[str, torch.Tensor], num_rows: int) -> dict[str, torch.Tensor]:
    """Weights that were read, with the zeros that belong behind a rank's num_rows of the vocabulary."""
    return {name: nn.functional.pad(w, (0, 0, 0, num_rows - len(w))) if name in PADDED_KEYS else w for name, w in weights.items()}
