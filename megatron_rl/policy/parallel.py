"""The trainer's layout over processes: checked against the model before anything starts, then read once from Megatron."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import ParallelSettings, require
from megatron_rl.distributed.world import round_up_to_minutes
from megatron_rl.models.model_spec import ModelSpec


@dataclass(slots=True, frozen=True)
class Layout:
    """Sizes, this process's coordinates, and the groups along each axis."""

    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    vpp: int
    """Chunks of the model on each stage; above 1 the pipeline is interleaved."""
    sequence_parallel: bool
    recompute: str

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def first_stage_rank(self, dp_rank: int, tp_rank: int) -> int:
        """Global rank of the first stage with these coordinates: tensor-parallel ranks are neighbors, then come the replicas, and then the
        stages (megatron-core 0.16.1, parallel_state.py::initialize_model_parallel, order tp-cp-ep-dp-pp)."""
        return dp_rank * self.tp + tp_rank

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_process_group_ranks(self.pp_group)[-1]


def check_layout(parallel: ParallelSettings, model: ModelSpec, world_size: int, *, model_label: str = "the model") -> None:
    """Raise a ValueError naming key, value and the sizes that work; needs no process group, so every rank says the same."""
    require_divisible("parallel.tp", parallel.tp, sizes_cut_by_tp(model), model_label=model_label)
    layers, chunks = model.num_layers, parallel.pp * parallel.vpp
    require(layers % parallel.pp == 0, "parallel.pp", parallel.pp, f"must divide {model_label}'s {layers} layers")
    remedy = f"cuts {model_label}'s {layers} layers into {chunks} chunks; it must divide {layers // parallel.pp}"
    require(layers % chunks == 0, "parallel.vpp", parallel.vpp, remedy)
    first, stacked = layers // chunks, model.vision.num_deepstack_layers
    remedy = f"leaves {first} layers to the first chunk, but {model_label} adds pictures behind {stacked}; take fewer stages or chunks"
    require(first >= stacked, "parallel.pp*parallel.vpp", chunks, remedy)
    block = parallel.tp * parallel.pp
    require(
        world_size % block == 0, "parallel.tp*parallel.pp", block,
        f"must divide the {world_size} processes; start torchrun with --nproc_per_node a multiple of {block}",
    )  # fmt: skip


def sizes_cut_by_tp(model: ModelSpec) -> dict[str, int]:
    """Return the sizes of the decoder that tensor parallelism divides, by what they count. The vocabulary is padded, and not among them."""
    ffn = "rows of each MLP (intermediate_size)"
    return {"attention heads": model.num_heads, "key/value heads": model.num_kv_heads, ffn: model.ffn_size}


def require_divisible(key: str, tp: int, sizes: Mapping[str, int], *, model_label: str) -> None:
    """Raise ValueError naming the first size that `tp` does not divide, and the values of the setting `key` that divide all of them."""
    common = gcd(*sizes.values())
    fitting = ", ".join(str(each) for each in range(1, common + 1) if common % each == 0)
    for what, size in sizes.items():
        require(size % tp == 0, key, tp, f"does not divide {model_label}'s {size} {what}; use one of {fitting}")


def is_fake_group() -> bool:
    """Whether this world is one of memory_plan/gpu_memory.py's: its process groups have no peers, and gloo would wait for them."""
    return dist.get_backend() == "fake"


@with_megatron_on_cpu
def build_layout(parallel: ParallelSettings, *, seed: int) -> Layout:
    """Create Megatron's process groups (all ranks together, once a process) and seed its generators."""
    if not parallel_state.model_parallel_is_initialized():
        virtual = parallel.vpp if parallel.vpp > 1 else None
        parallel_state.initialize_model_parallel(
            parallel.tp, parallel.pp, virtual, distributed_timeout_minutes=round_up_to_minutes(parallel.timeout_s),
            create_gloo_process_groups=not is_fake_group(),
        )  # fmt: skip
    seed_generators(seed)
    return Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        vpp=parallel.vpp,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute,
    )


def destroy_layout() -> None:
    """Forget Megatron's process groups: the process may build others. Where they are gone already, their names still are not."""
    parallel_state.destroy_model_parallel()


def seed_generators(seed: int) -> None:
    """Megatron's streams: pipeline stages and data-parallel replicas differ; tensor-parallel ranks share one and own one each."""
    place = 100 * parallel_state.get_pipeline_model_parallel_rank() + 10_000 * parallel_state.get_data_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + place)
