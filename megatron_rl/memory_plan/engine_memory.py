"""Memory plan of a rollout engine (vLLM) on one GPU, computed before the engine starts.

The test tests/memory_plan/test_engine_memory.py compares the plan with vLLM on a CPU. The test
covers the configuration of every recipe, the images in vLLM's profiling run, and the peak memory of
the vision tower, the layers and the sampler.
"""

import math
from dataclasses import dataclass

import torch

from megatron_rl.config import Settings, require
from megatron_rl.dtypes import torch_dtype
from megatron_rl.memory_plan.gpu_specs import GB, GPU_SPECS, format_gb
from megatron_rl.models.model_spec import ModelSpec

MAX_BATCHED_TOKENS = {"l4": 8192, "l40s": 8192, "a100": 8192, "h100": 16384, "h200": 16384}
"""Maximum number of tokens per step of an offline engine, by GPU.

The values are those of vllm 0.32.0 (engine/arg_utils.py, get_batch_defaults).
"""
CUDA_GRAPH_BYTES = 15 * GB // 10
"""Estimated bytes of the CUDA graphs, which take 1 to 2 GB.

vLLM counts the graphs as part of its memory share (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS) and
keeps them while it is asleep (config/model.py, sleep_mode_offload_cudagraph).
"""
LOGIT_BYTES = 22
"""Bytes per logit during sampling (rollout/vllm/sampler.py, EngineNoise).

Each logit needs the space of one bfloat16 value and five fp32 values.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class EnginePlan:
    """Planned bytes of an engine on one GPU."""

    budget_bytes: int
    weight_bytes: int
    """Bytes of the weights and permanent buffers.

    With DeepStack, the buffers contain the image features that are added to the hidden states.
    """
    step_bytes: int
    """Bytes of the largest step, which vLLM measures at startup, plus bytes of the CUDA graphs."""
    kv_bytes_per_token: int
    """Number of KV-cache bytes per token."""
    state_bytes: int
    """Bytes of the states of gated delta nets, for engine.max_num_seqs sequences."""

    @property
    def cache_bytes(self) -> int:
        """Number of bytes left for the KV cache."""
        return self.budget_bytes - self.weight_bytes - self.step_bytes - self.state_bytes

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that fit into the KV cache."""
        return self.cache_bytes // self.kv_bytes_per_token


def plan_engine(model: ModelSpec, settings: Settings, *, memory: int = 0) -> EnginePlan:
    """Plan vLLM's share of a GPU: weights, the largest step, and the KV cache.

    Args:
        model: sizes of the model.
        settings: settings of the run.
        memory: memory of the GPU in bytes; 0 selects the memory of the GPU named by plan.gpu.

    Raises:
        ValueError: the share is too small for the weights, the largest step and a KV cache of one
            sequence.
    """
    given = settings.engine
    width = torch_dtype(given.dtype).itemsize
    token = 2 * model.num_attention_layers * model.num_kv_heads * model.head_dim * width // given.tp
    # deepstack_input_embeds of vLLM's model (0.32.0) is not sharded.
    added = model.vision.num_deepstack_layers * max_batched_tokens(settings) * model.hidden_size * width
    engine = EnginePlan(
        budget_bytes=int(given.gpu_memory_utilization * (memory or GPU_SPECS[settings.plan.gpu].memory_bytes)),
        weight_bytes=sum(math.prod(shape) for shape in model.shapes().values()) * width // given.tp + added,
        step_bytes=_largest_step_bytes(model, settings, itemsize=width) + CUDA_GRAPH_BYTES,
        kv_bytes_per_token=token,
        state_bytes=given.max_num_seqs * sequence_state_bytes(model, tp=given.tp, itemsize=width),
    )
    device_name = "this GPU" if memory else f"a {settings.plan.gpu}"
    require(
        engine.cache_tokens >= given.max_model_len, "engine.gpu_memory_utilization", given.gpu_memory_utilization,
        f"{format_gb(engine.budget_bytes)} on {device_name} is not enough for the engine's weights ({format_gb(engine.weight_bytes)}), "
        f"its largest step ({format_gb(engine.step_bytes)}) and one sequence ({format_gb(token * given.max_model_len)}); "
        "raise this setting or engine.tp, or lower engine.max_model_len",
    )  # fmt: skip
    return engine


def sequence_state_bytes(model: ModelSpec, *, tp: int, itemsize: int) -> int:
    """Return the bytes of a sequence's states in all gated delta nets.

    A layer has a matrix for each value head, in fp32 (mamba_ssm_dtype of released models), and the
    last inputs of the convolution. The padding of vLLM's pages and states that prefix caching keeps
    for other sequences are not included.
    """
    delta = model.delta_net
    if delta is None:
        return 0
    state = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim * torch.float32.itemsize
    inputs = (delta.kernel_size - 1) * sum(delta.convolved_sizes) * itemsize
    return sum(delta.linear_layers) * (state + inputs) // tp


