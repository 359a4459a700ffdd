"""Layout of a gated delta net's tensors: Hugging Face's and the one sorted by key head.

Hugging Face stores the rows of all queries, then those of all keys, values and so on. In this
project's layout, the rows of a key head and of its value heads are contiguous, so that equal chunks
are the shards of tensor-parallel ranks (policy/gated_delta_net.py).
"""

from dataclasses import dataclass

import torch

from megatron_rl.models.name_mapping import ParamMapping, Tensors


@dataclass(slots=True, frozen=True, kw_only=True)
class DeltaNetSpec:
    """Sizes of the gated delta nets of a language model."""

    num_key_heads: int
    num_value_heads: int
    """Number of value heads, a multiple of num_key_heads. Successive value heads share a key head.
    """
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Number of tokens of which the convolution computes a weighted sum."""
    linear_layers: tuple[bool, ...]
    """For each decoder layer, True if it has a gated delta net instead of attention."""

    @property
    def convolved_sizes(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_head_dim
        return keys, keys, self.num_value_heads * self.value_head_dim


def delta_net_mappings(mcore: str, hf: str, stage: str, spec: DeltaNetSpec) -> list[ParamMapping]:
    """Return the name mappings of one gated delta net; the prefixes end with a dot."""
    projections = tuple(f"{hf}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    return [
        ParamMapping(
            f"{mcore}in_proj_by_head.weight", projections, stage,
            fuse=lambda tensors: fuse_by_key_head(tensors, spec), split=lambda fused: split_projections(fused, spec), shard_dim=0,
        ),
        ParamMapping(
            f"{mcore}conv1d_by_head.weight", (f"{hf}conv1d.weight",), stage,
            fuse=lambda tensors: fuse_by_key_head(tensors, spec), split=lambda fused: split_convolution(fused, spec), shard_dim=0,
        ),
        ParamMapping(f"{mcore}dt_bias", (f"{hf}dt_bias",), stage, shard_dim=0),
        ParamMapping(f"{mcore}A_log", (f"{hf}A_log",), stage, shard_dim=0),
        ParamMapping(f"{mcore}out_norm.weight", (f"{hf}norm.weight",), stage),
        ParamMapping(f"{mcore}out_proj.weight", (f"{hf}out_proj.weight",), stage, shard_dim=1),
    ]  # fmt: skip


def fuse_by_key_head(tensors: Tensors, spec: DeltaNetSpec) -> torch.Tensor:
    """Sort rows by key head; the first tensor has the rows of queries, keys and values."""
    return interleave_key_heads((*tensors[0].split(spec.convolved_sizes), *tensors[1:]), spec.num_key_heads)


def interleave_key_heads(parts: Tensors, num_key_heads: int) -> torch.Tensor:
    """Sort the rows of all parts by key head; the rows of each part are sorted already."""
    return torch.cat([part.reshape(num_key_heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def split_projections(fused: torch.Tensor, spec: DeltaNetSpec) -> Tensors:
    """Split the rows of in_proj_by_head into qkv, z, b and a; inverse of `fuse_by_key_head`."""
    sizes = (*spec.convolved_sizes, spec.convolved_sizes[2], spec.num_value_heads, spec.num_value_heads)
    *qkv, z, b, a = _split_key_heads(fused, sizes, spec)
    return torch.cat(qkv), z, b, a


def split_convolution(fused: torch.Tensor, spec: DeltaNetSpec) -> Tensors:
    """Return the convolution's kernels in Hugging Face's order; inverse of `fuse_by_key_head`."""
    return (torch.cat(_split_key_heads(fused, spec.convolved_sizes, spec)),)


def _split_key_heads(fused: torch.Tensor, sizes: tuple[int, ...], spec: DeltaNetSpec) -> list[torch.Tensor]:
    grouped = fused.reshape(spec.num_key_heads, -1, *fused.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([size // spec.num_key_heads for size in sizes], 1)]
