"""The one table between Hugging Face's names and Megatron's, read both ways by import, export, sync and the converters.

Names on the HF side are those of the released checkpoints (`model.layers.0...`, `visual...`, `lm_head.weight`); `canonical_name` maps the
newer spelling (`model.language_model...`, `model.visual...`) onto them. Layer numbers are global on both sides.

Layouts: HF keeps q, k, v apart and gate, up apart. Megatron's linear_qkv holds one block a key/value group, [q heads of the group, k, v]
(megatron-core 0.16.1, transformer/attention.py, get_query_key_value_tensors); linear_fc1 holds [gate, up] of the rank's own rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True, frozen=True)
class AttentionHeads:
    """What splitting a fused projection needs to know."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


def _shard(tensor: torch.Tensor, dim: int, rank: int, size: int, *, pads: bool = False) -> torch.Tensor:
    if pads and tensor.shape[dim] % size:
        num_rows = padded_vocab(tensor.shape[dim], size) // size
        mine = tensor[rank * num_rows : (rank + 1) * num_rows]
        return torch.cat([mine, mine.new_zeros(num_rows - len(mine), *mine.shape[1:])])
    assert tensor.shape[dim] % size == 0, f"dimension {dim} of {tuple(tensor.shape)} does not divide by tensor parallel size {size}"
    return tensor.chunk(size, dim)[rank]


def padded_vocab(size: int, tp: int) -> int:
    """Rows of the embeddings over tp ranks: the vocabulary, and where they do not divide it as many more as make it divisible."""
    return -(-size // tp) * tp


@dataclass(slots=True, frozen=True)
class ParamMapping:
    """One Megatron parameter and the HF tensors it is made of."""

    mcore_name: str
    hf_names: tuple[str, ...]
    stage: str
    """Where it lives: 'first', 'last', or 'layer:N' with the global layer number."""
    fuse: Callable[[Tensors], torch.Tensor] | None = None
    """HF tensors -> one tensor whose equal chunks along shard_dim are the ranks' shards; None for a single HF tensor."""
    split: Callable[[torch.Tensor], Tensors] | None = None
    """The inverse of fuse."""
    shard_dim: int | None = None
    """Dimension that tensor parallelism cuts; None for a replicated parameter."""
    fuse_shards: bool = False
    """Fuse after cutting (gate and up interleave by rank) instead of before."""
    fused_norm: str = ""
    """The name of a norm's weight under the Transformer Engine spec, which fuses norms into the linear layers that follow them."""
    vocab_rows: int = 0
    """Its rows where they are the vocabulary's: tensor parallelism pads them with zeros. 0 for every other parameter."""
    is_exported: bool = True
    """False for the last stage's copy of tied embeddings: it is read, never written."""

    @property
    def checkpoint_key(self) -> str:
        """Its key in a Megatron distributed checkpoint, where layers have global numbers and both specs share one spelling
        (megatron-core 0.16.1, gpt_layer_specs.py, sharded_state_dict_keys_map). The tensor there is `to_mcore(tensors, 0, 1)`."""
        return self.fused_norm or self.mcore_name

    def to_mcore(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """Full HF tensors -> this rank's Megatron shard."""
        if self.shard_dim is not None and self.fuse_shards:
            tensors = tuple(_shard(tensor, self.shard_dim, rank, size) for tensor in tensors)
            return self.fuse(tensors)
        whole = self.fuse(tensors) if self.fuse else tensors[0]
        return whole if self.shard_dim is None else _shard(whole, self.shard_dim, rank, size, pads=self.vocab_rows > 0)

    def list_row_slices(self, tensors: Tensors) -> Tensors:
        """The runs of rows of full HF tensors that make up `to_mcore(tensors, 0, 1)` one after another; nothing is copied.

        They are found by fusing the rows' numbers instead of the rows: a fused parameter is its tensors' rows in another order.
        """
        if self.fuse is None:
            return tensors
        step = 1 + max(map(len, tensors))  # a gap after each tensor's numbers
        numbers = tuple(torch.arange(first * step, first * step + len(tensor)) for first, tensor in enumerate(tensors))
        order = self.to_mcore(numbers, 0, 1)
        assert torch.equal(order.sort().values, torch.cat(numbers)), f"{self.mcore_name} does not hold every row once"
        starts = (order.diff() != 1).nonzero().flatten() + 1
        places = [(*divmod(int(run[0]), step), len(run)) for run in order.tensor_split(starts)]
        return tuple(tensors[tensor].narrow(0, row, num_rows) for tensor, row, num_rows in places)

    def to_hf(self, shards: Sequence[torch.Tensor]) -> Tensors:
        """All ranks' Megatron shards, in rank order -> full HF tensors, in the order of `hf`, without padding of the vocabulary."""
        if self.shard_dim is None:
            return (shards[0],)
        if self.fuse_shards:
            parts = zip(*(self.split(shard) for shard in shards), strict=True)
            return tuple(torch.cat(part, self.shard_dim) if len(part) > 1 else part[0] for part in parts)
        whole = torch.cat(tuple(shards), self.shard_dim) if len(shards) > 1 else shards[0]
        if self.vocab_rows:
            return (whole[: self.vocab_rows],)
        return self.split(whole) if self.split else (whole,)


def fuse_qkv(tensors: Tensors, heads: AttentionHeads) -> torch.Tensor:
    """q [num_query_heads * dim, ...], k and v [num_kv_heads * dim, ...] -> [num_kv_heads * (num_query_heads / num_kv_heads + 2) * dim,
    ...]."""
    grouped = [tensor.reshape(heads.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(grouped, 1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, heads: AttentionHeads) -> Tensors:
    grouped = fused.reshape(heads.num_kv_heads, -1, *fused.shape[1:])
    q_rows = heads.num_query_heads // heads.num_kv_heads * heads.head_dim
    return tuple(part.flatten(0, 1) for part in grouped.split([q_rows, heads.head_dim, heads.head_dim], 1))


def fuse_halves(tensors: Tensors) -> torch.Tensor:
    return torch.cat(tensors, 0)


def split_halves(fused: torch.Tensor) -> Tensors:
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
    """Every parameter of the model, once. `layer_mappings` gives those of a decoder layer, the model family's; `vision_names` are the HF
    vision tower's own (without the `visual.` prefix)."""
    rows = [ParamMapping(f"vision.{name}", (f"visual.{name}",), "first") for name in vision_names]
    words = {"shard_dim": 0, "vocab_rows": vocab_size}
    rows.append(ParamMapping("language.embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "first", **words))
    for layer in range(num_layers):
        rows.extend(layer_mappings(layer, heads))
    rows.append(ParamMapping("language.decoder.final_layernorm.weight", ("model.norm.weight",), "last"))
    head = "model.embed_tokens.weight" if tie_word_embeddings else "lm_head.weight"
    rows.append(ParamMapping("language.output_layer.weight", (head,), "last", is_exported=not tie_word_embeddings, **words))
    return rows


PEFT_PREFIX = "base_model.model."
"""What PEFT (0.21, PeftModel) puts before the base model's names."""


def canonical_name(name: str) -> str:
    """The released checkpoints' spelling of an HF tensor name, from either spelling, with or without PEFT's prefix."""
    name = name.removeprefix(PEFT_PREFIX)
    for newer, released in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(newer):
            return released + name.removeprefix(newer)
    return name


def nested_name(name: str) -> str:
    """The newer spelling of a canonical name: that of transformers' own modules since 4.52."""
    for newer, released in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(released):
            return newer + name.removeprefix(released)
    return name
