"""Measures the tensors that autograd saves, and the peak of all tensors created in a block."""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_rl.compat.megatron_cpu import megatron_on_cpu


def kept_by_autograd(model: nn.Module, forward) -> int:  # noqa: ANN001
    """Return the bytes of distinct storages that a forward pass saves for the backward pass,
    without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with megatron_on_cpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = forward()
    del alive
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


class Live(TorchDispatchMode):
    """Tracks the current and the peak bytes of storages created inside the context.

    Storages of `known` tensors do not count.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (signature fixed by torch)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return result

    def _drop(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.now -= size
