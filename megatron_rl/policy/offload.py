"""Host copies of parameters, for offloading and for the reference policy.

Offloading frees device memory while the rollout engine needs it. Host memory is allocated once and
kept. On a GPU machine this memory is page-locked, because transfers from pageable memory reach only
2 to 4 GB/s, a tenth of the bus bandwidth. The buffers are ordinary memory that is registered with
CUDA. Torch's page-locked pool is not used, because the pool rounds every block up to a power of two
(torch 2.13, ATen/core/CachingHostAllocator.h), and the parameters of a model form one block.
"""

import weakref
from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu

_PIECE = 64 * 2**20
"""Size in bytes of the temporary buffer used by `HostCopy.swap`."""


class HostCopy:
    """Host buffers for parameters, one buffer per storage.

    Parameters and their storages are modified in place and never replaced, so views into Megatron's
    buffers, transposed tensors and shared tensors remain valid.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Allocate the buffers; `copy_to_host` fills them."""
        storages = {storage._cdata: storage for parameter in parameters for storage in [parameter.untyped_storage()]}
        self.pairs = [(storage, _pinned_buffer(storage)) for storage in storages.values()]
        pinned = [host.data_ptr() for storage, host in self.pairs if _is_on_host(storage)]
        weakref.finalize(self, _unpin, pinned).atexit = False  # CUDA is already shut down at exit

    def copy_to_host(self) -> None:
        """Copy the parameters to the host."""
        for storage, host in self.pairs:
            host.copy_(_as_bytes(storage))

    def free_device_memory(self) -> None:
        """Free the device memory of the parameters.

        After this call, only `restore` may be called.
        """
        for storage, _ in self.pairs:
            storage.resize_(0)

    def restore(self) -> None:
        """Reallocate the device memory of the parameters and copy their values back."""
        for storage, host in self.pairs:
            storage.resize_(host.numel())
            _as_bytes(storage).copy_(host)

    def swap(self) -> None:
        """Exchange the values of the parameters with the values in the host buffers."""
        for storage, host in self.pairs:
            for here, there in zip(_as_bytes(storage).split(_PIECE), host.split(_PIECE), strict=True):
                aside = here.clone()
                here.copy_(there)
                there.copy_(aside)


class Offload:
    """Moves parameters to the host and back, and frees and reallocates gradient buffers.

    The values of parameters are kept; the content of gradient buffers is lost.
    """

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self.chunks = chunks
        self.host = HostCopy(parameter for chunk in chunks for parameter in chunk.parameters())

    @with_megatron_on_cpu
    def to_host(self) -> None:
        """Copy the parameters to the host, then free parameter memory and gradient buffers."""
        self.host.copy_to_host()
        self.host.free_device_memory()
        for chunk in self.chunks:
            chunk.offload_grad_buffers()

    @with_megatron_on_cpu
    def to_device(self) -> None:
        """Restore the parameters and allocate the gradient buffers."""
        self.host.restore()
        for chunk in self.chunks:
            chunk.restore_grad_buffers()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
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
