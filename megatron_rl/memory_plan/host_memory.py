"""The plan of main memory: what each rank of a node may need at most, and whether the node has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_A_NODE, in_gb
from megatron_rl.memory_plan.image_memory import pictures
from megatron_rl.memory_plan.rank_shares import Share
from megatron_rl.models.model_spec import ModelSpec

PROCESS = 6 * GB
"""Python, torch and vLLM in one process: an estimate for CUDA's libraries; 0.84 GB without them, of a nano (benchmarks/host_memory.py)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class HostPlan:
    """Bytes of main memory for each rank of a node."""

    optimizer: int
    copies: int
    """Of parameters: those that leave the GPU while the engine rolls out, and those of the reference policy."""
    checkpoint: int
    """What this rank writes and copies to the host first: of its part of weights, main weights and moments all with checkpoint.background,
    else what is on the GPU."""
    pictures: int
    """Of a step (memory_plan/image_memory.py)."""
    boxes: int
    """In which episodes run code, each with as much as it may have."""
    sent: int = 0
    """Of the first rank alone: all weights as they were sent last to engines elsewhere, for one that comes back
    (rollout/vllm/weight_sender.py). At the most: what ranks hold alike is counted for each."""

    def of_node(self, num_ranks: int) -> int:
        return num_ranks * self.total + self.sent

    @property
    def total(self) -> int:
        """Of a rank."""
        return PROCESS + self.optimizer + self.copies + self.checkpoint + self.pictures + self.boxes


def plan_host(found: Sequence[Share], model: ModelSpec, settings: Settings, *, world_size: int, has_boxes: bool) -> HostPlan:
    """Of the rank with most. has_boxes: the task runs code, beside the engines."""
    replicas, sandbox = world_size // len(found), settings.task.sandbox
    boxes = (sandbox.size * sandbox.memory_mib << 20) // settings.engine.tp if has_boxes else 0  # one pool an engine
    seen = pictures(model, settings, world_size=world_size)
    plans = (_plan_host(share, settings, replicas=replicas, seen=seen, boxes=boxes) for share in found)
    sent = sum(share.policy.parameters for share in found) if settings.engine.mode == "server" else 0
    return replace(max(plans, key=lambda host: host.total), sent=sent)


def host_misfit(host: HostPlan, settings: Settings, *, world_size: int, here: bool = False) -> str:
    """`run.host_gb=N: ...` where a node's main memory (this machine's, unless another is stated) cannot hold its ranks; else nothing.
    here: the run is on this machine, which may have less than is stated."""
    ranks, stated, own = min(world_size, GPUS_A_NODE), settings.run.host_gb, psutil.virtual_memory().total
    room, needed = min(stated * GB or own, own) if here else stated * GB or own, host.of_node(ranks)
    if needed <= room:
        return ""
    whose = f"its {in_gb(room)} are" if room == stated * GB else f"this machine's {in_gb(room)} are"
    remedy = (
        "state another node's memory by run.host_gb, or lower engine.max_images, task.max_pixels, task.sandbox.size or memory_mib, "
        "or what is offloaded"
    )
    processes = f"{ranks} process{'es' * (ranks > 1)}"
    return f"run.host_gb={stated}: {whose} less than the {in_gb(needed)} that {processes} may need at most; {remedy}"


def _plan_host(share: Share, settings: Settings, *, replicas: int, seen: int, boxes: int) -> HostPlan:
    held, parallel = share.held, settings.parallel
    state = share.pinned + held.moments if parallel.offload_optimizer else 0
    references = int(settings.stage == "rl" and settings.algo.kl_coef > 0 and not settings.lora.rank)  # it changes places with the current
    copies = share.policy.parameters * references + (held.parameters if parallel.offload_params else 0)
    written = held.parameters // replicas + held.moments // 2 * 3  # policy/training_state.py; what is read is filled in place
    # Without a background nothing is copied but what is on the GPU: Megatron keeps the main weights there, whatever is offloaded.
    far = held.parameters // replicas + held.moments // 2 * (1 if parallel.offload_optimizer else 3)
    checkpoint = written if settings.checkpoint.background else far
    return HostPlan(optimizer=state, copies=copies, checkpoint=checkpoint, pictures=seen, boxes=boxes)
