"""Memory footprint of each rank in a parallel layout, measured on an instance of the model.

The model is built on the meta device in a fake process group, once for each pipeline stage, for the
first data-parallel replica, which has the largest part of the optimizer state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.compat.megatron_cpu import megatron_on_meta_device
from megatron_rl.config import LoraSettings, Settings
from megatron_rl.dtypes import torch_dtype
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import is_expert_tensor, padded_vocab
from megatron_rl.policy.checkpoint_merge import merged_parameters
from megatron_rl.policy.optimizer import build_optimizer, grad_buffers, wrap_with_grad_buffers
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.transformer import HeadConfig, ModelChunks, build_chunks


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryFootprint:
    """Bytes that a rank's share of the model occupies during training."""

    param_bytes: int
    grad_bytes: int
    """Bytes of the gradients with Megatron's padding; gradients are fp32 for any parameter dtype.
    """
    main_weight_bytes: int
    """Bytes of the fp32 weights in this data-parallel rank's part of the optimizer.

    The value is 0 if the parameters themselves are fp32.
    """
    moment_bytes: int
    """Bytes of both Adam moments in this data-parallel rank's part of the optimizer."""

    def __add__(self, other: "MemoryFootprint") -> "MemoryFootprint":
        sizes = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return MemoryFootprint(**sizes)


EMPTY_FOOTPRINT = MemoryFootprint(param_bytes=0, grad_bytes=0, main_weight_bytes=0, moment_bytes=0)


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShare:
    """Parameters and footprint of one rank's share of the model."""

    tp_rank: int
    pp_rank: int
    num_params: int
    num_trained_params: int
    policy_footprint: MemoryFootprint
    pinned_bytes: int
    """Bytes of page-locked host memory if the optimizer is on the host.

    This memory contains fp32 copies of main weights and gradients. torch rounds the size of each
    copy up to a power of two (torch 2.13, ATen/core/CachingHostAllocator.h, allocate).
    """
    critic_footprint: MemoryFootprint = EMPTY_FOOTPRINT
    """Footprint of a critic that has its own backbone."""
    teacher_bytes: int = 0
    """Bytes of the parameters of all teachers (distill.teacher, distill.teachers)."""
    largest_teacher_bytes: int = 0
    """Bytes of the parameters of the largest teacher; the device holds one teacher at a time."""
    teacher_output_bytes: int = 0
    """Bytes of the teachers' output layers for this rank's part of the policy's vocabulary, on the
    last pipeline stage.
    """
    num_merged: int = 0
    """Number of entries of the weights in a merge of checkpoints (distill.merge)."""

    @property
    def total_footprint(self) -> MemoryFootprint:
        """Sum of the footprints of the policy and the critic."""
        return self.policy_footprint + self.critic_footprint


