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
from megatron_rl.memory_plan.activations import Activations, activations
from megatron_rl.memory_plan.engine_memory import GRAPHS, EnginePlan, plan_engine
from megatron_rl.memory_plan.gpu_specs import GB, GPUS, USABLE, in_gb
from megatron_rl.memory_plan.host_memory import HostPlan, plan_host
from megatron_rl.memory_plan.rank_shares import NOTHING, Share, critic_spec, shares
from megatron_rl.models.model_spec import ModelSpec

CONTEXT = 6 * GB // 10
"""CUDA's own of a process, kernels loaded: an estimate for Hopper with CUDA 13."""
LIBRARIES = 4 * GB // 10
"""cuBLAS's workspaces (32 MiB for each handle and stream on Hopper: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp), Triton's, and the
rounding of small blocks: an estimate."""
COMMUNICATOR = 5 * GB // 10
"""NCCL's buffers for one group of ranks: estimated 0.2 to 0.5 GB with NCCL 2.29's channels on NVLink."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SharePlan:
    """Bytes on the GPU of one rank, by phase."""

    share: Share
    activations: Activations
    optimizer: int
    """What of the optimizer's state is on the GPU."""
    rollout: int
    sync: int
    update: int

    @property
    def peak(self) -> int:
        return max(self.rollout, self.sync, self.update)


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    gpu: str
    memory: int
    """Bytes of the GPU."""
    world_size: int
    num_tokens: int
    """Of the largest micro-batch."""
    engine: EnginePlan
    host: HostPlan
    """Of the rank with most."""
    ranks: list[SharePlan]
    """One data-parallel replica's; the others hold the same."""

    @property
    def peak(self) -> int:
        """Of the rank with most."""
        return max(rank.peak for rank in self.ranks)

    @property
    def room(self) -> float:
        """Of the GPU."""
        return USABLE * self.memory

    @property
    def fits(self) -> bool:
        return self.peak <= self.room


def plan(
    model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False, has_boxes: bool = False, memory: int = 0
) -> Plan:  # fmt: skip
    """has_values: the algorithm needs a critic; has_boxes: the task runs code in boxes beside the engines; memory: bytes of the GPU at
    hand, 0 where it is the one of run.gpu. Raises ValueError where the engine has no room for its weights and one context."""
    micro_batch = settings.batch.micro_batch_tokens
    num_tokens = max(micro_batch, settings.engine.max_model_len)
    engine = plan_engine(model, settings, memory=memory)
    found = shares(model, settings, world_size=world_size, has_values=has_values)
    return Plan(
        gpu=settings.run.gpu,
        memory=memory or GPUS[settings.run.gpu].memory,
        world_size=world_size,
        num_tokens=num_tokens,
        engine=engine,
        host=plan_host(found, model, settings, world_size=world_size, has_boxes=has_boxes),
        ranks=[
            _plan_share(share, model, settings, engine=engine, num_tokens=num_tokens, beside=residue(settings, world_size=world_size))
            for share in found
        ],
    )


def require_fit(planned: Plan) -> str:
    """How well it fits the GPU, in words. ValueError: it does not."""
    remedy = f"its {in_gb(planned.room)} ({USABLE:.0%}) are less than the {in_gb(planned.peak)} needed"
    require(planned.fits, "run.gpu", planned.gpu, f"{remedy}; raise parallel.tp, offload, or lower the tokens")
    return f"{in_gb(planned.peak)} of the {in_gb(planned.room)} that are {USABLE:.0%} of a {planned.gpu}; {planned.world_size} GPUs"


def residue(settings: Settings, *, world_size: int) -> int:
    """Bytes of a GPU that nobody counts: CUDA's, the libraries', and NCCL's for each group with more than this rank: tensor-parallel,
    stages, data-parallel, the world, and the engine's. With the engine's graphs 2.5 GB on one GPU, 4 GB on eight with parallel.tp=2; a
    reading of the libraries expected 3.5 to 5 there."""
    tp, pp = settings.parallel.tp, settings.parallel.pp
    groups = [tp, pp, world_size // (tp * pp), world_size, settings.engine.tp]
    return CONTEXT + LIBRARIES + COMMUNICATOR * sum(size > 1 for size in groups)


def _plan_share(share: Share, model: ModelSpec, settings: Settings, *, engine: EnginePlan, num_tokens: int, beside: int) -> SharePlan:
    """beside: the residue."""
    held, parallel = share.held, settings.parallel
    width = getattr(torch, settings.model.dtype).itemsize
    # Megatron keeps the main weights on the GPU and offloads a copy of them with the moments (optimizer/distrib_optimizer.py, 0.16.1).
    optimizer = held.main if parallel.offload_optimizer else held.main + held.moments
    awake = held.parameters + held.gradients
    max_patches = settings.model.max_pixels // model.vision.patch**2
    trained = [(model, settings.lora)] + ([(critic_spec(model, settings), settings.critic.lora)] if share.critic != NOTHING else [])
    given = {"stage": share.pp_rank, "num_tokens": num_tokens, "max_patches": max_patches, "width": width, "frozen": settings.model.frozen}
    passing = max((activations(each, parallel, lora=lora, **given) for each, lora in trained), key=lambda found: found.total)  # in turn
    step = 0 if parallel.offload_optimizer else held.moments // 2  # torch's AdamW holds the roots of all second moments at once
    largest = model.vocab_size * model.hidden_size * width
    buckets = 2 * int(settings.engine.bucket_mib * 2**20) + largest
    playing, taking = (engine.budget, engine.weights) if settings.engine.mode == "colocated" else (0, 0)
    leaves = parallel.offload_params and settings.engine.mode == "colocated"
    return SharePlan(
        share=share,
        activations=passing,
        optimizer=optimizer,
        rollout=beside + optimizer + playing + (0 if leaves else awake),
        sync=beside + GRAPHS + optimizer + awake + taking + buckets,
        update=beside + GRAPHS + optimizer + awake + max(passing.total, step),
    )
