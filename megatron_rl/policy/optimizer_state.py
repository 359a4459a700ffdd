"""The distributed optimizer's state on disk: whole tensors by name, of which every rank writes and reads what it steps, and no more.

megatron-core 0.16.1 has two forms (optimizer/distrib_optimizer.py, sharded_state_dict). Its `dp_reshardable` is parallel, but holds images
of flat buffers, which no other tp, pp or vpp can read. Its `fully_reshardable` holds tensors, and gathers them on the first rank of each
data-parallel group (7B at tp 2: 46 GB there, three times over); to read it every rank takes all of its group's. The files here are the
second form's, and Megatron reads them; they are made as the first's are: a rank's stretch of a flat parameter is a few boxes of its tensor,
and torch's checkpoints take boxes of any size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from megatron_rl.policy.padding import strip_tensor_padding

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Main weights and both moments, as Megatron calls them."""


def optimizer_tensors(optimizer: ChainedOptimizer, weights: dict[str, ShardedStateDict], *, vocab_size: int) -> dict[str, ShardedTensor]:
    """This rank's part of main weights and moments: views, so that loading fills them in place. `weights` describes the model's own; what
    pads its vocabulary is left out."""
    whole = {described.data: described for described in nested_values(weights)}
    found = {}
    for part in own_optimizers(optimizer):
        for parameter, own in _parameter_ranges(part):
            state = part._get_main_param_and_optimizer_states(parameter)
            for box in _boxes_of_tensor(whole[parameter], own, state, vocab_size=vocab_size):
                found[f"{box.key} {box.global_offset}"] = box
    return found


def _parameter_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Range]]:
    """Each parameter that this rank steps, and which of its entries."""
    for buckets in (buckets for buffer in part.gbuf_ranges for buckets in buffer.values()):
        for bucket in buckets:
            yield from ((parameter, ranges["param"]) for parameter, ranges in bucket["param_map"].items())


def _boxes_of_tensor(
    whole: ShardedTensor | ShardedTensorFactory, own: Range, state: dict[str, torch.Tensor], *, vocab_size: int
) -> Iterator[ShardedTensor]:
    """The entries `own` of a parameter of this rank, whose flat tensors `state` holds, as boxes of the model's tensor.

    A factory makes several tensors of a parameter (gate and up of a SwiGLU), each a stretch of it. Data-parallel ranks hold different
    entries: what makes a replica is the tensor- and pipeline-parallel rank alone.
    """
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
    """(offset, size) of boxes that make the entries start..stop of a tensor, in its (row-major) order.

    Example: boxes((3, 4), 2, 11) gives ((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3)).
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
    """The optimizer of this rank's parameters, or nothing where all of them are frozen."""
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    assert len(parts) <= 1, "dense parameters have one distributed optimizer"
    return parts


def init_moments(optimizer: ChainedOptimizer) -> None:
    """Zero moments for all that is trained. AdamW's own step is not among them: `set_step`."""
    for part in own_optimizers(optimizer):
        where = {"device": "cpu"} if isinstance(part.optimizer, HybridDeviceOptimizer) else {}
        for main in (main for group in part.optimizer.param_groups for main in group["params"]):
            part.optimizer.state[main] = {name: torch.zeros_like(main, **where) for name in ("exp_avg", "exp_avg_sq")}


@torch.no_grad()
def reset_optimizer_state(optimizer: ChainedOptimizer) -> None:
    """Give AdamW the state of one that has not stepped."""
    init_moments(optimizer)
    set_step(optimizer, 0)


def set_step(optimizer: ChainedOptimizer, updates: int) -> None:
    """The last of what is loaded: the number of updates that made main weights and moments."""
    for part in own_optimizers(optimizer):
        for moments in part.optimizer.state.values():  # where torch's AdamW looks...
            moments["step"] = torch.tensor(float(updates))
        for group in part.optimizer.param_groups:  # ...and Transformer Engine's
            group["step"] = updates
        _copy_main_params(part)


def _copy_main_params(part: DistributedOptimizer) -> None:
    """An optimizer on the host (megatron-core 0.16.1, optimizer/cpu_offloading/hybrid_optimizer.py) steps from copies of the main weights
    and from states of its own: both become those of the main weights."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()
        for main, copy in part.optimizer.gpu_params_map_cpu_copy.items():
            copy.copy_(main)