def compute_model_shares(model: ModelSpec, settings: Settings, *, world_size: int, has_values: bool = False) -> list[ModelShare]:
    """Return the model share of each rank in the first data-parallel replica, ordered by stage.

    `has_values` is True if the algorithm needs a critic.
    """
    assert not dist.is_initialized(), "a plan creates its own process groups"
    parallel = settings.parallel
    found = []
    for pp_rank in range(parallel.pp):
        # Megatron numbers tensor-parallel ranks first, then data-parallel, then pipeline stages
        # (parallel_state.py, order "tp-cp-ep-dp-pp").
        with fake_process_group(pp_rank * world_size // parallel.pp, size=world_size):
            share = _compute_share(model, settings, has_values=has_values)
        assert (share.tp_rank, share.pp_rank) == (0, pp_rank), share
        # The tensor-parallel ranks of a stage hold tensors of equal shapes: Megatron splits evenly
        # and pads the vocabulary.
        found += [replace(share, tp_rank=tp_rank) for tp_rank in range(parallel.tp)]
    return found


def num_expert_params(model: ModelSpec) -> int:
    """Return the number of parameters of all experts; 0 for a model without experts."""
    return sum(shape.numel() for name, shape in model.shapes().items() if is_expert_tensor(name))


@contextmanager
def fake_process_group(rank: int, *, size: int) -> Iterator[None]:
    """Create a process group of `size` ranks in which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _compute_share(model: ModelSpec, settings: Settings, *, has_values: bool) -> ModelShare:
    layout, critic = build_layout(settings.parallel, seed=0), settings.critic
    values = {"value_sizes": critic.head_sizes, "normalizes_returns": critic.normalize_returns} if has_values else {}
    is_own = has_values and critic.backbone == "own"
    with megatron_on_meta_device():
        policy, footprint, pinned = _build_network(
            model, settings, layout, lora=settings.lora, heads=HeadConfig(**({} if is_own else values))
        )
        own, own_footprint, own_pinned = nn.ModuleList(), EMPTY_FOOTPRINT, 0
        if is_own:
            own, own_footprint, own_pinned = _build_network(
                critic_spec(model, settings), settings, layout, lora=critic.lora, heads=HeadConfig(has_lm_head=False, **values)
            )
        teacher_sizes, teacher_output_bytes = _measure_teachers(model, settings, layout)
    parameters = [*policy.parameters(), *own.parameters()]
    return ModelShare(
        tp_rank=layout.tp_rank,
        pp_rank=layout.pp_rank,
        num_params=sum(parameter.numel() for parameter in parameters),
        num_trained_params=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        policy_footprint=footprint,
        pinned_bytes=pinned + own_pinned,
        critic_footprint=own_footprint,
        teacher_bytes=sum(teacher_sizes),
        largest_teacher_bytes=max(teacher_sizes, default=0),
        teacher_output_bytes=teacher_output_bytes,
        num_merged=sum(parameter.numel() for parameter in merged_parameters(policy).values()) if settings.distill.merge.method else 0,
    )


def critic_spec(model: ModelSpec, settings: Settings) -> ModelSpec:
    """Return the model spec for a critic's own backbone, or `model` if critic.path is empty."""
    return load_known_spec(settings.critic.path, key="critic.path") if settings.critic.path else model


def _measure_teachers(model: ModelSpec, settings: Settings, layout: Layout) -> tuple[list[int], int]:
    """Return the bytes of each teacher's parameters, and of the copies of all output layers.

    A merge of checkpoints, or the policy itself, has no parameters of its own on the device.
    """
    distill, dtype = settings.distill, torch_dtype(settings.model.dtype)
    if not distill.is_local:
        return [], 0
    num_rows = padded_vocab(model.vocab_size, layout.tp) // layout.tp if layout.is_last_stage else 0
    if not distill.teacher_paths:
        return [], num_rows * model.hidden_size * dtype.itemsize
    sizes, output_bytes = [], 0
    for path in distill.teacher_paths:
        spec = load_known_spec(path, key=distill.teacher_key(path))
        chunks = build_chunks(spec, layout, dtype, lora=LoraSettings())
        storages = {storage._cdata: storage.nbytes() for p in chunks.parameters() for storage in [p.untyped_storage()]}
        sizes.append(sum(storages.values()))
        output_bytes += num_rows * spec.hidden_size * dtype.itemsize
    return sizes, output_bytes


def _build_network(
    model: ModelSpec, settings: Settings, layout: Layout, *, lora: LoraSettings, heads: HeadConfig
) -> tuple[ModelChunks, MemoryFootprint, int]:
    """Return a network, its footprint, and the bytes that its optimizer would pin on the host."""
    chunks = build_chunks(model, layout, torch_dtype(settings.model.dtype), lora=lora, heads=heads)
    parallel = wrap_with_grad_buffers(chunks, settings.model.frozen, lora=lora, overlap=settings.parallel.overlap_grad_reduce)
    optimizer = build_optimizer(settings.optim, parallel, offload=False)
    stepped = [4 * p.numel() for group in optimizer.param_groups for p in group["params"]]
    return chunks, measure_footprint(parallel, optimizer), 2 * sum(1 << (size - 1).bit_length() for size in stepped)


def measure_footprint(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> MemoryFootprint:
    """Return the footprint of a model, which may be on the meta device.

    Parameters that share a buffer are counted once, with the size of the whole buffer.
    """
    parameters = {storage._cdata: storage.nbytes() for chunk in chunks for p in chunk.parameters() for storage in [p.untyped_storage()]}
    buffers = [buffer for chunk in chunks for buffer in grad_buffers(chunk)]
    parts = [p for group in optimizer.param_groups for p in group["params"]]
    own = {p.untyped_storage()._cdata: p for p in parts}
    return MemoryFootprint(
        param_bytes=sum(parameters.values()),
        grad_bytes=sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers),
        main_weight_bytes=sum(p.untyped_storage().nbytes() for storage, p in own.items() if storage not in parameters),
        moment_bytes=sum(2 * 4 * p.numel() for p in parts),
    )
