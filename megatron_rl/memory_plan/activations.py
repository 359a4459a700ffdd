"""Formula for the activation memory of one micro-batch on a rank.

Following Korthikanti et al. (arXiv 2205.05198), the formula counts the activations saved by
autograd and the temporary tensors. The formula assumes the layers of policy/transformer.py (without
Transformer Engine) and policy/vision.py with the GPU kernels of policy/fused.py. With Transformer
Engine, fewer bytes are saved than the formula predicts. The test
tests/memory_plan/test_activations.py compares the formula with the tensors that autograd actually
saves. The test replaces the GPU kernels by operations that save the same tensors. At the full size
of the recipes, tests/cuda/test_full_size.py compares the formula with the peak of an update on
FakeTensors; the plan is 0% to 10% above it (benchmarks/results/full_size_2026-11-27.md).

The sizes per token or patch are denoted by H (hidden), A (queries), K (keys) and F (MLP). Attention
is flash attention, so attention memory is linear in the sequence length.
"""

from dataclasses import dataclass

import torch

from megatron_rl.batching.minibatches import MAX_KV_RATIO
from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.memory_plan.delta_net_memory import SHORT_SEGMENTS, ChunkShape, delta_net_bytes, gate_bytes, zero_centered_norm_bytes
from megatron_rl.memory_plan.expert_memory import (
    expert_gradient_bytes,
    expert_saved_bytes,
    expert_working_bytes,
    router_loss_bytes,
    shared_expert_bytes,
)
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.fused import WIDTH_MULTIPLE

