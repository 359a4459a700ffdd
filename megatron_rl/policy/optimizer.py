"""Builds Megatron's gradient buffers, optimizer and learning-rate schedule from the settings.

Parts of the model can be frozen or have their own learning rates.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron_rl.config import LoraSettings, OptimSettings, require
from megatron_rl.distributed.world import read_world
from megatron_rl.policy.parallel import is_fake_group
from megatron_rl.policy.transformer import ModelChunk, ModelChunks
from megatron_rl.weights.stream import is_adapter, is_of_value_head


def freeze_parameters(chunk: ModelChunk, parts: list[str], *, all_but_adapters: bool) -> None:
    """Freeze parameters by disabling their gradients.

    The parameters of the model parts in `parts` are frozen. If `all_but_adapters` is True, all
    parameters outside adapters and the value head are frozen as well. Call this function before
    gradient buffers are created, so that frozen parameters get neither gradient buffers nor
    optimizer state.
    """
    prefixes = tuple(pattern.removesuffix("*") for part in parts for pattern in chunk.spec.family.part_patterns[part])
    for name, parameter in chunk.named_parameters():
        if name.startswith(prefixes) or (all_but_adapters and not (is_adapter(name) or is_of_value_head(name))):
            parameter.requires_grad = False


def wrap_with_grad_buffers(
    chunks: ModelChunks, frozen: list[str], *, lora: LoraSettings, overlap: bool = False
) -> list[DistributedDataParallel]:
    """Freeze parameters and wrap the chunks with gradient buffers for the trainable parameters.

    Gradients of bfloat16 parameters are accumulated and reduced in fp32. If `overlap` is True, each
    buffer is split into buckets, as overlap.py requires. The bucket size is 40 million entries, or
    1 million entries per data-parallel rank if there are more than 40 ranks.
    """
    for chunk in chunks:
        freeze_parameters(chunk, frozen, all_but_adapters=lora.rank > 0)
        chunk.config.finalize_model_grads_func = finalize_model_grads
    in_fp32 = chunks[0].config.params_dtype != torch.float32
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=in_fp32, overlap_grad_reduce=overlap)
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def grad_buffers(chunk: DistributedDataParallel) -> list[_ParamAndGradBuffer]:
    """Return the gradient buffers of a chunk, including those of experts divided among ranks."""
    buffers = cast("list[_ParamAndGradBuffer]", chunk.buffers)  # a list, not the method of nn.Module
    return buffers + chunk.expert_parallel_buffers


def build_optimizer(
    settings: OptimSettings, chunks: list[DistributedDataParallel], *, offload: bool, head_lr: float = 0.0
) -> ChainedOptimizer:
    """Build Megatron's distributed AdamW, with state sharded across data-parallel ranks.

    Under expert parallelism, Megatron chains a second optimizer for the experts, with state sharded
    across the ranks that hold the same experts. Both are clipped by one norm of all gradients.

    For bfloat16 parameters, the main weights and the moments are fp32. Parts of the model can have
    their own learning rates. Megatron's standard overrides (no weight decay for biases and norms)
    apply to all parts, including those with their own learning rates, because Megatron merges all
    overrides that match a parameter. `head_lr` is the peak learning rate of the value head, if the
    model has one. If `offload` is True, the optimizer stays on the host. Raises ValueError if
    `offload` is set for float32 weights.
    """
    dtype = chunks[0].config.params_dtype
    require(not offload or dtype == torch.bfloat16, "parallel.offload_optimizer", True, "needs model.dtype=bfloat16")
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=1.0 if offload else 0.0,
    )
    names = cast("ModelChunk", chunks[0].module).spec.family.part_patterns
    overrides = get_standard_config_overrides(config) | {
        _param_key(*(f"*module.{pattern}" for pattern in names[part])): cast("ParamGroupOverride", {"max_lr": lr})
        for part, lr in settings.lr_by_module.items()
    }
    overrides[_param_key("*module.value_head.*")] = cast("ParamGroupOverride", {"max_lr": head_lr})
    wrapped = cast("list[MegatronModule]", chunks)
    built = get_megatron_optimizer(config, wrapped, config_overrides=overrides, use_gloo_process_groups=not is_fake_group())
    optimizer = cast("ChainedOptimizer", built)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            _use_fused_kernel(part.optimizer)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            # The main weights passed to this optimizer are already fp32. If this flag were True,
            # megatron-core 0.16.1 would look for separate fp32 copies and raise KeyError after a
            # checkpoint is loaded.
            part.optimizer.param_update_in_fp32 = False
    if offload:
        _release_buffers()
    return optimizer


def _use_fused_kernel(optimizer: torch.optim.AdamW) -> None:
    """Let torch's AdamW update parameters, moments and step counts in one kernel.

    Without Transformer Engine and apex, Megatron builds torch's AdamW without an argument for this
    (megatron-core 0.16.1, optimizer/__init__.py).
    """
    for group in optimizer.param_groups:
        group["fused"] = True


def _param_key(*patterns: str) -> ParamKey:
    return ParamKey(name=cast("tuple[str]", patterns))


def _release_buffers() -> None:
    """Free the host memory of an optimizer that Megatron builds and discards.

    If the optimizer is on the host, Megatron builds it twice (0.16.1, distrib_optimizer.py,
    __init__). The first instance has a pinned copy and an fp32 copy of every parameter. The hooks
    of the first instance refer back to the instance, so only the garbage collector can free the
    instance. torch keeps the freed pinned memory in a cache, which is then emptied.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch._C._host_emptyCache()  # torch 2.13, cuda/graphs.py


