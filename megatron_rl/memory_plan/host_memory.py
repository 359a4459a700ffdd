"""Plans the host memory of a node's ranks and checks that the node has enough memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from megatron_rl.config import Settings
from megatron_rl.dtypes import torch_dtype
from megatron_rl.memory_plan.gpu_specs import GB, GPUS_PER_NODE, format_gb
from megatron_rl.memory_plan.image_memory import plan_image_bytes
from megatron_rl.memory_plan.rank_shares import ModelShare, num_expert_params
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.checkpoint_merge import state_names

PROCESS_BYTES = 6 * GB
"""Estimated bytes of a process with Python, torch, vLLM and the CUDA libraries.

Without the CUDA libraries, a process with a nano model takes 0.84 GB (benchmarks/host_memory.py).
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class HostMemoryPlan:
    """Planned bytes of host memory for each rank of a node."""

    optimizer_bytes: int
    weight_copy_bytes: int
    """Bytes of the reference model, of the teacher, of the merged checkpoints, and of parameters
    offloaded while the engine generates.
    """
    checkpoint_bytes: int
    """Bytes copied to the host before this rank writes its part of a checkpoint.

    With checkpoint.background, the rank's weights, main weights and moments are copied. Without
    checkpoint.background, only the parts of this state that are on the GPU are copied.
    """
    image_bytes: int
    """Bytes of a step's images (memory_plan/image_memory.py)."""
    sandbox_bytes: int
    """Bytes of the sandboxes that run code, each counted with its maximum memory."""
    teacher_hidden_bytes: int = 0
    """Upper bound on the bytes of the teacher's hidden states of a step's sampled tokens."""
    teacher_top_bytes: int = 0
    """Upper bound on the bytes of the top tokens that a teacher's servers returned for a step."""
    published_weight_bytes: int = 0
    """Bytes of the last published weights, on the first rank only.

    These weights are kept for remote engines that recover from a failure
    (rollout/vllm/weight_sender.py). The value is an upper bound, because parameters shared by
    several ranks are counted once per rank.
    """

    def node_bytes(self, num_ranks: int) -> int:
        """Return the bytes needed on a node with `num_ranks` ranks."""
        return num_ranks * self.rank_bytes + self.published_weight_bytes

    @property
    def rank_bytes(self) -> int:
        """Number of bytes needed by one rank."""
        of_model = self.optimizer_bytes + self.weight_copy_bytes + self.checkpoint_bytes
        return PROCESS_BYTES + of_model + self.teacher_hidden_bytes + self.teacher_top_bytes + self.image_bytes + self.sandbox_bytes


def plan_host_memory(
    rank_shares: Sequence[ModelShare], model: ModelSpec, settings: Settings, *, world_size: int, uses_sandbox: bool
) -> HostMemoryPlan:
    """Return the host memory plan of the rank that needs the most memory.

    `uses_sandbox` is True if the task runs code on the nodes of the engines.
    """
    replicas, sandbox, ep = world_size // len(rank_shares), settings.task.sandbox, settings.parallel.ep
    boxes = (sandbox.size * sandbox.memory_mib << 20) // settings.engine.tp if uses_sandbox else 0  # one pool per engine
    seen = plan_image_bytes(model, settings, world_size=world_size)
    plans = (_plan_rank_host_memory(share, settings, replicas=replicas, image_bytes=seen, sandbox_bytes=boxes) for share in rank_shares)
    whole = sum(share.policy_footprint.param_bytes for share in rank_shares)
    whole += num_expert_params(model) * (ep - 1) // ep * torch_dtype(settings.model.dtype).itemsize
    sent = whole if settings.engine.mode == "server" else 0
    return replace(max(plans, key=lambda host: host.rank_bytes), published_weight_bytes=sent)


def host_memory_error(host: HostMemoryPlan, settings: Settings, *, world_size: int, on_this_machine: bool = False) -> str:
    """Return the error `plan.host_gb=N: ...` if a node has too little memory, else "".

    The node's memory is plan.host_gb or, if plan.host_gb is 0, the memory of this machine. If
    `on_this_machine` is True, a larger plan.host_gb is reduced to the memory of this machine.
    """
    ranks, stated, own = min(world_size, GPUS_PER_NODE), settings.plan.host_gb, psutil.virtual_memory().total
    available_bytes, needed = min(stated * GB or own, own) if on_this_machine else stated * GB or own, host.node_bytes(ranks)
    if needed <= available_bytes:
        return ""
    subject = (
        f"its {format_gb(available_bytes)} are" if available_bytes == stated * GB else f"this machine's {format_gb(available_bytes)} are"
    )
    remedy = (
        "set plan.host_gb to another node's memory, or lower engine.max_images, task.max_pixels, task.sandbox.size or memory_mib, "
        "or offload less"
    )
    processes = f"{ranks} process{'es' * (ranks > 1)}"
    return f"plan.host_gb={stated}: {subject} less than the {format_gb(needed)} that {processes} may need at most; {remedy}"


