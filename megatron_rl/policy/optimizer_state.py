"""Stores the distributed optimizer's state as unsharded tensors; each rank writes a part.

Every rank writes and reads only the entries that it updates. megatron-core 0.16.1 has two formats
(optimizer/distrib_optimizer.py, sharded_state_dict):
- `dp_reshardable` is written in parallel. It stores flat buffers, which cannot be read with a
  different tp, pp or vpp.
- `fully_reshardable` stores tensors. The tensors are gathered on the first rank of each
  data-parallel group, and every rank reads the tensors of its whole group. For a 7B model with
  tp=2, the first rank needs 3 x 46 GB of memory.

This module writes files in the `fully_reshardable` format, which Megatron can read. As with
`dp_reshardable`, all ranks write in parallel. Each rank updates one range of a flattened parameter.
In the unflattened tensor, this range consists of a few boxes (axis-aligned blocks), and torch's
checkpoints accept boxes of any size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from megatron_rl.policy.padding import strip_tensor_padding

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names for the main weights and the two moments of AdamW."""


def optimizer_tensors(optimizer: ChainedOptimizer, weights: dict[str, ShardedStateDict], *, vocab_size: int) -> dict[str, ShardedTensor]:
    """Return this rank's part of the main weights and moments as sharded tensors.

    The result is keyed by checkpoint key and offset. The sharded tensors are views of the
    optimizer's state, so loading fills the state in place. `weights` holds the sharded state dicts
    of the model's chunks. Padding rows of the vocabulary are omitted.
    """
    whole = {described.data: described for described in nested_values(weights)}
    found = {}
    for part in own_optimizers(optimizer):
        for parameter, own in _parameter_ranges(part):
            state = part._get_main_param_and_optimizer_states(parameter)
            for box in _boxes_of_tensor(whole[parameter], own, state, vocab_size=vocab_size):
                found[f"{box.key} {box.global_offset}"] = box
    return found


def _parameter_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Range]]:
    """Yield (parameter, range of entries) for each parameter that this rank updates."""
    for buckets in (buckets for buffer in part.gbuf_ranges for buckets in buffer.values()):
        for bucket in buckets:
            yield from ((parameter, ranges["param"]) for parameter, ranges in bucket["param_map"].items())


def _boxes_of_tensor(
    whole: ShardedTensor | ShardedTensorFactory, own: Range, state: dict[str, torch.Tensor], *, vocab_size: int
) -> Iterator[ShardedTensor]:
    """Yield boxes that together cover the entries of the parameter in the range `own`.

    `state` holds the optimizer's flat tensors for the entries in `own`. A ShardedTensorFactory
    builds several tensors, each from a separate range of one parameter. For example, gate and up of
    a SwiGLU are built from one fused weight. Data-parallel ranks hold different entries, not
    replicas, so replica ids contain only the tensor- and pipeline-parallel rank.
    """
    assert whole.data is not None
    blank = torch.empty(whole.data.shape, dtype=whole.data.dtype, device="meta")
    blank_whole = replace(whole, data=blank)
    leaves = nested_values([blank_whole.build() if isinstance(blank_whole, ShardedTensorFactory) else blank_whole])
    for leaf in (strip_tensor_padding(leaf, vocab_size) for leaf in leaves):
        assert leaf.data.is_contiguous() and leaf.prepend_axis_num == 0 and len(leaf.replica_id) == 3, leaf
        begin = leaf.data.storage_offset()
        start, stop = max(own.start, begin), min(own.end, begin + leaf.data.numel())
        for offset, size in split_into_boxes(leaf.local_shape, start - begin, stop - begin):
            here = slice(start - own.start, start - own.start + math.prod(size))
            start += math.prod(size)
            for name in _STATES:
                data = state[name][here].view(size)
                yield ShardedTensor(
                    f"optimizer.state.{name}.{leaf.key}", data, data.dtype, size, leaf.global_shape,
                    tuple(map(sum, zip(leaf.global_offset, offset, strict=True))), None, replica_id=(*leaf.replica_id[:2], 0),
                )  # fmt: skip


def split_into_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of boxes that cover entries start..stop of a tensor, row by row.

    Entries are numbered in row-major order; `stop` is exclusive.

    Example: split_into_boxes((3, 4), 2, 11) yields
        ((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3)).
    """
    row_shape = shape[1:]
    row = math.prod(row_shape)
    while start < stop:
        number, within = divmod(start, row)
        if within == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield (number, *[0] * len(row_shape)), (rows, *row_shape)
            start += rows * row
        else:
            end = min(stop, (number + 1) * row)
            for offset, size in split_into_boxes(row_shape, within, within + end - start):
                yield (number, *offset), (1, *size)
            start = end


def own_optimizers(optimizer: ChainedOptimizer) -> list[DistributedOptimizer]:
    """Return this rank's optimizers with trained parameters.

    Under expert parallelism, the experts have an optimizer of their own.
    """
    return [part for part in cast("list[DistributedOptimizer]", optimizer.chained_optimizers) if not part.is_stub_optimizer]


def init_moments(optimizer: ChainedOptimizer) -> None:
    """Set the moments of all trainable parameters to zero.

    Does not set AdamW's step count; see `set_step`.
    """
    for part in own_optimizers(optimizer):
        device = "cpu" if isinstance(part.optimizer, HybridDeviceOptimizer) else None
        for main in (main for group in part.optimizer.param_groups for main in group["params"]):
            part.optimizer.state[main] = {name: torch.zeros_like(main, device=device) for name in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def reset_optimizer_state(optimizer: ChainedOptimizer) -> None:
    """Reset AdamW to the state before its first step."""
    init_moments(optimizer)
    set_step(optimizer, 0)


def set_step(optimizer: ChainedOptimizer, updates: int) -> None:
    """Set AdamW's step count to `updates`, the number of updates applied so far.

    When loading a checkpoint, call this function last. If the optimizer is on the host, the
    function copies the main weights and moments to the optimizer.
    """
    for part in own_optimizers(optimizer):
        for moments in part.optimizer.state.values():  # read by torch's AdamW; on the device, as its fused kernel requires
            moments["step"] = torch.tensor(float(updates), device=moments["exp_avg"].device)
        for group in part.optimizer.param_groups:  # read by Transformer Engine's AdamW
            group["step"] = updates
        _copy_main_params(part)


def _copy_main_params(part: DistributedOptimizer) -> None:
    """Copy main weights and moments to the tensors that an optimizer on the host updates.

    An optimizer on the host keeps its own copies of main weights and moments (megatron-core 0.16.1,
    optimizer/cpu_offloading/hybrid_optimizer.py). Does nothing for other optimizers.
    """
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()
        for main, copy in part.optimizer.gpu_params_map_cpu_copy.items():
            copy.copy_(main)