def max_batched_tokens(settings: Settings) -> int:
    """Return the maximum number of tokens in a vLLM step.

    vLLM computes this number in engine/arg_utils.py,
    _set_default_max_num_seqs_and_batched_tokens_args.
    """
    return min(MAX_BATCHED_TOKENS[settings.plan.gpu], settings.engine.max_num_seqs * settings.engine.max_model_len)


def num_profiled_image_tokens(model: ModelSpec, settings: Settings) -> int:
    """Return the number of image tokens that vLLM's profiling run encodes at once.

    The profiling run encodes as many maximum-size images as a step may contain (vllm 0.32.0,
    multimodal/encoder_budget.py).
    """
    given, largest = settings.engine, max_image_tokens(model, settings)
    budget = max(max_batched_tokens(settings), largest)
    a_prompt = max(1, min(given.max_images, given.max_model_len // largest))
    return max(1, min(budget // largest, given.max_num_seqs * a_prompt)) * largest


def max_image_tokens(model: ModelSpec, settings: Settings) -> int:
    """Return the maximum number of tokens per image.

    The tokens of an image form a rectangle that is at most 200 times as long as it is wide
    (model_executor/models/qwen2_vl.py, get_image_size_with_most_features).
    """
    most = settings.model.max_pixels // (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
    for count in range(most, 0, -1):
        side = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
        if count <= 200 * side**2:
            return count
    raise AssertionError(f"no valid image size has at most {most} tokens")


def _largest_step_bytes(model: ModelSpec, settings: Settings, *, itemsize: int) -> int:
    """Return the peak bytes of the engine's largest step.

    The result is the sum of the image embeddings, the logits, and the larger of two peaks: the
    vision tower with all profiled images, and the language model with all batched tokens.
    """
    pictures = num_profiled_image_tokens(model, settings)
    passing = max(
        max_batched_tokens(settings) * peak_values_per_token(model, tp=settings.engine.tp) * itemsize,
        pictures * vision_bytes_per_token(model, settings),
    )
    # The profiled image embeddings are kept while the language model is profiled. DeepStack
    # features are stored next to the embeddings for the first layer.
    embeddings = pictures * (1 + model.vision.num_deepstack_layers) * model.vision.out_hidden_size * itemsize
    return int(passing + embeddings) + settings.engine.max_num_seqs * model.vocab_size * LOGIT_BYTES


def peak_values_per_token(model: ModelSpec, *, tp: int) -> float:
    """Return the peak number of values per token in a decoder layer.

    The values are four vectors of the hidden size (hidden state, residual, normalized input and
    output), the MLP's fused projection, and the MLP's product. Experts have a row for each expert
    of a token: the fused projection or the output, which share memory, and the product (vllm
    0.32.0, fused_moe/fused_moe.py). A gated delta net has its projections, the convolved inputs,
    and the heads' output.
    """
    experts = model.experts
    rows = experts.top_k * (max(2 * experts.ffn_size / tp, model.hidden_size) + experts.ffn_size / tp) if experts else 0
    delta = model.delta_net
    mixed = (2 * sum(delta.convolved_sizes) + 2 * delta.convolved_sizes[2]) / tp if delta else 0
    return 4 * model.hidden_size + max(3 * model.ffn_size / tp, rows, mixed)


def peak_values_per_patch(model: ModelSpec, *, tp: int) -> float:
    """Return the peak number of values per patch in a block of the vision tower.

    The values are those of the hidden state, the normalized hidden state and the attention tensors:
    the fused projection, the copied queries and keys, the rotated queries and keys, the values, and
    three copies of the result. The MLP of a block needs less memory than the attention. The number
    includes learned position embeddings, if the model has any, and the DeepStack features of
    earlier blocks.
    """
    vision = model.vision
    left = vision.num_deepstack_layers * vision.out_hidden_size / vision.patches_per_token
    return (2 + 11 / tp + bool(vision.num_position_embeddings)) * vision.hidden_size + left


def vision_bytes_per_token(model: ModelSpec, settings: Settings) -> float:
    """Return the bytes that the patches of one vision token need.

    Each patch needs space for its peak values in a block, and for its pixels in fp32 and in the
    engine's dtype.
    """
    vision, width = model.vision, torch_dtype(settings.engine.dtype).itemsize
    return vision.patches_per_token * (peak_values_per_patch(model, tp=settings.engine.tp) * width + vision.patch_dim * (4 + width))
