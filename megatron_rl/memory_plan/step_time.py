"""The stated model of time: the seconds that a step is expected to take, phase by phase, and the bytes that it sends over each link.

Sums of what limits each part: arithmetic, memory, a link. Left out on purpose: kernels too small to fill a GPU, overlap of sending and
computing, stragglers among equal GPUs, a network that others use, further rounds of a selection that drops groups, a critic's own trunk.
The constants are those of step_time_constants.py: nothing of this was measured on a GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from megatron_rl.algo.algorithms import needs_old, needs_reference
from megatron_rl.config import Settings
from megatron_rl.memory_plan.activations import trains_vision
from megatron_rl.memory_plan.gpu_memory import Plan
from megatron_rl.memory_plan.gpu_specs import GPUS, GPUS_A_NODE, Gpu
from megatron_rl.memory_plan.step_time_constants import ASSUMED, MEASURED, Episode, Speeds, longest_share, mean_episode
from megatron_rl.models.model_spec import ModelSpec

GRADIENT, PARAMETER = 4, 2
"""Bytes that a data-parallel rank sends of each number it trains: the gradient in fp32, the new weight in bfloat16."""
STEP_BYTES = 30
"""What AdamW reads and writes of a parameter: gradient, main weight, both moments there and back, the weight in bfloat16."""
STATE_BYTES = 12
"""Of a trained parameter in a checkpoint, beside the weights: main weight and both moments in fp32."""
COLLECTIVES = 4
"""Of a layer and pass with tensor parallelism: gathered before attention and MLP, scattered behind them."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Sizes:
    """Of a model, counted once: its shapes are those of a module that is built."""

    language: int
    """Parameters that multiply a token of the language model."""
    vision: int
    """Those that multiply a patch of the tower."""
    total: int
    num_tensors: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """A run on so many GPUs."""

    model: ModelSpec
    sizes: Sizes
    settings: Settings
    world_size: int
    cache_tokens: int
    """Of an engine."""
    trained: int
    """Parameters that learn, of the whole model."""
    speeds: Speeds = ASSUMED

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.settings.run.gpu]

    @property
    def episode(self) -> Episode:
        return mean_episode(self.model, self.settings, self.speeds)

    @property
    def replicas(self) -> int:
        return max(1, self.world_size // (self.settings.parallel.tp * self.settings.parallel.pp))

    @property
    def num_engines(self) -> int:
        return max(1, self.world_size // self.settings.engine.tp)

    @property
    def num_episodes(self) -> int:
        return self.settings.batch.prompts_per_step * self.settings.batch.group_size

    @property
    def link(self) -> float:
        """Bytes a second to a GPU of the same node."""
        return self.gpu.link * self.speeds.link_share

    @property
    def width(self) -> int:
        """Bytes of a number of the policy."""
        return getattr(torch, self.settings.model.dtype).itemsize

    @property
    def engine_width(self) -> int:
        """Bytes of a number of the engine."""
        return getattr(torch, self.settings.engine.dtype).itemsize


@dataclass(slots=True, frozen=True, kw_only=True)
class Seconds:
    """Of one step, each phase with its parts; and of one checkpoint."""

    rollout: Mapping[str, float]
    update: Mapping[str, float]
    sync: Mapping[str, float]
    checkpoint: float

    @property
    def step(self) -> float:
        """Without a checkpoint, which is written beside the next step."""
        return sum(self.rollout.values()) + sum(self.update.values()) + sum(self.sync.values())


def case_of(model: ModelSpec, settings: Settings, planned: Plan, speeds: Speeds = ASSUMED) -> Case:
    """trained: whole tensors stand on each tensor-parallel rank, and count once too often for each."""
    trained = sum(rank.share.num_trained for rank in planned.ranks)
    return Case(
        model=model, sizes=sizes_of(model), settings=settings, world_size=planned.world_size, cache_tokens=planned.engine.cache_tokens,
        trained=trained, speeds=speeds,
    )  # fmt: skip


def expected(case: Case) -> Seconds:
    return Seconds(rollout=rollout(case), update=update(case), sync=sync(case), checkpoint=checkpoint(case))


def sizes_of(model: ModelSpec) -> Sizes:
    counts = {name: math.prod(shape) for name, shape in model.shapes().items()}
    vision, total = sum(count for name, count in counts.items() if name.startswith("visual.")), sum(counts.values())
    looked_up = 0 if model.tied else counts["model.embed_tokens.weight"]
    return Sizes(language=total - vision - looked_up, vision=vision, total=total, num_tensors=len(counts))


def rollout(case: Case) -> dict[str, float]:
    """An engine draws for all its sequences at once; the last of a step's episodes keeps all GPUs waiting."""
    settings, episode = case.settings, case.episode
    mine = case.num_episodes / case.num_engines
    slots = max(1.0, min(settings.engine.max_num_seqs, mine, case.cache_tokens / episode.length))
    most = settings.task.max_turns * settings.task.max_new_tokens
    longest = min(most, episode.sampled * longest_share(case.num_episodes, case.speeds))
    steps = max(mine * episode.sampled / slots, longest)
    running = mine * episode.sampled / steps
    waited = episode.turns * case.speeds.tool_s if steps == longest else 0.0  # where others play on, nobody waits for a tool
    return {"decode": steps * decode_step(case, running=running), "tools": waited, "prompts": prompts(case)}


def decode_step(case: Case, *, running: float) -> float:
    """Seconds in which each of `running` sequences gets a token: the weights and all keys and values are read once, or so much is
    multiplied; and two sums a layer over the engine's ranks."""
    model, speeds, tp = case.model, case.speeds, case.settings.engine.tp
    language = case.sizes.language
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * case.engine_width
    length = case.episode.length - case.episode.sampled / 2
    reading = (language * case.engine_width + running * length * token) / tp / (case.gpu.hbm * speeds.memory_share)
    arithmetic = 2 * language * running / tp / (case.gpu.flops * speeds.prefill_share)
    row = running * model.hidden_size * case.engine_width
    sums = 2 * model.num_layers * (speeds.launch_s + 2 * (tp - 1) / tp * row / case.link) if tp > 1 else 0.0
    return speeds.decode_floor_s + max(reading, arithmetic) + sums


def prompts(case: Case) -> float:
    """Seconds of an engine's prompts and pictures: those of a group once, those of an environment's answers each."""
    episode, language, vision = case.episode, case.sizes.language, case.sizes.vision
    groups, further = case.settings.batch.prompts_per_step, case.num_episodes * (episode.pictures - 1) * episode.picture_tokens
    tokens = groups * episode.prompt + further
    patches = case.model.vision.patches_a_token * (groups * episode.picture_tokens + further)
    return 2 * (language * tokens + vision * patches) / (case.world_size * case.gpu.flops * case.speeds.prefill_share)


def trained_tokens(case: Case) -> float:
    """Of a step: a group's prompt stands once in every micro-batch that has some of it; what groups have in common is left out."""
    batch, episode = case.settings.batch, case.episode
    replies = batch.group_size * (episode.length - episode.prompt)
    copies = min(batch.group_size, math.ceil((replies + episode.prompt) / max(batch.micro_batch_tokens, episode.length)))
    return batch.prompts_per_step * (replies + copies * episode.prompt)


def update(case: Case) -> dict[str, float]:
    """All updates of a step, and the passes before them."""
    settings, parallel, speeds = case.settings, case.settings.parallel, case.speeds
    num_updates = settings.batch.minibatches * settings.batch.epochs
    tokens = trained_tokens(case)
    micro_batches = max(1.0, tokens / case.replicas / settings.batch.minibatches / settings.batch.micro_batch_tokens)
    arithmetic = flops(case, tokens) / (case.world_size * case.gpu.flops * speeds.training_share)
    return {
        "arithmetic": arithmetic,
        "stages": arithmetic * (parallel.pp - 1) / (micro_batches * parallel.vpp),
        "tensors": tensor_bytes(case, tokens) / case.link,
        "gradients": num_updates * gradient_bytes(case) / gradient_link(case),
        "optimizer": num_updates * optimizer(case),
    }


def flops(case: Case, tokens: float) -> float:
    """Of all epochs, as the slowest stage sees them. A pass forwards takes 2 for each parameter and token, and 2 * layers * heads * size *
    length for attention; a step 2 more for the input's gradient, 2 for the weight's, 2 again where layers are recomputed. The tower is the
    first stage's."""
    settings, model, episode = case.settings, case.model, case.episode
    language, vision = case.sizes.language, case.sizes.vision
    before, epochs = passes_before(case), settings.batch.epochs
    recompute = settings.parallel.recompute
    again, again_seen = 2 * (recompute == "full"), 2 * (recompute in ("vision", "full"))
    each = epochs * ((4 if settings.lora.rank else 6) + again) + 2 * before
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * episode.length / 2
    pictures = settings.batch.prompts_per_step + case.num_episodes * (episode.pictures - 1)
    patches = pictures * episode.picture_tokens * model.vision.patches_a_token
    of_a_patch = epochs * (6 + again_seen if trains_vision(settings.lora, settings.model.frozen) else 2) + 2 * before
    return tokens * each * (language + attention) + settings.parallel.pp * patches * of_a_patch * vision


def passes_before(case: Case) -> int:
    """Forward passes over the step's tokens before its first update: the old logprobs, the reference's."""
    algo, batch = case.settings.algo, case.settings.batch
    return needs_old(algo, num_updates=batch.minibatches * batch.epochs) + needs_reference(algo)


def tensor_bytes(case: Case, tokens: float) -> float:
    """Sent by a rank to its tensor-parallel neighbors in a step: a pass forwards, two backwards, one again."""
    parallel, model = case.settings.parallel, case.model
    passes = case.settings.batch.epochs * (3 + (parallel.recompute == "full")) + passes_before(case)
    row = model.hidden_size * case.width * (parallel.tp - 1) / parallel.tp
    return COLLECTIVES * model.num_layers / parallel.pp * passes * tokens / case.replicas * row


def gradient_bytes(case: Case) -> float:
    """Sent by a rank to the other replicas in one update: gradients scattered, weights gathered."""
    parallel = case.settings.parallel
    return (GRADIENT + PARAMETER) * case.trained / (parallel.tp * parallel.pp) * (case.replicas - 1) / case.replicas


def gradient_link(case: Case) -> float:
    """Bytes a second between replicas."""
    return case.link if case.world_size <= GPUS_A_NODE else min(case.link, case.speeds.network * case.speeds.network_share)


def optimizer(case: Case) -> float:
    """AdamW over this rank's part, on the GPU, or on the host, where the ranks of a node share its memory."""
    mine = case.trained / case.world_size
    if not case.settings.parallel.offload_optimizer:
        return STEP_BYTES * mine / (case.gpu.hbm * case.speeds.memory_share)
    moved = (GRADIENT + PARAMETER) * mine / (case.gpu.host * case.speeds.host_share)
    return moved + STEP_BYTES * mine * min(case.world_size, GPUS_A_NODE) / case.speeds.host_memory


def sync_bytes(case: Case) -> float:
    """Received by a rank of the weights that others hold."""
    shards = case.settings.parallel.tp * case.settings.parallel.pp
    return case.sizes.total * case.width * (1 - 1 / shards)


def sync(case: Case) -> dict[str, float]:
    """The new weights into every engine; parameters and gradients to the host and back around the rollout."""
    parallel = case.settings.parallel
    shards = parallel.tp * parallel.pp
    away = 2 * (case.sizes.total * case.width + GRADIENT * case.trained) / shards if parallel.offload_params else 0
    return {
        "weights": sync_bytes(case) / case.link,
        "tensors": case.sizes.num_tensors * case.speeds.tensor_s,
        "offload": away / (case.gpu.host * case.speeds.host_share),
        "wake": case.speeds.wake_s,
    }


def checkpoint(case: Case) -> float:
    """Until it lies on the disk: weights and state, every node its share."""
    total = case.sizes.total * case.width + STATE_BYTES * case.trained
    return total / (math.ceil(case.world_size / GPUS_A_NODE) * case.speeds.disk)


def in_words(case: Case) -> str:
    """For the dry run and the doctor."""
    seconds, episode = expected(case), case.episode
    phases = {"rollout": seconds.rollout, "update": seconds.update, "sync": seconds.sync}
    said = []
    for name, parts in phases.items():
        largest = ", ".join(f"{part} {value:.1f}" for part, value in parts.items() if value >= 0.05)
        said.append(f"{name} {sum(parts.values()):.1f} ({largest})")
    known = f"{len(MEASURED)} of {len(fields(Speeds))} constants were measured" if MEASURED else "nothing of it was measured"
    return (
        f"{seconds.step:.0f} s a step expected on {case.world_size} {case.settings.run.gpu}: {', '.join(said)}; a checkpoint "
        f"{seconds.checkpoint:.0f} s; for episodes of {episode.length:,.0f} tokens, {episode.sampled:,.0f} of them sampled; {known}"
    )
