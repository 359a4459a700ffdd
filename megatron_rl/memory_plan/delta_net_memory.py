"""Activation memory and products of gated delta nets and of attention with an output gate.

The layers are those of policy/gated_delta_net.py and policy/delta_rule.py.

The sizes of a layer on a rank are denoted by K (key heads), N (value heads), D and E (channels of a
key and a value head), X (convolved channels), W (kernel size of the convolution) and C (tokens of a
chunk).
"""

from dataclasses import dataclass

import torch

from megatron_rl.config import ParallelSettings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.delta_rule import CHUNK_SIZES, MAX_PADDING

FP32 = torch.float32.itemsize


@dataclass(slots=True, frozen=True, kw_only=True)
class DeltaNetBytes:
    """Bytes per token of one gated delta net, without the norms of the layer and its MLP."""

    inside: float
    """Bytes that the convolution and the delta rule save; selective recomputation avoids them."""
    around: float
    """Bytes that the projections, the gate and the norm of the output save."""
    working: float
    """Bytes of temporary tensors in the backward pass."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ChunkShape:
    """Properties of the chunks of segments (policy/delta_rule.py) on which memory depends."""

    size: int = CHUNK_SIZES[0]
    padding: float = 1.0
    """Number of padded tokens per token."""
    wave_fraction: float = 1.0
    """Fraction of the chunks in the largest wave, all of which are computed together."""


SHORT_SEGMENTS = tuple(ChunkShape(size=size, padding=MAX_PADDING) for size in (CHUNK_SIZES[0], CHUNK_SIZES[-1]))
"""Shapes that need the most memory."""


def delta_net_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, itemsize: int, shape: ChunkShape = ChunkShape()
) -> DeltaNetBytes:  # fmt: skip
    """Return the bytes per token of a gated delta net.

    The convolution saves its input in fp32, a copy for each further tap, and the input of silu.
    The rule saves queries and keys in fp32 or, if activations are in fp32, the result of the
    convolution. Of the chunks, it saves six vectors of D per key head, three of D and three of E
    per value head, two of C per key head, four of C per value head, and a state per chunk.
    Everything is in fp32. The temporary tensors are values of the rule, and three states for each
    chunk of a wave.
    """
    delta, tp = model.delta_net, parallel.tp
    assert delta is not None
    key_heads, value_heads = delta.num_key_heads / tp, delta.num_value_heads / tp
    keys, values, convolved = key_heads * delta.key_head_dim, value_heads * delta.value_head_dim, sum(delta.convolved_sizes) / tp
    queries = value_heads * delta.key_head_dim  # queries or keys, for each value head
    state = queries * delta.value_head_dim / shape.size
    result = convolved if itemsize == FP32 else 2 * keys
    rule = 6 * keys + 3 * (queries + values) + (4 * value_heads + 2 * key_heads) * shape.size + state
    inside = FP32 * ((delta.kernel_size + 1) * convolved + result + shape.padding * rule)
    around = convolved * itemsize + values * (3 * itemsize + 3 * FP32)
    working = FP32 * shape.padding * 3 * (queries + values + shape.wave_fraction * state)
    return DeltaNetBytes(inside=inside, around=around, working=working)


def gate_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> float:
    """Return the bytes per token that the output gate of an attention layer saves.

    They are the gate in the fused projection, its sigmoid in fp32, and the gated output.
    """
    return model.num_heads * model.head_dim / parallel.tp * (2 * itemsize + FP32)


def zero_centered_norm_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int, is_linear: bool) -> float:
    """Return the bytes per token that the norms of a layer save in addition to other norms.

    A zero-centered norm saves its input in fp32 instead of the dtype of the activations.
    """
    hidden = 2 * model.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    heads = 0 if is_linear else (model.num_heads + model.num_kv_heads) * model.head_dim / parallel.tp
    return (FP32 - itemsize) * (hidden + heads)


def delta_net_products(model: ModelSpec) -> float:
    """Return the multiplications per token of the delta rule in all layers, without projections.

    Per value head, these are the C-vectors of the system, of its solution and of the outputs, and
    three products with the state. Per key head, two C-vectors are computed from queries and keys.
    """
    delta = model.delta_net
    if delta is None:
        return 0.0
    keys, values = delta.key_head_dim, delta.value_head_dim
    of_value_heads = delta.num_value_heads * (CHUNK_SIZES[0] * ((keys + values) / 2 + values) + 3 * keys * values)
    of_key_heads = 2 * delta.num_key_heads * CHUNK_SIZES[0] * keys
    return sum(delta.linear_layers) * (of_value_heads + of_key_heads)
