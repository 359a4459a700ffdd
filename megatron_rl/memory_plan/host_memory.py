"""The plan of main memory: what each rank of a node may need at most, and whether the node has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_PER_NODE, format_gb
from megatron_rl.memory_plan.image_memory import plan_image_bytes
from megatron_rl.memory_plan.rank_shares import ModelShare
from megatron_rl.models.model_spec import ModelSpec

PROCESS_BYTES = 6 * GB
"""Python, torch and vLLM in one process: an estimate for CUDA's libraries; 0.84 GB without them, of a nano (benchmarks/host_memory.py)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HostMemoryPlan:
    """Bytes of main memory for each rank of a node."""

    optimizer_bytes: int
    weight_copy_bytes: int
    """Of parameters: those that leave the GPU while the engine rolls out, and those of the reference policy."""
    checkpoint_bytes: int
    """What this rank writes and copies to the host first: of its part of weights, main weights and moments all with checkpoint.background,
    else what is on the GPU."""
    image_bytes: int
    """Of a step (memory_plan/image_memory.py)."""
    sandbox_bytes: int
    """In which episodes run code, each with as much as it may have."""
    published_weight_bytes: int = 0
    """Of the first rank alone: all weights as they were sent last to engines elsewhere, for one that comes back
    (rollout/vllm/weight_sender.py). At the most: what ranks hold alike is counted for each."""

    def node_bytes(self, num_ranks: int) -> int:
        return num_ranks * self.rank_bytes + self.published_weight_bytes

    @property
    def rank_bytes(self) -> int:
        """Of a rank."""
        return PROCESS_BYTES + self.optimizer_bytes + self.weight_copy_bytes + self.checkpoint_bytes + self.image_bytes + self.sandbox_bytes


def plan_host_memory(
    rank_shares: Sequence[ModelShare], model: ModelSpec, settings: Settings, *, world_size: int, uses_sandbox: bool
) -> HostMemoryPlan:
    """Return the plan of the rank that needs most. uses_sandbox: the task runs code, beside the engines."""
    replicas, sandbox = world_size // len(rank_shares), settings.task.sandbox
    boxes = (sandbox.size * sandbox.memory_mib << 20) // settings.engine.tp if uses_sandbox else 0  # one pool an engine
    seen = plan_image_bytes(model, settings, world_size=world_size)
    plans = (_plan_rank_host_memory(share, settings, replicas=replicas, image_bytes=seen, sandbox_bytes=boxes) for share in rank_shares)
    sent = sum(share.policy_footprint.param_bytes for share in rank_shares) if settings.engine.mode == "server" else 0
    return replace(max(plans, key=lambda host: host.rank_bytes), published_weight_bytes=sent)


def host_memory_error(host: HostMemoryPlan, settings: Settings, *, world_size: int, on_this_machine: bool = False) -> str:
    """`run.host_gb=N: ...` where a node's main memory (this machine's, unless another is stated) cannot hold its ranks; else nothing.
    on_this_machine: the run is on this machine, which may have less than is stated."""
    ranks, stated, own = min(world_size, GPUS_PER_NODE), settings.run.host_gb, psutil.virtual_memory().total
    room, needed = min(stated * GB or own, own) if on_this_machine else stated * GB or own, host.node_bytes(ranks)
    if needed <= room:
        return ""
    whose = f"its {format_gb(room)} are" if room == stated * GB else f"this machine's {format_gb(room)} are"
    remedy = (
        "state another node's memory by run.host_gb, or lower engine.max_images, task.max_pixels, task.sandbox.size or memory_mib, "
        "or what is offloaded"
    )
    processes = f"{ranks} process{'es' * (ranks > 1)}"
    return f"run.host_gb={stated}: {whose} less than the {format_gb(needed)} that {processes} may need at most; {remedy}"


def _plan_rank_host_memory(
    rank_share: ModelShare, settings: Settings, *, replicas: int, image_bytes: int, sandbox_bytes: int
) -> HostMemoryPlan:
    held, parallel = rank_share.total_footprint, settings.parallel
    state = rank_share.pinned_bytes + held.moment_bytes if parallel.offload_optimizer else 0
    references = int(settings.stage == "rl" and settings.algo.kl_coef > 0 and not settings.lora.rank)  # it changes places with the current
    copies = rank_share.policy_footprint.param_bytes * references + (held.param_bytes if parallel.offload_params else 0)
    written = held.param_bytes // replicas + held.moment_bytes // 2 * 3  # policy/training_state.py; what is read is filled in place
    # Without a background nothing is copied but what is on the GPU: Megatron keeps the main weights there, whatever is offloaded.
    far = held.param_bytes // replicas + held.moment_bytes // 2 * (1 if parallel.offload_optimizer else 3)
    checkpoint = written if settings.checkpoint.background else far
    return HostMemoryPlan(
        optimizer_bytes=state, weight_copy_bytes=copies, checkpoint_bytes=checkpoint, image_bytes=image_bytes, sandbox_bytes=sandbox_bytes
    )