def take_step(optimizer: ChainedOptimizer) -> float:
    """Run one optimizer step and return the gradient norm before clipping.

    An optimizer on the host uses this rank's share of the CPU cores.
    """
    is_on_host = any(isinstance(part.optimizer, HybridDeviceOptimizer) for part in optimizer.chained_optimizers)
    with _norm_on_device(), _using_own_cores() if is_on_host else nullcontext():
        succeeded, norm, _ = optimizer.step()
    assert succeeded, "the optimizer skipped a step"
    assert norm is not None
    return float(norm)


def _multi_tensor_l2_norm(_chunk_size: int, _noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], _per_tensor: bool):  # noqa: ANN202
    """Return the norm of all tensors of a list as a tensor [1] on their device, and None.

    Has the interface of Megatron's local_multi_tensor_l2_norm (megatron-core 0.16.1, utils.py).
    """
    return torch.nn.utils.get_total_norm(lists[0]).float().view(1), None


@contextmanager
def _norm_on_device() -> Iterator[None]:
    """Inside the `with` block, let Megatron compute the gradient norm without reading the device.

    Without Transformer Engine and apex, Megatron reads the norm of every gradient, one at a time:
    401 times in an update of 7B.
    """
    before = clip_grads.l2_norm_impl
    if before is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _multi_tensor_l2_norm
    try:
        yield
    finally:
        clip_grads.l2_norm_impl = before


@contextmanager
def _using_own_cores() -> Iterator[None]:
    """Inside the `with` block, let torch use as many threads as this rank's share of the cores.

    By default, torchrun sets one thread per process (OMP_NUM_THREADS=1). With one thread, torch's
    fused AdamW takes an estimated 10 to 15 s for 1e9 to 4e9 parameters.
    """
    before = torch.get_num_threads()
    # A rank may be bound to a subset of the node's cores.
    allowed, share = len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // read_world().local_size
    torch.set_num_threads(max(before, min(allowed, share)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_schedule(optimizer: ChainedOptimizer, settings: OptimSettings, num_steps: int) -> OptimizerParamScheduler:
    """Build the learning-rate schedule; steps of the schedule are numbered from 1.

    The learning rate peaks at step warmup_steps, or at step 1 if warmup_steps is 0. After the peak,
    the learning rate decays towards min_lr, unless the schedule is constant. The decay ends one
    step after the last step of training, so the learning rate of the last step is still above
    min_lr.
    """
    peak = max(settings.warmup_steps, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=peak,
        lr_decay_steps=max(num_steps, peak) + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
