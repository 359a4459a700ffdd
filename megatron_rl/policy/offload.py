"""Parameters on the host: those that leave the device while the engine needs its memory, and the reference policy's.

Host memory is made once and kept. Beside a GPU it is page-locked: pageable memory moves at 2 to 4 GB/s, a tenth of what the bus carries.
It is registered with CUDA as it is, because torch's own pool of page-locked memory rounds every block up to a power of two (torch 2.13,
ATen/core/CachingHostAllocator.h), and a model's parameters are one block.
"""

import weakref
from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu

_PIECE = 64 * 2**20
"""Bytes that an exchange holds aside at a time."""


class HostCopy:
    """Room on the host for the storages behind parameters, each once however many of them share it.

    Parameters keep their identity and place: views into Megatron's buffers, transposed or shared tensors stay what they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Without content until `copy_to_host`."""
        storages = {storage._cdata: storage for parameter in parameters for storage in [parameter.untyped_storage()]}
        self.pairs = [(storage, _pinned_buffer(storage)) for storage in storages.values()]
        pinned = [host.data_ptr() for storage, host in self.pairs if _is_on_host(storage)]
        weakref.finalize(self, _unpin, pinned).atexit = False  # CUDA has gone by then

    def copy_to_host(self) -> None:
        """Copy the parameters to the host."""
        for storage, host in self.pairs:
            host.copy_(_as_bytes(storage))

    def free_device_memory(self) -> None:
        """Give the parameters' own memory back; only `restore` may follow."""
        for storage, _ in self.pairs:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy the parameters back to where they were."""
        for storage, host in self.pairs:
            storage.resize_(host.numel())
            _as_bytes(storage).copy_(host)

    def swap(self) -> None:
        """Let the parameters and what is on the host change places."""
        for storage, host in self.pairs:
            for here, there in zip(_as_bytes(storage).split(_PIECE), host.split(_PIECE), strict=True):
                aside = here.clone()
                here.copy_(there)
                there.copy_(aside)


class Offload:
    """What leaves and returns: the storages under all parameters (with their content), those of the gradient buffers (without)."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self.chunks = chunks
        self.host = HostCopy(parameter for chunk in chunks for parameter in chunk.parameters())

    @with_megatron_on_cpu
    def to_host(self) -> None:
        self.host.copy_to_host()
        self.host.free_device_memory()
        for chunk in self.chunks:
            chunk.offload_grad_buffers()

    @with_megatron_on_cpu
    def to_device(self) -> None:
        self.host.restore()
        for chunk in self.chunks:
            chunk.restore_grad_buffers()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned_buffer(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
    if _is_on_host(storage):
        pin_memory(host.data_ptr(), host.numel())
    return host


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cuda"


def _unpin(addresses: list[int]) -> None:
    for place in addresses:
        unpin_memory(place)
