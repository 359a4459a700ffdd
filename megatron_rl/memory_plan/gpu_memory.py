"""GPU memory plan for runs in which the policy and the engine share each GPU and take turns.

The plan is determined by the largest of three phases:

- Rollout: the engine's share (engine.gpu_memory_utilization), plus the parts of the policy that are
  not offloaded to the host.
- Update: the engine sleeps, with its weights discarded and its KV cache released.
- Sync: the new weights are transferred from the policy to the engine.

Weights, gradients and optimizer state are measured on an instance of the model without data
(rank_shares.py). Activations are computed by a formula (activations.py). The engine's memory is
computed by engine_memory.py. The constants in this module account for all other memory. On one
H100, the peaks of the three phases were measured with a 7B model and adapters
(benchmarks/results/h100_2026-11-26.md).
"""

from dataclasses import dataclass

from megatron_rl.config import Settings, require
from megatron_rl.dtypes import torch_dtype
from megatron_rl.memory_plan.activations import ActivationMemory, MicroBatchSize, compute_activation_memory
from megatron_rl.memory_plan.engine_memory import CUDA_GRAPH_BYTES, EnginePlan, max_image_tokens, plan_engine
from megatron_rl.memory_plan.gpu_specs import GB, GPU_SPECS, USABLE_FRACTION, format_gb
from megatron_rl.memory_plan.host_memory import HostMemoryPlan, plan_host_memory
from megatron_rl.memory_plan.rank_shares import EMPTY_FOOTPRINT, ModelShare, compute_model_shares, critic_spec
from megatron_rl.models.model_spec import ModelSpec

