"""The plan of a run's memory on GPUs: policy and engine share each of them and take turns.

Three phases, of which the largest counts. Rollout: the engine has its share (engine.gpu_memory_utilization), beside it lies what of the
policy is not on the host. Update: the engine sleeps (its weights discarded, its cache given back). Sync: the new weights go from one to
the other. Weights, gradients and optimizer are counted on the real model (rank_shares.py), activations are a formula (activations.py), and
the constants below are what neither covers; the engine's own plan is engine_memory.py. It was never compared with a GPU:
tests/gpu/test_memory_on_gpu.py is there to do it.
"""

from dataclasses import dataclass

import torch

from megatron_rl.config import Settings, require
from megatron_rl.memory_plan.activations import ActivationMemory, compute_activation_memory
from megatron_rl.memory_plan.engine_memory import CUDA_GRAPH_BYTES, EnginePlan, plan_engine
from megatron_rl.memory_plan.gpu_specs import GB, GPU_SPECS, USABLE_FRACTION, format_gb
from megatron_rl.memory_plan.host_memory import HostMemoryPlan, plan_host_memory
from megatron_rl.memory_plan.rank_shares import EMPTY_FOOTPRINT, ModelShare, compute_model_shares, critic_spec
from megatron_rl.models.model_spec import ModelSpec

CUDA_CONTEXT_BYTES = 6 * GB // 10
"""CUDA's own of a process, kernels loaded: an estimate for Hopper with CUDA 13."""
LIBRARY_BYTES = 4 * GB // 10
"""cuBLAS's workspaces (32 MiB for each handle and stream on Hopper: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp), Triton's, and the
rounding of small blocks: an estimate."""
COMMUNICATOR_BYTES = 5 * GB // 10
"""NCCL's buffers for one group of ranks: estimated 0.2 to 0.5 GB with NCCL 2.29's channels on NVLink."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RankMemoryPlan:
    """Bytes on the GPU of one rank, by phase."""

    rank_share: ModelShare
    activations: ActivationMemory
    optimizer_bytes: int
    """What of the optimizer's state is on the GPU."""
    rollout_bytes: int
    sync_bytes: int
    update_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.rollout_bytes, self.sync_bytes, self.update_bytes)


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryPlan:
    gpu: str
    gpu_bytes: int
    """Bytes of the GPU."""
    world_size: int
    num_tokens: int
    """Of the largest micro-batch."""
    engine: EnginePlan
    host: HostMemoryPlan
    """Of the rank with most."""
    ranks: list[RankMemoryPlan]
    """One data-parallel replica's; the others hold the same."""

    @property
    def peak_bytes(self) -> int:
        """Of the rank with most."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def usable_bytes(self) -> float:
        """Of the GPU."""
        return USABLE_FRACTION * self.gpu_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


def plan_gpu_memory(
    model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False, uses_sandbox: bool = False, memory: int = 0
) -> MemoryPlan:  # fmt: skip
    """has_values: the algorithm needs a critic; uses_sandbox: the task runs code in boxes beside the engines; memory: bytes of the GPU at
    hand, 0 where it is the one of run.gpu. Raises ValueError where the engine has no room for its weights and one context."""
    micro_batch = settings.batch.micro_batch_tokens
    num_tokens = max(micro_batch, settings.engine.max_model_len)
    engine = plan_engine(model, settings, memory=memory)
    found = compute_model_shares(model, settings, world_size=world_size, has_values=has_values)
    return MemoryPlan(
        gpu=settings.run.gpu,
        gpu_bytes=memory or GPU_SPECS[settings.run.gpu].memory_bytes,
        world_size=world_size,
        num_tokens=num_tokens,
        engine=engine,
        host=plan_host_memory(found, model, settings, world_size=world_size, uses_sandbox=uses_sandbox),
        ranks=[
            _plan_rank(
                share, model, settings, engine=engine, num_tokens=num_tokens, unplanned=unplanned_bytes(settings, world_size=world_size)
            )
            for share in found
        ],
    )


def require_fit(planned: MemoryPlan) -> str:
    """How well it fits the GPU, in words. ValueError: it does not."""
    remedy = f"its {format_gb(planned.usable_bytes)} ({USABLE_FRACTION:.0%}) are less than the {format_gb(planned.peak_bytes)} needed"
    require(planned.fits, "run.gpu", planned.gpu, f"{remedy}; raise parallel.tp, offload, or lower the tokens")
    peak, usable = format_gb(planned.peak_bytes), format_gb(planned.usable_bytes)
    return f"{peak} of the {usable} that are {USABLE_FRACTION:.0%} of a {planned.gpu}; {planned.world_size} GPUs"


def unplanned_bytes(settings: Settings, *, world_size: int) -> int:
    """Bytes of a GPU that nobody counts: CUDA's, the libraries', and NCCL's for each group with more than this rank: tensor-parallel,
    stages, data-parallel, the world, and the engine's. With the engine's graphs 2.5 GB on one GPU, 4 GB on eight with parallel.tp=2; a
    reading of the libraries expected 3.5 to 5 there."""
    tp, pp = settings.parallel.tp, settings.parallel.pp
    groups = [tp, pp, world_size // (tp * pp), world_size, settings.engine.tp]
    return CUDA_CONTEXT_BYTES + LIBRARY_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in groups)


def _plan_rank(
    rank_share: ModelShare, model: ModelSpec, settings: Settings, *, engine: EnginePlan, num_tokens: int, unplanned: int
) -> RankMemoryPlan:
    """unplanned: the residue."""
    held, parallel = rank_share.total_footprint, settings.parallel
    itemsize = getattr(torch, settings.model.dtype).itemsize
    # Megatron keeps the main weights on the GPU and offloads a copy of them with the moments (optimizer/distrib_optimizer.py, 0.16.1).
    optimizer = held.main_weight_bytes if parallel.offload_optimizer else held.main_weight_bytes + held.moment_bytes
    awake = held.param_bytes + held.grad_bytes
    max_patches = settings.model.max_pixels // model.vision.patch_size**2
    trained = [(model, settings.lora)] + (
        [(critic_spec(model, settings), settings.critic.lora)] if rank_share.critic_footprint != EMPTY_FOOTPRINT else []
    )
    given = {
        "stage": rank_share.pp_rank,
        "num_tokens": num_tokens,
        "max_patches": max_patches,
        "itemsize": itemsize,
        "frozen": settings.model.frozen,
    }
    passing = max(
        (compute_activation_memory(each, parallel, lora=lora, **given) for each, lora in trained), key=lambda found: found.total_bytes
    )  # in turn
    step = 0 if parallel.offload_optimizer else held.moment_bytes // 2  # torch's AdamW holds the roots of all second moments at once
    largest = model.vocab_size * model.hidden_size * itemsize
    buckets = 2 * int(settings.engine.bucket_mib * 2**20) + largest
    playing, taking = (engine.budget_bytes, engine.weight_bytes) if settings.engine.mode == "colocated" else (0, 0)
    leaves = parallel.offload_params and settings.engine.mode == "colocated"
    return RankMemoryPlan(
        rank_share=rank_share,
        activations=passing,
        optimizer_bytes=optimizer,
        rollout_bytes=unplanned + optimizer + playing + (0 if leaves else awake),
        sync_bytes=unplanned + CUDA_GRAPH_BYTES + optimizer + awake + taking + buckets,
        update_bytes=unplanned + CUDA_GRAPH_BYTES + optimizer + awake + max(passing.total_bytes, step),
    )
