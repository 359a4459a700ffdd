"""Parameters and gradient buffers off the device while the engine needs its memory, and back in place.

Tensors keep their identity: only their storage is emptied and filled again, so views into Megatron's buffers stay valid.
"""

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.cpu import on_cpu_too


class Offload:
    """What leaves and returns: the storages under all parameters (with their content), those of the gradient buffers (without)."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self.chunks = chunks
        self.host: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @on_cpu_too
    def leave(self) -> None:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for chunk in self.chunks for p in chunk.parameters()}
        for storage in storages.values():
            self.host.append((storage, storage.cpu() if storage.device.type == "cuda" else storage.clone()))
            storage.resize_(0)
        for chunk in self.chunks:
            chunk.offload_grad_buffers()

    @on_cpu_too
    def come_back(self) -> None:
        for storage, copy in self.host:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self.host = []
        for chunk in self.chunks:
            chunk.restore_grad_buffers()
