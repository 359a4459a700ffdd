"""Mapping between Hugging Face's and Megatron's parameter names and layouts.

Loading, export, weight sync and the checkpoint converters use this mapping. Names and tensors can
be converted in both directions.

Hugging Face names have the canonical form `model.layers.0...`, `visual...`, `lm_head.weight`.
`canonical_name` converts the newer names (`model.language_model...`, `model.visual...`) to the
canonical form. Layer numbers are global in Hugging Face's and in Megatron's names.

Hugging Face stores q, k, v, gate and up as separate tensors. Megatron's linear_qkv consists of one
block per key/value group, [q heads of the group, k, v] (megatron-core 0.16.1,
transformer/attention.py, get_query_key_value_tensors). On each rank, Megatron's linear_fc1 consists
of the rank's rows of gate, followed by the rank's rows of up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True, frozen=True)
class AttentionHeads:
    """Numbers of query and key/value heads, and head size; used to split fused q/k/v tensors."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


def _shard(tensor: torch.Tensor, dim: int, rank: int, size: int, *, pads: bool = False) -> torch.Tensor:
    if pads and tensor.shape[dim] % size:
        num_rows = padded_vocab(tensor.shape[dim], size) // size
        mine = tensor[rank * num_rows : (rank + 1) * num_rows]
        return torch.cat([mine, mine.new_zeros(num_rows - len(mine), *mine.shape[1:])])
    assert tensor.shape[dim] % size == 0, f"dimension {dim} of {tuple(tensor.shape)} is not divisible by tensor parallel size {size}"
    return tensor.chunk(size, dim)[rank]