CUDA_CONTEXT_BYTES = 6 * GB // 10
"""Bytes of a process's CUDA context; 0.55 GB measured on an H100 with CUDA 13."""
LIBRARY_BYTES = 4 * GB // 10
"""Bytes of loaded kernels, library workspaces and the rounding of small blocks.

On an H100, the kernels of one update took 0.24 GB. The workspaces belong to cuBLAS (32 MiB per
handle and stream on Hopper: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp) and to Triton.
"""
COMMUNICATOR_BYTES = 5 * GB // 10
"""Bytes of an NCCL communicator.

On an H100, three communicators with one rank each took 0.59 GB (the first, including NCCL's
kernels), 0.41 GB and 0.41 GB. Larger communicators have not been measured; from the number of
channels that NCCL 2.29 uses on NVLink, the buffers were estimated at 0.2 to 0.5 GB.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class RankMemoryPlan:
    """Planned bytes on the GPU of one rank, by phase."""

    rank_share: ModelShare
    activations: ActivationMemory
    optimizer_bytes: int
    """Bytes of optimizer state kept on the GPU."""
    rollout_bytes: int
    sync_bytes: int
    update_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Number of bytes in the largest phase."""
        return max(self.rollout_bytes, self.sync_bytes, self.update_bytes)


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryPlan:
    """Memory plan of all ranks of a run."""

    gpu: str
    gpu_bytes: int
    """Memory of one GPU in bytes."""
    world_size: int
    num_tokens: int
    """Number of tokens in the largest micro-batch."""
    engine: EnginePlan
    host: HostMemoryPlan
    """Host memory plan of the rank that needs the most host memory."""
    ranks: list[RankMemoryPlan]
    """Plans of the ranks in one data-parallel replica; all replicas need the same memory."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs the most GPU memory."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def usable_bytes(self) -> float:
        """Number of usable bytes on one GPU."""
        return USABLE_FRACTION * self.gpu_bytes

    @property
    def fits(self) -> bool:
        """True if the peak of every rank fits into the usable memory."""
        return self.peak_bytes <= self.usable_bytes


def plan_gpu_memory(
    model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False, uses_sandbox: bool = False, memory: int = 0
) -> MemoryPlan:  # fmt: skip
    """Return the memory plan of a run.

    Args:
        model: sizes of the model.
        settings: settings of the run.
        world_size: number of ranks.
        has_values: True if the algorithm needs a critic.
        uses_sandbox: True if the task runs code in sandboxes on the nodes of the engines.
        memory: memory of the actual GPU in bytes; 0 selects the memory of the GPU named by
            plan.gpu.

    Raises:
        ValueError: the engine's share is too small for its weights and one sequence.
    """
    sizes = largest_micro_batches(model, settings)
    engine = plan_engine(model, settings, memory=memory)
    found = compute_model_shares(model, settings, world_size=world_size, has_values=has_values)
    return MemoryPlan(
        gpu=settings.plan.gpu,
        gpu_bytes=memory or GPU_SPECS[settings.plan.gpu].memory_bytes,
        world_size=world_size,
        num_tokens=max(size.num_tokens for size in sizes),
        engine=engine,
        host=plan_host_memory(found, model, settings, world_size=world_size, uses_sandbox=uses_sandbox),
        ranks=[_plan_rank(share, model, settings, engine=engine, sizes=sizes, unplanned=unplanned_bytes(settings)) for share in found],
    )


def largest_micro_batches(model: ModelSpec, settings: Settings) -> list[MicroBatchSize]:
    """Return the sizes of the micro-batches that may need the most memory.

    A micro-batch of several sequences has at most batch.micro_batch_tokens tokens, all of which may
    be of images, and MAX_KV_RATIO keys per token. A sequence that is longer than that is packed
    alone (batching/minibatches.py): its keys are not gathered, and engine.max_images and
    task.max_pixels limit its images.
    """
    several = MicroBatchSize.full_of_images(settings.batch.micro_batch_tokens)
    longest = settings.engine.max_model_len
    if longest <= several.num_tokens:
        return [several]
    return [several, MicroBatchSize(num_tokens=longest, num_image_tokens=most_image_tokens(model, settings), kv_ratio=1)]


def most_image_tokens(model: ModelSpec, settings: Settings) -> int:
    """Return the largest number of image tokens in a sequence of a training episode."""
    token_pixels = (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
    of_images = settings.engine.max_images * max_image_tokens(model, settings)
    return min(of_images, settings.task.max_pixels // token_pixels or of_images, settings.engine.max_model_len)


def require_fit(planned: MemoryPlan) -> str:
    """Check that the plan fits and return a one-line comparison of planned and usable memory.

    Raises:
        ValueError: the plan does not fit the GPU.
    """
    remedy = (
        f"the usable {format_gb(planned.usable_bytes)} ({USABLE_FRACTION:.0%}) are less than the required {format_gb(planned.peak_bytes)}"
    )
    require(planned.fits, "plan.gpu", planned.gpu, f"{remedy}; raise parallel.tp, enable offloading, or lower batch.micro_batch_tokens")
    peak, usable = format_gb(planned.peak_bytes), format_gb(planned.usable_bytes)
    return f"{peak} of the usable {usable}, which is {USABLE_FRACTION:.0%} of a {planned.gpu}; {planned.world_size} GPUs"


def unplanned_bytes(settings: Settings) -> int:
    """Return the bytes of GPU memory that the other parts of the plan do not include.

    These bytes are used by CUDA, by the libraries, and by NCCL for each process group that takes
    part in a collective operation on GPU tensors. Megatron uses three groups in every update, even
    if they have only one rank: data-parallel (gradients and weights), pipeline (the last broadcast)
    and optimizer (the norm of the gradients). The other groups are used only if they have more than
    one rank: the tensor-parallel group, the world group (between pipeline stages), the engine's
    groups, and with parallel.ep the group that counts tokens, the one that exchanges them, and the
    one of ranks with the same experts.
    """
    parallel = settings.parallel
    num_groups = 3 + sum(size > 1 for size in (parallel.tp, parallel.pp, settings.engine.tp)) + 3 * (parallel.ep > 1)
    return CUDA_CONTEXT_BYTES + LIBRARY_BYTES + COMMUNICATOR_BYTES * num_groups


def _plan_rank(
    rank_share: ModelShare, model: ModelSpec, settings: Settings, *, engine: EnginePlan, sizes: list[MicroBatchSize], unplanned: int
) -> RankMemoryPlan:
    """Return the plan of one rank; `unplanned` is the result of unplanned_bytes."""
    held, parallel = rank_share.total_footprint, settings.parallel
    itemsize = torch_dtype(settings.model.dtype).itemsize
    # Megatron offloads the moments and a copy of the main weights. The main weights themselves
    # stay on the GPU (optimizer/distrib_optimizer.py, 0.16.1).
    optimizer = held.main_weight_bytes if parallel.offload_optimizer else held.main_weight_bytes + held.moment_bytes
    awake = held.param_bytes + held.grad_bytes
    max_patches = settings.model.max_pixels // model.vision.patch_size**2
    has_losses = any((settings.algo.router_aux_loss_coef, settings.algo.router_z_loss_coef))
    trained = [(model, settings.lora, has_losses)] + (
        [(critic_spec(model, settings), settings.critic.lora, False)] if rank_share.critic_footprint != EMPTY_FOOTPRINT else []
    )
    given = {
        "stage": rank_share.pp_rank,
        "max_patches": max_patches,
        "itemsize": itemsize,
        "frozen": settings.model.frozen,
    }
    passing = max(
        (
            compute_activation_memory(each, parallel, lora=lora, size=size, has_router_losses=losses, **given)
            for each, lora, losses in trained for size in sizes
        ),
        key=lambda found: found.total_bytes,
    )  # fmt: skip  # one model trains at a time
    unplanned += rank_share.teacher_output_bytes
    has_head = rank_share.pp_rank == parallel.pp - 1
    compared = _divergence_bytes(model, settings, itemsize=itemsize) if has_head else 0
    step = 0 if parallel.offload_optimizer else held.moment_bytes // 2  # torch's AdamW allocates the roots of all second moments at once
    largest_phase = max(passing.total_bytes + compared, step, rank_share.largest_teacher_bytes)
    largest = max(model.vocab_size * model.hidden_size, _num_params_of_expert_tensor(model)) * itemsize
    buckets = 2 * int(settings.engine.bucket_mib * 2**20) + largest
    playing, taking = (engine.budget_bytes, engine.weight_bytes) if settings.engine.mode == "colocated" else (0, 0)
    leaves = parallel.offload_params and settings.engine.mode == "colocated"
    return RankMemoryPlan(
        rank_share=rank_share,
        activations=passing,
        optimizer_bytes=optimizer,
        rollout_bytes=unplanned + optimizer + playing + (0 if leaves else awake),
        sync_bytes=unplanned + CUDA_GRAPH_BYTES + optimizer + awake + taking + buckets,
        update_bytes=unplanned + CUDA_GRAPH_BYTES + optimizer + awake + largest_phase,
    )


def _divergence_bytes(model: ModelSpec, settings: Settings, *, itemsize: int) -> int:
    """Return the bytes that a divergence from the teacher adds to the logits of a chunk.

    These are the teacher's logits, the gradient of the divergence, and with top_k a mask. Logprobs
    from servers are float32.
    """
    distill, parallel = settings.distill, settings.parallel
    if not distill.has_divergence:
        return 0
    per_entry = (itemsize if distill.is_local else 4) + itemsize + (distill.support == "top_k")
    return parallel.log_probs_chunk_size * model.vocab_size // parallel.tp * per_entry


def _num_params_of_expert_tensor(model: ModelSpec) -> int:
    """Return the size of gate_up_proj of all experts of a layer; 0 without experts."""
    return 0 if model.experts is None else 2 * model.experts.num_experts * model.hidden_size * model.experts.ffn_size
