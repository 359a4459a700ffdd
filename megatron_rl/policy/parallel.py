"""Checks the trainer's parallel layout and creates Megatron's process groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import ParallelSettings, require
from megatron_rl.distributed.world import round_up_to_minutes
from megatron_rl.models.model_spec import EXPERT_MULTIPLE, ModelSpec


@dataclass(slots=True, frozen=True)
class Layout:
    """Parallel sizes, this rank's coordinates, and its process groups."""

    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    ep: int
    ep_rank: int
    ep_group: dist.ProcessGroup
    """Data-parallel ranks that divide the experts among themselves."""
    tp_ep_group: dist.ProcessGroup
    """Ranks that together hold all experts of this stage; the tensor-parallel rank varies fastest.
    """
    vpp: int
    """Number of model chunks per pipeline stage; if greater than 1, the pipeline is interleaved."""
    sequence_parallel: bool
    recompute: str
    recompute_num_layers: int = 0
    """Number of decoder layers of this stage that are recomputed if recompute is "full"; 0: all."""

    @property
    def is_first_stage(self) -> bool:
        """Return True if this rank is on the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if this rank is on the last pipeline stage."""
        return self.pp_rank == self.pp - 1

    def first_stage_rank(self, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank of the first-stage process with the given dp and tp ranks.

        In the numbering of global ranks, the tensor-parallel rank varies fastest, then the
        data-parallel rank, then the pipeline stage (megatron-core 0.16.1,
        parallel_state.py::initialize_model_parallel, order tp-cp-ep-dp-pp).
        """
        return dp_rank * self.tp + tp_rank

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.pp_group)[-1]


def check_layout(parallel: ParallelSettings, model: ModelSpec, world_size: int, *, model_label: str = "the model") -> None:
    """Raise ValueError if the layout does not fit the model and the world size.

    The error message names the key, its value and the valid sizes. No process group is needed,
    because every rank raises the same error.
    """
    require_divisible("parallel.tp", parallel.tp, sizes_cut_by_tp(model), model_label=model_label)
    layers, chunks = model.num_layers, parallel.pp * parallel.vpp
    require(layers % parallel.pp == 0, "parallel.pp", parallel.pp, f"must divide the number of layers of {model_label} ({layers})")
    most, remedy = layers // parallel.pp, f"must be at most the number of layers of a stage of {model_label}"
    require(parallel.recompute_num_layers <= most, "parallel.recompute_num_layers", parallel.recompute_num_layers, f"{remedy} ({most})")
    remedy = f"cuts {model_label}'s {layers} layers into {chunks} chunks; it must divide {layers // parallel.pp}"
    require(layers % chunks == 0, "parallel.vpp", parallel.vpp, remedy)
    first, stacked = layers // chunks, model.vision.num_deepstack_layers
    remedy = (
        f"leaves {first} layers to the first chunk, but {model_label} adds image features to {stacked} layers; use fewer stages or chunks"
    )
    require(first >= stacked, "parallel.pp*parallel.vpp", chunks, remedy)
    if model.experts is not None:
        remedy = f"needs parallel.sequence_parallel=true, because {model_label} has experts"
        require(parallel.tp == 1 or parallel.sequence_parallel, "parallel.tp", parallel.tp, remedy)
    block = parallel.tp * parallel.pp
    require(
        world_size % block == 0, "parallel.tp*parallel.pp", block,
        f"must divide the number of processes ({world_size}); set torchrun's --nproc_per_node to a multiple of {block}",
    )  # fmt: skip
    _check_expert_parallelism(parallel.ep, model, world_size // block, model_label=model_label)


def _check_expert_parallelism(ep: int, model: ModelSpec, dp: int, *, model_label: str) -> None:
    """Raise ValueError unless `ep` divides the data-parallel size `dp` and the experts."""
    require(ep == 1 or model.experts is not None, "parallel.ep", ep, f"needs a model with experts, and {model_label} has none; use 1")
    require(dp % ep == 0, "parallel.ep", ep, f"must divide the data-parallel size ({dp}), the number of processes / (tp * pp)")
    if model.experts is not None:
        require_divisible("parallel.ep", ep, {"experts of a layer (num_experts)": model.experts.num_experts}, model_label=model_label)


def sizes_cut_by_tp(model: ModelSpec) -> dict[str, int]:
    """Return the decoder sizes that must be divisible by tp, keyed by description.

    The vocabulary size is not included, because the vocabulary is padded.
    """
    ffn = f"rows of each MLP ({model.family.ffn_size_field})"
    what = f"groups of {EXPERT_MULTIPLE} rows of each expert (moe_intermediate_size)"
    experts = {} if model.experts is None else {what: model.experts.ffn_size // EXPERT_MULTIPLE}
    delta = {} if model.delta_net is None else {"key heads of each delta net": model.delta_net.num_key_heads}
    return {"attention heads": model.num_heads, "key/value heads": model.num_kv_heads, ffn: model.ffn_size, **experts, **delta}


def require_divisible(key: str, tp: int, sizes: Mapping[str, int], *, model_label: str) -> None:
    """Raise ValueError if `tp` does not divide all sizes.

    The message names the setting `key`, the first size that is not divisible, and the values that
    divide all sizes.
    """
    common = gcd(*sizes.values())
    fitting = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
    for what, size in sizes.items():
        require(size % tp == 0, key, tp, f"does not divide {model_label}'s {size} {what}; use one of {fitting}")


def is_fake_group() -> bool:
    """Return True if the process groups use torch's "fake" backend (memory_plan/gpu_memory.py).

    Fake groups have no peers, so creating gloo groups would wait forever.
    """
    return dist.get_backend() == "fake"


@with_megatron_on_cpu
def build_layout(parallel: ParallelSettings, *, seed: int) -> Layout:
    """Create Megatron's process groups, seed Megatron's random generators and return the layout.

    Collective over all ranks. If Megatron's process groups already exist, they are reused.
    """
    if not parallel_state.model_parallel_is_initialized():
        virtual = parallel.vpp if parallel.vpp > 1 else None
        parallel_state.initialize_model_parallel(
            parallel.tp, parallel.pp, virtual, distributed_timeout_minutes=round_up_to_minutes(parallel.timeout_s),
            create_gloo_process_groups=not is_fake_group(), expert_model_parallel_size=parallel.ep,
        )  # fmt: skip
    seed_generators(seed)
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group()),
        pp_group=cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group()),
        ep=parallel.ep,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_group=cast("dist.ProcessGroup", parallel_state.get_expert_model_parallel_group()),
        tp_ep_group=cast("dist.ProcessGroup", parallel_state.get_expert_tensor_and_model_parallel_group()),
        vpp=parallel.vpp,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute,
        recompute_num_layers=parallel.recompute_num_layers,
    )


def destroy_layout() -> None:
    """Destroy Megatron's process groups, so that this process can create new groups.

    Call this function even if torch has already destroyed the groups, because Megatron still holds
    references to them.
    """
    parallel_state.destroy_model_parallel()


def rng_tracker() -> CudaRNGStatesTracker:
    """Return Megatron's random streams of this rank."""
    return cast("CudaRNGStatesTracker", tensor_parallel.get_cuda_rng_tracker())


def seed_generators(seed: int) -> None:
    """Seed Megatron's random streams for this rank.

    Streams differ between pipeline stages and between data-parallel replicas. All tensor-parallel
    ranks of a replica share one stream. In addition, each tensor-parallel rank has its own stream.
    """
    place = 100 * parallel_state.get_pipeline_model_parallel_rank() + 10_000 * parallel_state.get_data_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + place)