VALUES_PER_LOGIT = 2
"""Values per logit at the peak of the backward pass (logprobs.py).

They are the logit and its gradient, in the model's dtype.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ActivationMemory:
    """Activation bytes of one micro-batch on one rank."""

    saved_bytes: int
    """Bytes that each micro-batch in flight saves between its forward and its backward pass."""
    num_in_flight: float
    """Number of micro-batches in flight on a pipeline stage."""
    transient_bytes: int
    """Peak bytes of temporary tensors in a layer or for the logits, on top of the saved bytes."""

    @property
    def total_bytes(self) -> int:
        """Number of bytes for all micro-batches in flight and for temporary tensors."""
        return int(self.saved_bytes * self.num_in_flight) + self.transient_bytes


@dataclass(slots=True, frozen=True, kw_only=True)
class MicroBatchSize:
    """Size of a micro-batch, as far as its memory depends on it."""

    num_tokens: int
    num_image_tokens: int
    kv_ratio: float = MAX_KV_RATIO
    """Number of attention keys per token. Above 1, keys and values are gathered for segments with
    a common prefix (batching/minibatches.py)."""
    chunk_shapes: tuple[ChunkShape, ...] = SHORT_SEGMENTS
    """Shapes of the chunks of gated delta nets, of which the plan takes the one with most bytes."""

    @classmethod
    def full_of_images(cls, num_tokens: int) -> "MicroBatchSize":
        """Return the size of a micro-batch of image tokens with as many keys as packing allows."""
        return cls(num_tokens=num_tokens, num_image_tokens=num_tokens)


def compute_activation_memory(
    model: ModelSpec, parallel: ParallelSettings, *,
    stage: int, size: MicroBatchSize, max_patches: int, itemsize: int, lora: LoraSettings, frozen: list[str],
    has_router_losses: bool = False,
) -> ActivationMemory:  # fmt: skip
    """Return the activation memory of one micro-batch on a rank of pipeline stage `stage`.

    Args:
        model: sizes of the model.
        parallel: parallel layout and recomputation.
        stage: index of the pipeline stage.
        size: size of the micro-batch. In the worst case, which is assumed here, all of its tokens
            are sampled.
        max_patches: maximum number of patches per image. The rank with the most patches encodes an
            even share of the patches plus at most one more image.
        itemsize: bytes per activation value.
        lora: settings of the adapters.
        frozen: names of the frozen modules.
        has_router_losses: True if the update adds losses of the routers.
    """
    num_tokens = size.num_tokens
    hidden = model.hidden_size * itemsize / (parallel.tp if parallel.sequence_parallel else 1)
    layer_saved, layer_working, layer_again = _decoder_bytes(model, parallel, size=size, itemsize=itemsize, lora=lora)
    of_losses = router_loss_bytes(model, parallel) if has_router_losses else 0
    layer_saved += of_losses
    layer_again += of_losses if parallel.recompute == "full" else 0
    layers = model.num_layers // parallel.pp
    recomputed = (parallel.recompute_num_layers or layers) if parallel.recompute == "full" else 0
    rows = size.kv_ratio * torch.int64.itemsize if size.kv_ratio > 1 else 0
    stored = num_tokens * (layers - recomputed) * layer_saved
    kept = stored + num_tokens * (recomputed * hidden + rows)
    # Layers that are recomputed come first, so their backward pass runs when all others have
    # released what they saved.
    working = num_tokens * layer_working
    if not lora.rank and "language" not in frozen:
        working += expert_gradient_bytes(model, parallel, itemsize=itemsize)
    if parallel.recompute in ("selective", "full"):
        working = max(working * (layers > recomputed), working + num_tokens * layer_again - stored * bool(recomputed))
    if stage == 0:
        vision_kept, vision_working = vision_tower_bytes(
            model,
            parallel,
            num_patches=model.vision.patches_per_token * size.num_image_tokens,
            max_patches=max_patches,
            itemsize=itemsize,
            lora=lora,
            is_trained=trains_vision(lora, frozen),
        )
        # The forward pass of the vision tower runs before the layers save anything, and its
        # backward pass runs after the layers have released what they saved.
        working = max(working, vision_working - kept)
        # Image features added by layers (DeepStack), and their gradients if the tower is trained.
        kept += num_tokens * hidden * (1 + (2 if trains_vision(lora, frozen) else 1) * model.vision.num_deepstack_layers) + vision_kept
    if stage == parallel.pp - 1:
        vocab = padded_vocab(model.vocab_size, parallel.tp) // parallel.tp
        logits = parallel.log_probs_chunk_size * vocab * VALUES_PER_LOGIT * itemsize
        if not lora.rank and "language" not in frozen:
            # The gradient of the output layer exists twice while that of a chunk is added to that
            # of the earlier chunks; the logits of the chunk have been released by then.
            weight = vocab * model.hidden_size * itemsize
            logits = max(logits + weight, logits / VALUES_PER_LOGIT + 2 * weight)
        # The backward pass of the last layer begins when the final norm, the gathered hidden states
        # and the hidden states of the sampled tokens with their gradient have been released.
        final = num_tokens * (2 * hidden + 3 * model.hidden_size * itemsize)
        working = max(working, final + logits)
    return ActivationMemory(saved_bytes=int(kept), num_in_flight=_num_in_flight(stage, parallel), transient_bytes=int(working))


def _decoder_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, size: MicroBatchSize, itemsize: int, lora: LoraSettings
) -> tuple[float, float, float]:
    """Return three numbers of bytes per token of a decoder layer.

    They are what the layer saves without recomputation, the temporary tensors of its backward pass,
    and what recomputation adds to them. If some layers have gated delta nets, the first number is
    the mean of the stage for which it is largest, and the second the larger one. The third is that
    of the layer with the larger sum of both.
    """
    attention = _attention_layer_bytes(model, parallel, kv_ratio=size.kv_ratio, itemsize=itemsize, lora=lora)
    if model.delta_net is None:
        return attention
    linear = _linear_layer_bytes(model, parallel, size=size, itemsize=itemsize, lora=lora)
    num = model.num_layers // parallel.pp
    saved = [(linear if model.is_linear(layer) else attention)[0] for layer in range(model.num_layers)]
    mean = max(sum(saved[first : first + num]) / num for first in range(0, model.num_layers, num))
    working = max(linear[1], attention[1])
    return mean, working, max(sum(linear[1:]), sum(attention[1:])) - working


def _linear_layer_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, size: MicroBatchSize, itemsize: int, lora: LoraSettings
) -> tuple[float, float, float]:
    """Return the numbers of `_decoder_bytes` for a layer with a gated delta net."""
    hidden = model.hidden_size * itemsize / (parallel.tp if parallel.sequence_parallel else 1)
    gathered = 2 * model.hidden_size * itemsize if parallel.sequence_parallel else 0
    shapes = [delta_net_bytes(model, parallel, itemsize=itemsize, shape=shape) for shape in size.chunk_shapes]
    delta, full = max(shapes, key=lambda each: each.inside + each.working), delta_net_bytes(model, parallel, itemsize=itemsize)
    layer = decoder_layer_bytes(model, parallel, itemsize=itemsize, lora=lora, is_linear=True) + delta.inside - full.inside
    # The backward pass of the delta net runs after that of the MLP, without what the MLP and its
    # norm have saved. With selective recomputation, the delta net is computed again before it.
    saved_by_mlp, working_of_mlp = _mlp_bytes(model, parallel, itemsize=itemsize)
    of_delta, around = delta.working - saved_by_mlp - 2 * hidden, 2 * hidden + gathered
    working = max(working_of_mlp, of_delta)
    if parallel.recompute != "selective":
        return layer, working + around, layer
    again = max(working_of_mlp, of_delta + delta.inside) - working
    return layer - delta.inside, working + around, again


def _attention_layer_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, kv_ratio: float, itemsize: int, lora: LoraSettings
) -> tuple[float, float, float]:
    """Return the numbers of `_decoder_bytes` for a layer with attention."""
    hidden = model.hidden_size * itemsize / (parallel.tp if parallel.sequence_parallel else 1)
    query, key = (heads * model.head_dim * itemsize / parallel.tp for heads in (model.num_heads, model.num_kv_heads))
    # Keys and values gathered for segments with a common prefix are saved instead of their sources.
    keys = 2 * kv_ratio * key
    layer = decoder_layer_bytes(model, parallel, itemsize=itemsize, lora=lora)
    most = layer + max(0, keys - query - 3 * key)
    gathered = 2 * model.hidden_size * itemsize if parallel.sequence_parallel else 0
    saved_by_mlp, working_of_mlp = _mlp_bytes(model, parallel, itemsize=itemsize)
    # Gradients of gathered keys and values exist for each query head before they are added up, if
    # heads share keys. The MLP and its norm have released what they saved by then.
    expanded = keys * model.num_heads / model.num_kv_heads if model.num_heads > model.num_kv_heads else 0
    workspace = flash_workspace_bytes(model.num_heads / parallel.tp, model.head_dim) + expanded
    released = saved_by_mlp + 2 * hidden
    # Temporary gradients in the MLP or in attention. In attention, these are the gradients of the
    # gathered keys and values and of their sources.
    attention = 2 * query + keys + 2 * key + max(0, workspace - released)
    working = max(working_of_mlp, attention) + 2 * hidden + gathered
    saved = layer if parallel.recompute == "selective" else most
    return saved, working, query + keys if parallel.recompute == "selective" else most


def _mlp_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int) -> tuple[float, float]:
    """Return the bytes per token that an MLP saves, and those of the gradients in its backward.

    A dense MLP saves the fused projection (2 F values) and the output of the activation function
    (F values). If some layers have experts and others do not, the larger numbers are returned.
    """
    columns = model.ffn_size / parallel.tp
    dense = (3 * columns * itemsize, 2 * columns * itemsize)
    if model.experts is None:
        return dense
    sparse = (expert_saved_bytes(model, parallel, itemsize=itemsize), expert_working_bytes(model, parallel, itemsize=itemsize))
    sparse = tuple(map(sum, zip(sparse, shared_expert_bytes(model, parallel, itemsize=itemsize), strict=True)))
    found = [sparse if is_sparse else dense for is_sparse in set(model.experts.sparse_layers)]
    return max(saved for saved, _ in found), max(working for _, working in found)


def flash_workspace_bytes(num_heads: float, head_dim: int) -> float:
    """Return the bytes per token that the backward pass of flash attention allocates.

    The gradient of the queries is accumulated in fp32, with head dimensions rounded up to a
    multiple of 32 (64 above 128) and each segment padded by 128 tokens (torch 2.13,
    flash_attn/flash_api.cpp, mha_varlen_bwd). Segments are assumed to have 128 tokens on average.
    """
    multiple = 32 if head_dim <= 128 else 64
    rounded = -(-head_dim // multiple) * multiple
    return 2 * num_heads * (rounded + 1) * torch.float32.itemsize


def decoder_layer_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, itemsize: int, lora: LoraSettings, is_linear: bool = False
) -> float:
    """Return the bytes per token that autograd saves in one decoder layer.

    If `is_linear` is True, the layer has a gated delta net instead of attention.

    Each norm saves its input, its output and an fp32 statistic. Attention saves the fused
    projection (A + 2 K values), the rotated queries (A values), the rotated keys (K values), the
    result (A values) and the softmax statistics. All layers share the sines and cosines. The bytes
    of the MLP are those of `_mlp_bytes`. Flash attention does not store attention scores, so
    selective recomputation would only avoid saving the softmax statistics. Query and key norms save
    the same tensors as other norms, with A and K values and one statistic per head.
    """
    tp, dim = parallel.tp, model.head_dim
    query, key = model.num_heads * dim / tp, model.num_kv_heads * dim / tp
    norms = 2 * (2 * model.hidden_size * itemsize + 4) / (tp if parallel.sequence_parallel else 1)
    attention = (3 * query + 3 * key) * itemsize + 4 * model.num_heads / tp
    if model.delta_net is not None:
        norms += zero_centered_norm_bytes(model, parallel, itemsize=itemsize, is_linear=is_linear)
        attention += gate_bytes(model, parallel, itemsize=itemsize)
    if is_linear:
        delta = delta_net_bytes(model, parallel, itemsize=itemsize)
        attention = delta.inside + delta.around
    elif model.family.has_qk_norm:
        norms += 2 * (query + key) * itemsize + 4 * (model.num_heads + model.num_kv_heads) / tp
    # The output of the A of each projection; a token has two in each of its experts.
    of_mlp = 3 if model.experts is None else max(3, 2 * model.experts.top_k + 3 * bool(model.experts.shared_ffn_size))
    adapters = lora.rank * ((5 if is_linear else 4) + of_mlp) * itemsize
    return norms + attention + _mlp_bytes(model, parallel, itemsize=itemsize)[0] + adapters


def vision_tower_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, num_patches: int, max_patches: int, itemsize: int, lora: LoraSettings, is_trained: bool
) -> tuple[int, int]:
    """Return the saved and the temporary bytes of the vision tower for this rank's patches."""
    vision = model.vision
    mine = num_patches if parallel.tp == 1 else min(num_patches, num_patches // parallel.tp + max_patches)
    hidden = vision.hidden_size * itemsize
    block = vision_block_bytes(model, itemsize=itemsize, lora=lora)
    pixels = num_patches * vision.patch_dim * itemsize
    if not is_trained:
        return 0, int(pixels + mine * block)
    is_again = parallel.recompute in ("vision", "full")
    angles = 2 * torch.float32.itemsize * vision.head_dim  # cosines and sines, shared by all blocks
    kept = mine * (
        vision.patch_dim * itemsize
        + angles
        + vision_merger_bytes(model, itemsize=itemsize)
        + vision.num_blocks * (hidden if is_again else block)
    )
    passing = 2 * vision.ffn_size * itemsize + (block if is_again else 0)
    return int(kept), int(pixels + mine * passing)


def vision_block_bytes(model: ModelSpec, *, itemsize: int, lora: LoraSettings) -> float:
    """Return the bytes per patch that autograd saves in one vision block.

    The norms and the attention save the same tensors as in a decoder layer. A gated MLP saves gate
    and up projection and their product, each of size F, and the activation as well if it has
    adapters; quick_gelu saves its input, the sigmoid and the product; gelu saves its input and
    output.
    """
    vision = model.vision
    norms = 2 * (2 * vision.hidden_size * itemsize + 4)
    attention = 6 * vision.hidden_size * itemsize + 4 * vision.num_heads
    is_unfused = model.family.tower_mlp_class is not None and lora.rank > 0 and "vision" in lora.targets
    is_padded = model.family.tower_mlp_class is not None and not is_unfused
    width = -(-vision.ffn_size // WIDTH_MULTIPLE) * WIDTH_MULTIPLE if is_padded else vision.ffn_size
    return norms + attention + (vision.mlp_saved_factor + is_unfused) * width * itemsize


def vision_merger_bytes(model: ModelSpec, *, itemsize: int) -> float:
    """Return the bytes per patch that autograd saves in the merger.

    The merger saves its input, the norm's output, the norm's statistic, and the MLP's values before
    and after the activation. All tensors of the merger except the statistic have the width of the
    merged patches. A DeepStack merger saves the same tensors except its input, which the next block
    already saves.
    """
    vision = model.vision
    return vision.hidden_size * (4 + 3 * vision.num_deepstack_layers) * itemsize + 4 * (1 + vision.num_deepstack_layers)


def trains_vision(lora: LoraSettings, frozen: list[str]) -> bool:
    """Return True if the blocks of the vision tower or its merger are trained.

    The memory plan then counts the activations of the whole vision tower, even if only the merger
    is trained.
    """
    if lora.rank:
        return bool({"vision", "projector"} & set(lora.targets))
    return not {"vision", "merger"} <= set(frozen)


def _num_in_flight(stage: int, parallel: ParallelSettings) -> float:
    """Return the number of micro-batches in flight on a stage (forward done, backward pending).

    The schedule is assumed to be 1F1B with enough micro-batches to fill the pipeline. In an
    interleaved schedule (megatron-core 0.16.1, pipeline_parallel/schedules.py), a micro-batch in
    flight on one model chunk counts as 1/vpp, because a chunk is 1/vpp of the stage.
    """
    behind = parallel.pp - stage - 1
    if parallel.vpp == 1:
        return behind + 1
    return (2 * behind + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp
