"""Step-time model: expected seconds per step by phase, and bytes sent over each link.

The time of each part is computed from its bottleneck (arithmetic, memory or a link), and the times
of the parts are summed. The model ignores kernels that are too small to fill a GPU,
overlap of communication and computation, stragglers, other traffic on the network, additional
generation batches when filters drop groups, and a critic with its own backbone. The constants are
in step_time_constants.py. The predictions of the model have not been compared with measurements on
a GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from megatron_rl.algo.algorithms import needs_old_logprob_forward, needs_reference
from megatron_rl.config import Settings
from megatron_rl.dtypes import torch_dtype
from megatron_rl.memory_plan.activations import trains_vision
from megatron_rl.memory_plan.delta_net_memory import delta_net_products
from megatron_rl.memory_plan.engine_memory import sequence_state_bytes
from megatron_rl.memory_plan.gpu_memory import MemoryPlan
from megatron_rl.memory_plan.gpu_specs import GPU_SPECS, GPUS_PER_NODE, GpuSpec
from megatron_rl.memory_plan.rank_shares import num_expert_params
from megatron_rl.memory_plan.step_time_constants import (
    DEFAULT_CONSTANTS,
    MEASURED_CONSTANTS,
    EpisodeEstimate,
    StepTimeConstants,
    estimate_mean_episode,
    longest_to_mean_ratio,
)
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec

GRADIENT_BYTES, PARAMETER_BYTES = 4, 2
"""Bytes that a data-parallel rank sends per trained parameter.

The rank sends the fp32 gradient and the new bfloat16 weight.
"""
OPTIMIZER_STEP_BYTES = 30
"""Bytes that AdamW reads and writes per parameter.

It reads the gradient, reads and writes the main weight and both moments, and writes the bfloat16
weight.
"""
CHECKPOINT_STATE_BYTES = 12
"""Bytes per trained parameter in a checkpoint, in addition to the weights.

These are the main weight and both moments in fp32.
"""
COLLECTIVES_PER_LAYER = 4
"""Number of tensor-parallel collectives per layer and pass.

Attention and MLP each need an all-gather before them and a reduce-scatter after them.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ParamCounts:
    """Parameter counts of a model, taken from the shapes of its tensors."""

    language: float
    """Number of language-model parameters that are used in the matrix products for each token. Of
    the experts, these are top_k of num_experts.
    """
    vision: int
    """Number of vision-tower parameters that are used in the matrix products for each patch."""
    total: int
    num_tensors: int
    experts: int = 0
    """Number of parameters of all experts."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StepTimeInputs:
    """Inputs of the step-time model: model, settings and size of a run."""

    model: ModelSpec
    param_counts: ParamCounts
    settings: Settings
    world_size: int
    cache_tokens: int
    """Number of tokens that fit into an engine's KV cache."""
    num_trained_params: int
    """Number of trainable parameters in the whole model."""
    speeds: StepTimeConstants = DEFAULT_CONSTANTS

    @property
    def gpu(self) -> GpuSpec:
        """Specifications of the run's GPU."""
        return GPU_SPECS[self.settings.plan.gpu]

    @property
    def episode(self) -> EpisodeEstimate:
        """Estimated average episode of the run."""
        return estimate_mean_episode(self.model, self.settings, self.speeds)

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return max(1, self.world_size // (self.settings.parallel.tp * self.settings.parallel.pp))

    @property
    def num_engines(self) -> int:
        """Number of rollout engines."""
        return max(1, self.world_size // self.settings.engine.tp)

    @property
    def num_episodes(self) -> int:
        """Number of episodes per step."""
        return self.settings.batch.prompts_per_step * self.settings.batch.group_size

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth to another GPU of the same node, in bytes/s."""
        return self.gpu.link_bytes_per_s * self.speeds.link_share

    @property
    def itemsize(self) -> int:
        """Number of bytes per value in the policy."""
        return torch_dtype(self.settings.model.dtype).itemsize

    @property
    def engine_itemsize(self) -> int:
        """Number of bytes per value in the engine."""
        return torch_dtype(self.settings.engine.dtype).itemsize


@dataclass(slots=True, frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of one step by phase and part, and seconds of one checkpoint."""

    rollout: Mapping[str, float]
    update: Mapping[str, float]
    sync: Mapping[str, float]
    checkpoint: float

    @property
    def step_total(self) -> float:
        """Seconds of a step without the checkpoint, which is written during the next step."""
        return sum(self.rollout.values()) + sum(self.update.values()) + sum(self.sync.values())


def make_step_time_inputs(
    model: ModelSpec, settings: Settings, memory_plan: MemoryPlan, speeds: StepTimeConstants = DEFAULT_CONSTANTS
) -> StepTimeInputs:
    """Return the inputs of the step-time model.

    Trainable tensors that are replicated across tensor-parallel ranks are counted once per rank.
    """
    counts, ep = count_params(model), settings.parallel.ep
    experts = num_trained_experts(model, settings, counts)
    trained = sum(rank.rank_share.num_trained_params for rank in memory_plan.ranks) + experts * (ep - 1) // ep
    return StepTimeInputs(
        model=model, param_counts=counts, settings=settings, world_size=memory_plan.world_size,
        cache_tokens=memory_plan.engine.cache_tokens,
        num_trained_params=trained, speeds=speeds,
    )  # fmt: skip


def num_trained_experts(model: ModelSpec, settings: Settings, counts: ParamCounts) -> int:
    """Return the number of trained parameters of all experts or of their adapters.

    A of the first matrix and B of the second one are counted once per tensor-parallel rank.
    """
    lora, experts = settings.lora, model.experts
    if not lora.rank:
        return 0 if "language" in settings.model.frozen else counts.experts
    if experts is None or "mlp" not in lora.targets:
        return 0
    of_an_expert = lora.rank * (2 * model.hidden_size * settings.parallel.tp + 3 * experts.ffn_size)
    return sum(experts.sparse_layers) * experts.num_experts * of_an_expert


def estimate_step_seconds(inputs: StepTimeInputs) -> StepSeconds:
    """Return the expected seconds of a step and of a checkpoint."""
    return StepSeconds(
        rollout=rollout_seconds(inputs),
        update=update_seconds(inputs),
        sync=weight_sync_seconds(inputs),
        checkpoint=checkpoint_seconds(inputs),
    )


def count_params(model: ModelSpec) -> ParamCounts:
    """Count the parameters of a model.

    An untied input embedding is a lookup and is not included in `language`.
    """
    counts = {name: math.prod(shape) for name, shape in model.shapes().items()}
    num_experts = num_expert_params(model)
    unused = num_experts * (1 - model.experts.top_k / model.experts.num_experts) if model.experts else 0
    vision, total = sum(count for name, count in counts.items() if name.startswith("visual.")), sum(counts.values())
    looked_up = 0 if model.tie_word_embeddings else counts["model.embed_tokens.weight"]
    return ParamCounts(
        language=total - vision - looked_up - unused, vision=vision, total=total, num_tensors=len(counts), experts=num_experts
    )


def rollout_seconds(inputs: StepTimeInputs) -> dict[str, float]:
    """Return the seconds of a step's rollout by part.

    An engine decodes all its sequences at the same time. All GPUs wait for the longest episode of a
    step. With run.max_staleness, an episode may go on for max_staleness further steps, and the
    engines prefill the unfinished episodes again after each weight sync. A teacher's responses
    (distill.apply_to=responses) are assumed to take as long as those of the policy.
    """
    settings, episode = inputs.settings, inputs.episode
    num_batches = settings.run.max_staleness + 1
    mine = inputs.num_episodes / inputs.num_engines
    slots = max(1.0, min(settings.engine.max_num_seqs, num_batches * mine, inputs.cache_tokens / episode.total_tokens))
    most = settings.task.max_turns * settings.task.max_new_tokens
    longest = min(most, episode.sampled_tokens * longest_to_mean_ratio(inputs.num_episodes, inputs.speeds)) / num_batches
    steps = max(mine * episode.sampled_tokens / slots, longest)
    running = mine * episode.sampled_tokens / steps
    # If an engine has more episodes than slots, others run while one waits for a tool.
    waited = episode.num_turns * inputs.speeds.tool_s / num_batches if steps == longest else 0.0
    decode, prompts = steps * decode_step_seconds(inputs, num_running=running), prefill_seconds(inputs)
    return {
        "decode": decode, "tools": waited, "prompts": prompts, "resumed": resume_seconds(inputs),
        "teacher": response_fraction(inputs) * (decode + prompts),
    }  # fmt: skip


def response_fraction(inputs: StepTimeInputs) -> float:
    """Return the fraction of the policy's turns in which the teacher generates a response."""
    distill = inputs.settings.distill
    return distill.response_fraction if distill.generates_responses else 0.0


def decode_step_seconds(inputs: StepTimeInputs, *, num_running: float) -> float:
    """Return the seconds of a decode step, which generates one token per running sequence.

    The result is a fixed overhead plus the longer of two times: the time for reading the weights
    and all keys and values once, and for reading and writing the states of gated delta nets, and
    the time for arithmetic. Tensor parallelism adds two
    all-reduces per layer over the engine's ranks.
    """
    model, speeds, tp = inputs.model, inputs.speeds, inputs.settings.engine.tp
    language = inputs.param_counts.language
    token = 2 * model.num_attention_layers * model.num_kv_heads * model.head_dim * inputs.engine_itemsize
    state = 2 * sequence_state_bytes(model, tp=1, itemsize=inputs.engine_itemsize)
    length = inputs.episode.total_tokens - inputs.episode.sampled_tokens / 2
    read_bytes = num_read_params(inputs, num_running) * inputs.engine_itemsize + num_running * (length * token + state)
    reading = read_bytes / tp / (inputs.gpu.hbm_bytes_per_s * speeds.memory_share)
    arithmetic = 2 * language * num_running / tp / (inputs.gpu.flops_per_s * speeds.prefill_share)
    row = num_running * model.hidden_size * inputs.engine_itemsize
    sums = 2 * model.num_layers * (speeds.launch_s + 2 * (tp - 1) / tp * row / inputs.link_bytes_per_s) if tp > 1 else 0.0
    return speeds.decode_floor_s + max(reading, arithmetic) + sums


def num_read_params(inputs: StepTimeInputs, num_tokens: float) -> float:
    """Return the number of language-model parameters that a decoding step reads.

    Of the experts, these are the ones chosen by at least one of `num_tokens` tokens, if each token
    chooses its experts uniformly.
    """
    counts, experts = inputs.param_counts, inputs.model.experts
    if experts is None:
        return counts.language
    of_a_token = experts.top_k / experts.num_experts
    return counts.language + counts.experts * (1 - (1 - of_a_token) ** num_tokens - of_a_token)


def prefill_seconds(inputs: StepTimeInputs) -> float:
    """Return the seconds that the engines take to process prompts and images.

    The prompt of a group is prefilled once. Every environment response is prefilled separately.
    """
    episode, language, vision = inputs.episode, inputs.param_counts.language, inputs.param_counts.vision
    groups, further = inputs.settings.batch.prompts_per_step, inputs.num_episodes * (episode.num_images - 1) * episode.tokens_per_image
    tokens = groups * episode.prompt_tokens + further
    patches = inputs.model.vision.patches_per_token * (groups * episode.tokens_per_image + further)
    return 2 * (language * tokens + vision * patches) / (inputs.world_size * inputs.gpu.flops_per_s * inputs.speeds.prefill_share)


def resume_seconds(inputs: StepTimeInputs) -> float:
    """Return the seconds that the engines take to prefill unfinished episodes after a weight sync.

    There are run.max_staleness times as many unfinished episodes as a step trains on. On average,
    half of their tokens and images exist.
    """
    episode, model = inputs.episode, inputs.model
    tokens = inputs.settings.run.max_staleness * inputs.num_episodes * episode.total_tokens / 2
    patches = model.vision.patches_per_token * tokens * episode.num_images * episode.tokens_per_image / episode.total_tokens
    flops = 2 * (inputs.param_counts.language * tokens + inputs.param_counts.vision * patches)
    return flops / (inputs.world_size * inputs.gpu.flops_per_s * inputs.speeds.prefill_share)


def num_trained_tokens(inputs: StepTimeInputs) -> float:
    """Return the number of tokens that a step trains on.

    The prompt of a group is counted once for each micro-batch that contains a part of the group.
    Other common prefixes are ignored. A teacher's responses, with their contexts, are assumed to
    have as many tokens as the episodes' turns.
    """
    batch, episode = inputs.settings.batch, inputs.episode
    replies = batch.group_size * (episode.total_tokens - episode.prompt_tokens)
    copies = min(batch.group_size, math.ceil((replies + episode.prompt_tokens) / max(batch.micro_batch_tokens, episode.total_tokens)))
    return (1 + response_fraction(inputs)) * batch.prompts_per_step * (replies + copies * episode.prompt_tokens)


def update_seconds(inputs: StepTimeInputs) -> dict[str, float]:
    """Return the seconds of a step's updates by part.

    The forward passes before the first update are included.
    """
    settings, parallel, speeds = inputs.settings, inputs.settings.parallel, inputs.speeds
    num_updates = settings.batch.minibatches * settings.batch.epochs
    tokens = num_trained_tokens(inputs)
    micro_batches = max(1.0, tokens / inputs.num_replicas / settings.batch.minibatches / settings.batch.micro_batch_tokens)
    arithmetic = update_flops(inputs, tokens) / (inputs.world_size * inputs.gpu.flops_per_s * speeds.training_share)
    return {
        "arithmetic": arithmetic,
        "stages": arithmetic * (parallel.pp - 1) / (micro_batches * parallel.vpp),
        "tensors": tensor_parallel_bytes(inputs, tokens) / inputs.link_bytes_per_s,
        "experts": expert_parallel_bytes(inputs, tokens) / _expert_link_bytes_per_s(inputs),
        "gradients": num_updates * gradient_bytes(inputs) / gradient_link_bytes_per_s(inputs),
        "optimizer": num_updates * optimizer_seconds(inputs),
    }


def update_flops(inputs: StepTimeInputs, tokens: float) -> float:
    """Return the FLOPs of all epochs on the slowest pipeline stage.

    A forward pass takes 2 FLOPs per parameter and token, plus 2 * layers * heads * head size *
    length FLOPs per token for attention, and those of `delta_net_products`. An update consists of
    up to four parts, each of which costs as much as a forward pass: the forward pass, the gradient
    of the inputs, the gradient of the weights (not with LoRA), and the recomputation (of the layers
    for which it is enabled). The vision tower is on the first stage.
    """
    settings, model, episode = inputs.settings, inputs.model, inputs.episode
    language, vision = inputs.param_counts.language, inputs.param_counts.vision
    before, epochs = num_forward_passes_before_update(inputs), settings.batch.epochs
    again, again_seen = 2 * recomputed_fraction(inputs), 2 * (settings.parallel.recompute in ("vision", "full"))
    each = epochs * ((4 if settings.lora.rank else 6) + again) + 2 * before
    attention = 2 * model.num_attention_layers * model.num_heads * model.head_dim * episode.total_tokens / 2 + delta_net_products(model)
    pictures = settings.batch.prompts_per_step + inputs.num_episodes * (episode.num_images - 1)
    patches = pictures * episode.tokens_per_image * model.vision.patches_per_token
    of_a_patch = epochs * (6 + again_seen if trains_vision(settings.lora, settings.model.frozen) else 2) + 2 * before
    return tokens * each * (language + attention) + settings.parallel.pp * patches * of_a_patch * vision


def recomputed_fraction(inputs: StepTimeInputs) -> float:
    """Return the fraction of the decoder layers that a backward pass computes again."""
    parallel = inputs.settings.parallel
    if parallel.recompute != "full":
        return 0.0
    return parallel.recompute_num_layers * parallel.pp / inputs.model.num_layers if parallel.recompute_num_layers else 1.0


def num_forward_passes_before_update(inputs: StepTimeInputs) -> float:
    """Return the number of forward passes before a step's first update.

    These passes compute the old logprobs and the reference logprobs. The pass of a teacher counts
    in proportion to its language model; of several teachers, the largest one is assumed to read
    every sequence.
    """
    passes, distill = needs_old_logprob_forward(inputs.settings) + needs_reference(inputs.settings.algo), inputs.settings.distill
    if not distill.teacher_paths:
        return passes + distill.is_local
    sizes = [count_params(load_known_spec(path, key=distill.teacher_key(path))).language for path in distill.teacher_paths]
    return passes + max(sizes) / inputs.param_counts.language


def tensor_parallel_bytes(inputs: StepTimeInputs, tokens: float) -> float:
    """Return the bytes that a rank sends to its tensor-parallel group in a step.

    An epoch counts as three passes (one forward, two backward), or as four passes in layers that
    are recomputed.
    """
    parallel, model = inputs.settings.parallel, inputs.model
    passes = inputs.settings.batch.epochs * (3 + recomputed_fraction(inputs)) + num_forward_passes_before_update(inputs)
    row = model.hidden_size * inputs.itemsize * (parallel.tp - 1) / parallel.tp
    return COLLECTIVES_PER_LAYER * model.num_layers / parallel.pp * passes * tokens / inputs.num_replicas * row


def expert_parallel_bytes(inputs: StepTimeInputs, tokens: float) -> float:
    """Return the bytes that a rank sends to its expert-parallel group in a step.

    A layer with experts gathers the tokens of all ranks and adds up their outputs, in fp32. The
    backward pass sends as much, and so does recomputation.
    """
    parallel, model, batch = inputs.settings.parallel, inputs.model, inputs.settings.batch
    if model.experts is None:
        return 0.0
    passes = batch.epochs * (2 + recomputed_fraction(inputs)) + num_forward_passes_before_update(inputs)
    row = model.hidden_size * (inputs.itemsize + torch.float32.itemsize) * (parallel.ep - 1)
    return sum(model.experts.sparse_layers) / parallel.pp * passes * tokens / inputs.num_replicas * row


def _expert_link_bytes_per_s(inputs: StepTimeInputs) -> float:
    """Return the bandwidth within an expert-parallel group in bytes/s."""
    parallel = inputs.settings.parallel
    return inputs.link_bytes_per_s if parallel.tp * parallel.ep <= GPUS_PER_NODE else gradient_link_bytes_per_s(inputs)


def gradient_bytes(inputs: StepTimeInputs) -> float:
    """Return the bytes that a rank sends to other replicas in one update.

    The gradients are reduce-scattered and the weights are all-gathered, those of experts among the
    ranks that hold the same experts.
    """
    parallel, replicas = inputs.settings.parallel, inputs.num_replicas
    experts = num_trained_experts(inputs.model, inputs.settings, inputs.param_counts)
    others, same_experts = inputs.num_trained_params - experts, replicas / parallel.ep
    sent = others * (replicas - 1) / replicas + experts / parallel.ep * (same_experts - 1) / same_experts
    return (GRADIENT_BYTES + PARAMETER_BYTES) * sent / (parallel.tp * parallel.pp)


def gradient_link_bytes_per_s(inputs: StepTimeInputs) -> float:
    """Return the bandwidth between replicas in bytes/s."""
    return (
        inputs.link_bytes_per_s
        if inputs.world_size <= GPUS_PER_NODE
        else min(inputs.link_bytes_per_s, inputs.speeds.network * inputs.speeds.network_share)
    )


def optimizer_seconds(inputs: StepTimeInputs) -> float:
    """Return the seconds that AdamW takes for this rank's part of the parameters.

    If the optimizer is on the host, the ranks of a node share the bandwidth of the host memory.
    """
    mine = inputs.num_trained_params / inputs.world_size
    if not inputs.settings.parallel.offload_optimizer:
        return OPTIMIZER_STEP_BYTES * mine / (inputs.gpu.hbm_bytes_per_s * inputs.speeds.memory_share)
    moved = (GRADIENT_BYTES + PARAMETER_BYTES) * mine / (inputs.gpu.pcie_bytes_per_s * inputs.speeds.host_share)
    return moved + OPTIMIZER_STEP_BYTES * mine * min(inputs.world_size, GPUS_PER_NODE) / inputs.speeds.host_memory


def sync_bytes(inputs: StepTimeInputs) -> float:
    """Return the bytes of weights that a rank receives from other ranks in a weight sync."""
    return (inputs.param_counts.total - num_held_params(inputs)) * inputs.itemsize


def num_held_params(inputs: StepTimeInputs) -> float:
    """Return the number of parameters on a rank."""
    parallel, counts = inputs.settings.parallel, inputs.param_counts
    return (counts.total - counts.experts * (1 - 1 / parallel.ep)) / (parallel.tp * parallel.pp)


def weight_sync_seconds(inputs: StepTimeInputs) -> dict[str, float]:
    """Return the seconds of a step's weight syncs by part.

    The new weights are loaded into every engine, and before them those of a teacher that generates
    responses. Offloaded parameters and gradients are moved to
    the host before a rollout and back after it.
    """
    parallel = inputs.settings.parallel
    on_other_ranks = num_trained_experts(inputs.model, inputs.settings, inputs.param_counts) * (1 - 1 / parallel.ep)
    num_gradients = (inputs.num_trained_params - on_other_ranks) / (parallel.tp * parallel.pp)
    away = 2 * (num_held_params(inputs) * inputs.itemsize + GRADIENT_BYTES * num_gradients) if parallel.offload_params else 0
    seconds = {
        "weights": sync_bytes(inputs) / inputs.link_bytes_per_s,
        "tensors": inputs.param_counts.num_tensors * inputs.speeds.tensor_s,
        "offload": away / (inputs.gpu.pcie_bytes_per_s * inputs.speeds.host_share),
        "wake": inputs.speeds.wake_s,
    }
    num_syncs = 2 if inputs.settings.distill.generates_responses else 1
    return {name: num_syncs * each for name, each in seconds.items()}


def checkpoint_seconds(inputs: StepTimeInputs) -> float:
    """Return the seconds that it takes to write a checkpoint to disk.

    Every node writes its share of the weights and the optimizer state.
    """
    total = inputs.param_counts.total * inputs.itemsize + CHECKPOINT_STATE_BYTES * inputs.num_trained_params
    return total / (math.ceil(inputs.world_size / GPUS_PER_NODE) * inputs.speeds.disk)


def describe_step_time(inputs: StepTimeInputs) -> str:
    """Return a one-line summary of the step time, for the dry run and the doctor command."""
    seconds, episode = estimate_step_seconds(inputs), inputs.episode
    phases = {"rollout": seconds.rollout, "update": seconds.update, "sync": seconds.sync}
    said = []
    for name, parts in phases.items():
        largest = ", ".join(f"{part} {value:.1f}" for part, value in parts.items() if value >= 0.05)
        said.append(f"{name} {sum(parts.values()):.1f} ({largest})")
    known = f"{len(MEASURED_CONSTANTS)} of {len(fields(StepTimeConstants))} constants were measured"
    return (
        f"{seconds.step_total:.0f} s per step expected on {inputs.world_size} {inputs.settings.plan.gpu}: {', '.join(said)}; a checkpoint "
        f"{seconds.checkpoint:.0f} s; for episodes of {episode.total_tokens:,.0f} tokens, "
        f"{episode.sampled_tokens:,.0f} of them sampled; {known}"
    )
