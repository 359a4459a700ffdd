"""How much memory one micro-batch takes on a rank besides the weights: what autograd keeps, and what exists only in passing.

A formula in the manner of Korthikanti et al. (arXiv 2205.05198), counted tensor by tensor from our own layers (policy/transformer.py
without Transformer Engine, whose layers keep less; policy/vision.py) with the kernels of a GPU (policy/fused.py):
tests/memory_plan/test_activations.py counts what autograd really keeps, with operations that keep what those keep.
Numbers a token, or a patch: H hidden, A of queries, K of keys, F of the MLP. Attention is flash attention: linear in the length.
"""

from dataclasses import dataclass

import torch

from megatron_rl.batching.minibatches import MAX_KV_RATIO
from megatron_rl.config import LoraSettings, ParallelSettings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import padded_vocab

LOGIT_BYTES = 24
"""Of one entry of the logits at the peak of their backward pass: six fp32 numbers, whatever the model's type (logprobs.py)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ActivationMemory:
    """Bytes of one micro-batch on one rank."""

    saved_bytes: int
    """From the forward to the backward pass, for each micro-batch in flight..."""
    num_in_flight: float
    """...of which a pipeline stage has so many."""
    transient_bytes: int
    """At most at once, of one layer or of the logits, beside what is kept."""

    @property
    def total_bytes(self) -> int:
        return int(self.saved_bytes * self.num_in_flight) + self.transient_bytes


def compute_activation_memory(
    model: ModelSpec, parallel: ParallelSettings, *,
    stage: int, num_tokens: int, max_patches: int, itemsize: int, lora: LoraSettings, frozen: list[str],
) -> ActivationMemory:  # fmt: skip
    """Of `num_tokens` tokens, all of which may be an image's or sampled, on a rank of pipeline stage `stage`.

    max_patches: of one image; the rank with most to encode has its share and at most one image more. itemsize: bytes of a number.
    """
    hidden = model.hidden_size * itemsize / (parallel.tp if parallel.sequence_parallel else 1)
    query, key = (heads * model.head_dim * itemsize / parallel.tp for heads in (model.num_heads, model.num_kv_heads))
    keys = (
        2 * MAX_KV_RATIO * key
    )  # gathered for segments that begin alike (minibatches.cut), and kept instead of what they are gathered from
    layer = decoder_layer_bytes(model, parallel, itemsize=itemsize, lora=lora)
    most = layer + max(0, keys - query - 3 * key)
    layers = model.num_layers // parallel.pp
    kept = num_tokens * (layers * {"full": hidden, "selective": layer}.get(parallel.recompute, most) + MAX_KV_RATIO * torch.int64.itemsize)
    gathered = 2 * model.hidden_size * itemsize if parallel.sequence_parallel else 0
    intermediate = model.ffn_size * itemsize / parallel.tp
    again = {"full": most, "selective": query + keys}.get(parallel.recompute, 0)
    # Gradients in the MLP, or in attention: of gathered keys and values, and of what they are gathered from.
    working = num_tokens * (max(2 * intermediate, 2 * query + keys + 2 * key) + 2 * hidden + gathered + again)
    if stage == 0:
        vision_kept, vision_working = vision_tower_bytes(
            model,
            parallel,
            num_patches=model.vision.patches_per_token * num_tokens,
            max_patches=max_patches,
            itemsize=itemsize,
            is_trained=trains_vision(lora, frozen),
        )
        # The tower works before the layers keep anything and after they have let go; a frozen one that is told to compute again holds on
        # to its blocks' inputs.
        holds_on = parallel.recompute in ("vision", "full") and not trains_vision(lora, frozen)
        working = max(working, vision_working - (0 if holds_on else kept))
        # What layers add of the pictures, and its gradient where the tower is trained.
        kept += num_tokens * hidden * (1 + (2 if trains_vision(lora, frozen) else 1) * model.vision.num_deepstack_layers) + vision_kept
    if stage == parallel.pp - 1:
        logits = parallel.log_probs_chunk_size * padded_vocab(model.vocab_size, parallel.tp) // parallel.tp * LOGIT_BYTES
        kept += num_tokens * (2 * hidden + 2 * model.hidden_size * itemsize)
        working = max(working, logits)
    return ActivationMemory(saved_bytes=int(kept), num_in_flight=_num_in_flight(stage, parallel), transient_bytes=int(working))


def decoder_layer_bytes(model: ModelSpec, parallel: ParallelSettings, *, itemsize: int, lora: LoraSettings) -> float:
    """Bytes a token that autograd keeps of one decoder layer.

    Of each norm its input, its output and a statistic in fp32; of attention the fused projection, both rotated parts and the result
    (A + 2 K, A, K, A), its softmax statistics and four rows of sines and cosines; of the MLP the fused projection and what the activation
    makes of it (2 F, F). Selective recomputation saves the statistics only: flash attention keeps no scores. Norms of queries and keys
    keep as much as other norms, of A and K numbers, and a statistic a head.
    """
    tp, dim = parallel.tp, model.head_dim
    query, key, inner = model.num_heads * dim / tp, model.num_kv_heads * dim / tp, model.ffn_size / tp
    norms = 2 * (2 * model.hidden_size * itemsize + 4) / (tp if parallel.sequence_parallel else 1)
    attention = (3 * query + 3 * key + 4 * dim) * itemsize + 4 * model.num_heads / tp
    if model.family.has_qk_norm:
        norms += 2 * (query + key) * itemsize + 4 * (model.num_heads + model.num_kv_heads) / tp
    adapters = lora.rank * 7 * itemsize
    return norms + attention + 3 * inner * itemsize + adapters


def vision_tower_bytes(
    model: ModelSpec, parallel: ParallelSettings, *, num_patches: int, max_patches: int, itemsize: int, is_trained: bool
) -> tuple[int, int]:
    """Bytes kept and in passing of the tower, which encodes this rank's share of the patches."""
    vision = model.vision
    mine = num_patches if parallel.tp == 1 else min(num_patches, num_patches // parallel.tp + max_patches)
    hidden = vision.hidden_size * itemsize
    block = vision_block_bytes(model, itemsize=itemsize)
    pixels = num_patches * vision.patch_dim * itemsize
    if not is_trained:
        return 0, int(pixels + mine * block)
    is_again = parallel.recompute in ("vision", "full")
    kept = mine * (
        vision.patch_dim * itemsize + vision_merger_bytes(model, itemsize=itemsize) + vision.num_blocks * (hidden if is_again else block)
    )
    passing = 2 * vision.ffn_size * itemsize + (block if is_again else 0)
    return int(kept), int(pixels + mine * passing)


def vision_block_bytes(model: ModelSpec, *, itemsize: int) -> float:
    """Bytes a patch that autograd keeps of one block: as in a decoder layer, but rotations are fp32, and the activation is transformers'
    own: of a gated MLP gate, up, activation and product, F each; of quick_gelu its input, the sigmoid and the product; of gelu its input
    and what it makes of it."""
    vision = model.vision
    norms = 2 * (2 * vision.hidden_size * itemsize + 4)
    attention = 6 * vision.hidden_size * itemsize + 2 * 4 * vision.head_dim + 4 * vision.num_heads
    return norms + attention + vision.mlp_saved_factor * vision.ffn_size * itemsize


def vision_merger_bytes(model: ModelSpec, *, itemsize: int) -> float:
    """Bytes a patch that autograd keeps of the merger: its input, the norm's output, and the MLP's numbers before and behind its
    activation, all as wide as the patches that it merges; and the norm's statistic. Of a stacked one all but its input, which the next
    block keeps."""
    vision = model.vision
    return vision.hidden_size * (4 + 3 * vision.num_deepstack_layers) * itemsize + 4 * (1 + vision.num_deepstack_layers)


def trains_vision(lora: LoraSettings, frozen: list[str]) -> bool:
    """Whether a gradient flows into the tower's blocks or its merger (which then counts as all of it)."""
    if lora.rank:
        return bool({"vision", "projector"} & set(lora.targets))
    return not {"vision", "merger"} <= set(frozen)


def _num_in_flight(stage: int, parallel: ParallelSettings) -> float:
    """Micro-batches between their forward and backward pass on a stage of 1F1B, where there are many; an interleaved schedule
    (megatron-core 0.16.1, pipeline_parallel/schedules.py) counts chunks, each the vpp-th part of the stage."""
    behind = parallel.pp - stage - 1
    if parallel.vpp == 1:
        return behind + 1
    return (2 * behind + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp
