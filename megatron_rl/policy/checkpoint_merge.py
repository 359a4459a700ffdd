"""Merge of the policy's checkpoints, which the policy's own network can load as a teacher.

The merge covers the weights that training changes: trained parameters or, with LoRA, the adapted
weights with their adapters merged in (a merge of the adapters alone would not be the merge of their
products). The state is float32, in host memory, and updated with each checkpoint, so that
checkpoints need not be kept. Every rank merges its own shards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import nn

from megatron_rl.config import MergeSettings
from megatron_rl.policy.lora import disabled_adapters, merged_weight_fns
from megatron_rl.policy.offload import HostCopy
from megatron_rl.policy.padding import PADDED_KEYS, strip_tensor_padding
from megatron_rl.policy.ties import BUFFERS, add_task_vector, find_threshold, merged_change
from megatron_rl.policy.transformer import ModelChunks
from megatron_rl.weights.formats.torch_dist import MERGE_PREFIX
from megatron_rl.weights.stream import is_of_value_head

_NUM = f"{MERGE_PREFIX}num_checkpoints"
"""Checkpoint key of the number of merged checkpoints."""


def merged_parameters(chunks: ModelChunks) -> dict[str, nn.Parameter]:
    """Return the parameters that a merge replaces, keyed by name.

    These are the adapted weights or, without adapters, the trained parameters except for the value
    head.
    """
    adapted = merged_weight_fns(chunks)
    if adapted:
        return {name: chunks.get_parameter(name) for name in adapted}
    return {name: p for name, p in chunks.named_parameters() if p.requires_grad and not is_of_value_head(name)}


def state_names(settings: MergeSettings) -> tuple[str, ...]:
    """Return the names of the float32 numbers that a merge keeps for each entry of a weight."""
    return BUFFERS if settings.uses_ties else ("mean",)


def newest_weight(settings: MergeSettings, num_before: int) -> float:
    """Return the weight of a checkpoint when it is added to `num_before` merged checkpoints.

    Example: with method=mean, the third checkpoint has the weight 1/3, and the merge of the first
    two has the weight 2/3.
    """
    return settings.alpha if settings.uses_ema and num_before else 1 / (num_before + 1)


class CheckpointMerge:
    """Running merge of the weights of this rank."""

    def __init__(self, chunks: ModelChunks, settings: MergeSettings) -> None:
        """Allocate the state. The current weights are the start of TIES merging.

        Call this after gradients of frozen parameters are disabled, and before a checkpoint is
        loaded.
        """
        self._chunks, self._settings = chunks, settings
        self._parameters, adapted = merged_parameters(chunks), merged_weight_fns(chunks)
        self._read: dict[str, Callable[[], torch.Tensor]] = {name: adapted.get(name, p.detach) for name, p in self._parameters.items()}
        self._teacher = HostCopy(self._parameters.values())
        self._state = {key: {name: torch.zeros(p.shape) for name in state_names(settings)} for key, p in self._parameters.items()}
        self._start = {key: self._current(key) for key in self._parameters} if settings.uses_ties else {}
        self.num_checkpoints = 0
        """Number of checkpoints that the merge contains."""

    @torch.no_grad()
    def add(self) -> None:
        """Add the current weights. Collective with TIES merging."""
        weight = newest_weight(self._settings, self.num_checkpoints)
        threshold = self._find_threshold() if self._settings.uses_ties else 0.0
        for key, state in self._state.items():
            if self._settings.uses_ties:
                add_task_vector(state, self._change(key), weight=weight, threshold=threshold)
            else:
                state["mean"].lerp_(self._current(key), weight)
        self.num_checkpoints += 1
        self._fill_teacher()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Replace the weights by the merged weights inside the `with` block.

        Requires at least one checkpoint. Adapters are disabled, because the merged weights contain
        them.
        """
        assert self.num_checkpoints, "no checkpoint was merged yet"
        with disabled_adapters(self._chunks):
            self._teacher.swap()
            try:
                yield
            finally:
                self._teacher.swap()

    def sharded_state(self, weights: dict[str, ShardedStateDict], *, vocab_size: int) -> ShardedStateDict:
        """Return the state for a checkpoint, as sharded tensors that can be read by any layout.

        `weights` holds the sharded state dicts of the model's chunks, with padding rows. The start
        of TIES merging is not included, because it is loaded from model.path.
        """
        whole = {described.data: described for described in nested_values(weights)}
        found: ShardedStateDict = {}
        for key, state in self._state.items():
            for name, data in state.items():
                found[f"{name} {key}"] = _describe(whole[self._parameters[key]], name, data, vocab_size=vocab_size)
        found[_NUM] = ShardedTensor.from_rank_offsets(_NUM, torch.tensor([self.num_checkpoints]), replica_id=dist.get_rank())
        return found

    @torch.no_grad()
    def load_state(self, loaded: dict[str, torch.Tensor]) -> None:
        """Restore the state from loaded tensors, which have the keys of `sharded_state`."""
        for key, state in self._state.items():
            for name, data in state.items():
                rows = loaded[f"{name} {key}"]
                data[: len(rows)].copy_(rows)  # padding rows of the vocabulary stay zero
        self.num_checkpoints = int(loaded[_NUM])
        if self.num_checkpoints:
            self._fill_teacher()

    def _current(self, key: str) -> torch.Tensor:
        """Return a float32 copy of a weight in host memory, with its adapters merged in."""
        return self._read[key]().to("cpu", torch.float32, copy=True)

    def _change(self, key: str) -> torch.Tensor:
        return self._current(key).sub_(self._start[key])

    def _fill_teacher(self) -> None:
        """Write the merged weights to the host copy that `loaded` swaps in."""
        self._teacher.copy_to_host()
        for key, parameter in self._parameters.items():
            state = self._state[key]
            parameter.copy_(self._start[key] + merged_change(state) if self._start else state["mean"])
        self._teacher.swap()

    def _find_threshold(self) -> float:
        """Return the smallest magnitude of a change that TIES merging keeps in this checkpoint."""
        group = cast("dist.ProcessGroup", parallel_state.get_expert_tensor_model_pipeline_parallel_group())
        own = [key for key, p in self._parameters.items() if self._is_counted(key, p)]
        device = next(iter(self._chunks.parameters())).device
        num = torch.tensor(sum(self._count_entries(key) for key in own), device=device)
        dist.all_reduce(num, group=group)
        num_kept = max(1, int(self._settings.density * int(num)))
        return find_threshold(lambda: map(self._change, own), num_kept, group, device)

    def _is_counted(self, key: str, parameter: nn.Parameter) -> bool:
        """Return True on one of the ranks that hold the same entries of a parameter."""
        is_first = self._chunks[0].layout.ep_rank == 0 or ".mlp.experts." in key
        return is_first and param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)

    def _count_entries(self, key: str) -> int:
        """Return the number of entries of a parameter without padding rows of the vocabulary."""
        parameter, layout = self._parameters[key], self._chunks[0].layout
        if not key.endswith(PADDED_KEYS):
            return parameter.numel()
        rows = min(len(parameter), self._chunks[0].spec.vocab_size - layout.tp_rank * len(parameter))
        return rows * parameter[0].numel()


def _describe(
    whole: ShardedTensor | ShardedTensorFactory, name: str, data: torch.Tensor, *, vocab_size: int
) -> ShardedTensor | ShardedTensorFactory:
    """Return a description of a state tensor at the place of the weight `whole` in the model."""
    key = f"{MERGE_PREFIX}{name}.{whole.key}"
    if isinstance(whole, ShardedTensorFactory):
        return replace(whole, key=key, data=data)
    return replace(strip_tensor_padding(replace(whole, data=data, dtype=data.dtype), vocab_size), key=key)