def _plan_rank_host_memory(
    rank_share: ModelShare, settings: Settings, *, replicas: int, image_bytes: int, sandbox_bytes: int
) -> HostMemoryPlan:
    held, parallel = rank_share.total_footprint, settings.parallel
    state = rank_share.pinned_bytes + held.moment_bytes if parallel.offload_optimizer else 0
    references = int(settings.stage == "rl" and settings.algo.kl_coef > 0 and not settings.lora.rank)  # swapped with the policy
    copies = rank_share.policy_footprint.param_bytes * references + (held.param_bytes if parallel.offload_params else 0)
    merge_bytes, itemsize = _merge_state_bytes(rank_share, settings), torch_dtype(settings.model.dtype).itemsize
    start_bytes = 4 * rank_share.num_merged if settings.distill.merge.uses_ties else 0
    copies += rank_share.teacher_bytes + merge_bytes + start_bytes + itemsize * rank_share.num_merged
    copies_of_experts = replicas // parallel.ep  # other parameters have more copies, so that the bytes are an upper bound
    written = held.param_bytes // copies_of_experts + held.moment_bytes // 2 * 3  # policy/training_state.py; loading fills existing tensors
    # Without `background`, only data on the GPU is copied. Even with offloading, Megatron keeps
    # the main weights on the GPU.
    far = held.param_bytes // copies_of_experts + held.moment_bytes // 2 * (1 if parallel.offload_optimizer else 3)
    checkpoint = written + merge_bytes // copies_of_experts if settings.checkpoint.background else far
    return HostMemoryPlan(
        optimizer_bytes=state, weight_copy_bytes=copies, checkpoint_bytes=checkpoint, image_bytes=image_bytes, sandbox_bytes=sandbox_bytes,
        teacher_hidden_bytes=_teacher_hidden_bytes(settings, replicas=replicas) if rank_share.teacher_output_bytes else 0,
        teacher_top_bytes=_teacher_top_bytes(settings),
    )  # fmt: skip


def _merge_state_bytes(rank_share: ModelShare, settings: Settings) -> int:
    """Return the bytes of a merge of checkpoints that are saved in the run's checkpoints."""
    return 4 * len(state_names(settings.distill.merge)) * rank_share.num_merged


def _teacher_top_bytes(settings: Settings) -> int:
    """Return the bytes of the top tokens of a step from servers, which every process holds.

    An id and a logprob take 8 bytes.
    """
    distill, task, batch = settings.distill, settings.task, settings.batch
    if distill.is_local or not distill.has_divergence:
        return 0
    return batch.prompts_per_step * batch.group_size * task.max_turns * task.max_new_tokens * distill.top_k * 8


def _teacher_hidden_bytes(settings: Settings, *, replicas: int) -> int:
    """Return the bytes of the teacher's hidden states on a rank of the last pipeline stage.

    Every episode is assumed to sample as many tokens as it may, and to have the teacher with the
    largest hidden states. In stage=sft, the hidden states of one update exist at a time. Every
    demonstration is assumed to have the maximum length.
    """
    distill, task, batch = settings.distill, settings.task, settings.batch
    if not distill.has_divergence:
        return 0
    num_rollouts, episode_tokens = batch.prompts_per_step * batch.group_size, task.max_turns * task.max_new_tokens
    num_demonstrations, longest = distill.count_demonstrations(num_rollouts), settings.engine.max_model_len
    if settings.stage == "sft":
        num_rollouts, num_demonstrations = 0, settings.sft.batch_size
    num_tokens = -(-num_rollouts // replicas) * episode_tokens + -(-num_demonstrations // replicas) * longest
    teachers = distill.teacher_paths or [settings.model.path]
    hidden_size = max(load_known_spec(path, key=distill.teacher_key(path)).hidden_size for path in teachers)
    return num_tokens * hidden_size * torch_dtype(settings.model.dtype).itemsize