def padded_vocab(size: int, tp: int) -> int:
    """Return the number of embedding rows: the vocabulary size rounded up to a multiple of `tp`."""
    return -(-size // tp) * tp


@dataclass(slots=True, frozen=True)
class ParamMapping:
    """One Megatron parameter and the Hugging Face tensors that it consists of."""

    mcore_name: str
    hf_names: tuple[str, ...]
    stage: str
    """Pipeline stage: 'first', 'last', or 'layer:N' for the stage of the global decoder layer N."""
    fuse: Callable[[Tensors], torch.Tensor] | None = None
    """Function that fuses the Hugging Face tensors into one tensor; None for a single Hugging Face
    tensor. The ranks' shards are equal chunks of the fused tensor along shard_dim.
    """
    split: Callable[[torch.Tensor], Tensors] | None = None
    """Function that splits the fused tensor into the Hugging Face tensors; inverse of `fuse`."""
    shard_dim: int | None = None
    """Dimension that tensor parallelism shards; None for a replicated parameter."""
    expert_dim: int | None = None
    """Dimension along which expert parallelism divides the experts; None for other parameters."""
    fuse_shards: bool = False
    """True if the Hugging Face tensors are sharded before they are fused, as gate and up are."""
    fused_norm: str = ""
    """Name of a norm's weight in the Transformer Engine spec, which fuses a norm into the linear
    layer that follows; '' for other parameters.
    """
    vocab_rows: int = 0
    """Vocabulary size, for parameters with one row per vocabulary entry; 0 for other parameters.
    Such a parameter is padded with zero rows to a multiple of the tensor-parallel size.
    """
    is_exported: bool = True
    """False for the output layer's copy of tied embeddings, which is loaded but never exported."""

    @property
    def checkpoint_key(self) -> str:
        """Key of the parameter in a Megatron distributed checkpoint.

        The layer number in the key is global. The key is the same for the local and the Transformer
        Engine layer spec (megatron-core 0.16.1, gpt_layer_specs.py, sharded_state_dict_keys_map).
        The tensor stored under this key is the result of `to_mcore(tensors, 0, 1)`.
        """
        return self.fused_norm or self.mcore_name

    def to_mcore(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """Convert full Hugging Face tensors to the Megatron shard of one tensor-parallel rank."""
        if self.shard_dim is not None and self.fuse_shards:
            tensors = tuple(_shard(tensor, self.shard_dim, rank, size) for tensor in tensors)
            assert self.fuse is not None
            return self.fuse(tensors)
        whole = self.fuse(tensors) if self.fuse else tensors[0]
        return whole if self.shard_dim is None else _shard(whole, self.shard_dim, rank, size, pads=self.vocab_rows > 0)

    def list_row_slices(self, tensors: Tensors) -> Tensors:
        """Return row slices of the Hugging Face tensors that make up the unsharded parameter.

        Concatenated, the slices equal `to_mcore(tensors, 0, 1)`. The slices are views of `tensors`.
        Fusing only reorders rows, so this method fuses row numbers to find the slices.
        """
        if self.fuse is None:
            return tensors
        if len(tensors) == 1:  # a view of one tensor
            return (self.fuse(tensors),)
        step = 1 + max(map(len, tensors))  # leaves a gap between the numbers of two tensors
        numbers = tuple(torch.arange(first * step, first * step + len(tensor)) for first, tensor in enumerate(tensors))
        order = self.to_mcore(numbers, 0, 1)
        assert torch.equal(order.sort().values, torch.cat(numbers)), f"{self.mcore_name} does not contain every row exactly once"
        starts = (order.diff() != 1).nonzero().flatten() + 1
        places = [(*divmod(int(run[0]), step), len(run)) for run in order.tensor_split(starts)]
        return tuple(tensors[tensor].narrow(0, row, num_rows) for tensor, row, num_rows in places)

    def to_hf(self, shards: Sequence[torch.Tensor]) -> Tensors:
        """Convert all tensor-parallel shards, in rank order, to full Hugging Face tensors.

        The result is in the order of `hf_names` and contains no vocabulary padding.
        """
        if self.fuse_shards:
            assert self.split is not None and self.shard_dim is not None
            parts = zip(*(self.split(shard) for shard in shards), strict=True)
            return tuple(part[0] if len(part) == 1 else torch.cat(part, self.shard_dim) for part in parts)
        whole = torch.cat(tuple(shards), self.shard_dim) if self.shard_dim is not None and len(shards) > 1 else shards[0]
        if self.vocab_rows:
            return (whole[: self.vocab_rows],)
        return self.split(whole) if self.split else (whole,)


def fuse_qkv(tensors: Tensors, heads: AttentionHeads, *, has_gate: bool = False) -> torch.Tensor:
    """Fuse q, k and v into Megatron's linear_qkv.

    The shape of q is [num_query_heads * dim, ...], and the shape of k and v is [num_kv_heads * dim,
    ...]. The result is [num_kv_heads * (num_query_heads / num_kv_heads + 2) * dim, ...].

    If `has_gate` is True, q also contains output gates. Hugging Face stores the gate of each head
    after its query; Megatron stores the gates of a key/value group after all queries of the group.
    """
    if has_gate:
        q = tensors[0]
        tensors = (q.reshape(heads.num_kv_heads, -1, 2, heads.head_dim, *q.shape[1:]).transpose(1, 2), *tensors[1:])
    rest = tensors[1].shape[1:]
    return torch.cat([tensor.reshape(heads.num_kv_heads, -1, *rest) for tensor in tensors], 1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, heads: AttentionHeads, *, has_gate: bool = False) -> Tensors:
    """Split Megatron's linear_qkv into q, k and v; inverse of `fuse_qkv`."""
    grouped = fused.reshape(heads.num_kv_heads, -1, *fused.shape[1:])
    q_rows = (1 + has_gate) * heads.num_query_heads // heads.num_kv_heads * heads.head_dim
    q, k, v = grouped.split([q_rows, heads.head_dim, heads.head_dim], 1)
    if has_gate:
        q = q.unflatten(1, (2, -1, heads.head_dim)).transpose(1, 2).flatten(1, 3)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def fuse_halves(tensors: Tensors) -> torch.Tensor:
    """Concatenate gate and up along dimension 0."""
    return torch.cat(tensors, 0)


def split_halves(fused: torch.Tensor) -> Tensors:
    """Split a fused gate and up along dimension 0; inverse of `fuse_halves`."""
    return fused.chunk(2, 0)


def name_table(
    *,
    num_layers: int,
    heads: AttentionHeads,
    tie_word_embeddings: bool,
    vocab_size: int,
    layer_mappings: Callable[[int, AttentionHeads], list[ParamMapping]],
    vision_names: Sequence[str],
) -> list[ParamMapping]:
    """Return the name mappings of all parameters of a model.

    `layer_mappings` is the model family's function that returns the mappings of one decoder layer.
    `vision_names` are the parameter names of the Hugging Face vision tower, without the prefix
    `visual.`.
    """
    rows = [ParamMapping(f"vision.{name}", (f"visual.{name}",), "first") for name in vision_names]
    words: dict[str, Any] = {"shard_dim": 0, "vocab_rows": vocab_size}
    rows.append(ParamMapping("language.embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "first", **words))
    for layer in range(num_layers):
        rows.extend(layer_mappings(layer, heads))
    rows.append(ParamMapping("language.decoder.final_layernorm.weight", ("model.norm.weight",), "last"))
    head = "model.embed_tokens.weight" if tie_word_embeddings else "lm_head.weight"
    rows.append(ParamMapping("language.output_layer.weight", (head,), "last", is_exported=not tie_word_embeddings, **words))
    return rows


def unfold_gate_up(tensors: Tensors) -> torch.Tensor:
    """View the experts' gate_up_proj [E, H, 2F] as [E, H, 2, F], with gate before up.

    Dimension 3 is the one that tensor parallelism shards.
    """
    return tensors[0].unflatten(-1, (2, -1))


def fold_gate_up(unfolded: torch.Tensor) -> Tensors:
    """View [E, H, 2, F] as gate_up_proj [E, H, 2F]; inverse of `unfold_gate_up`."""
    return (unfolded.flatten(-2),)


def unfold_swapped(tensors: Tensors) -> torch.Tensor:
    """View the experts' gate_up_proj [E, 2F, H] of Qwen3.5 as [E, H, 2, F]."""
    return unfold_gate_up((swap_matrices(tensors),))


def swap_folded(unfolded: torch.Tensor) -> Tensors:
    """View [E, H, 2, F] as gate_up_proj [E, 2F, H]; inverse of `unfold_swapped`."""
    return (swap_matrices(fold_gate_up(unfolded)),)


def swap_matrices(tensors: Tensors) -> torch.Tensor:
    """Return a view of the only tensor [E, X, Y] as [E, Y, X]."""
    return tensors[0].transpose(1, 2)


def is_expert_tensor(name: str) -> bool:
    """Return True for a Hugging Face tensor that contains a matrix for each expert of a layer."""
    return name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))


def swap_last_dims(shape: torch.Size) -> torch.Size:
    """Return a shape with its last two dimensions swapped."""
    return torch.Size((*shape[:-2], shape[-1], shape[-2]))


def to_transformers_form(name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of a released checkpoint as transformers' model stores it, with `shape`.

    For some families, transformers 5.19 swaps the last two dimensions of experts. The result is a
    view.
    """
    return tensor.transpose(-1, -2) if is_expert_tensor(name) and tensor.shape != shape else tensor


PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT (0.21, PeftModel) adds to the base model's names."""


def canonical_name(name: str) -> str:
    """Convert a Hugging Face tensor name to the canonical form, such as `model.layers...`.

    Accepts canonical and newer names, with or without PEFT's prefix.
    """
    name = name.removeprefix(PEFT_PREFIX)
    for newer, released in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(newer):
            return released + name.removeprefix(newer)
    return name


def nested_name(name: str) -> str:
    """Convert a canonical name to the newer form, used by transformers since version 4.52."""
    for newer, released in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(released):
            return newer + name.removeprefix(released)
    return name
