"""Transports weights from the trainer to a vLLM server as buckets of bytes.

Each bucket is sent in one broadcast, with gloo on CPUs and with NCCL on GPUs. The trainer has a
separate process group with each server: the trainer is rank 0, and the server's workers are ranks 1
and higher. The failure of one server therefore does not affect the groups of the other servers. The
layout of each bucket is sent over HTTP, with vLLM's own `/update_weights` call. The layout of the
last bucket contains a digest of the whole update.

Written against vLLM 0.32.0: distributed/weight_transfer/{base,nccl_common}.py. The transport over
NCCL was tested with an emulated library only (docs/numerics.md), not on hardware.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  torch documents this class; its types omit the export
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_rl.rollout.vllm.weight_receiver import checksum

ALIGNMENT = 16
"""Alignment in bytes of the tensors in a bucket."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rendezvous:
    """Address of the store, number of ranks, and transport of a process group."""

    address: str
    port: int
    size: int
    kind: str
    """Name of the transport, which is a key of TRANSPORTS."""
    timeout_s: float


class Transport(Protocol):
    """Process group of the trainer and the workers of one server.

    Methods raise RuntimeError if the connection is lost.
    """

    store: Store

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast `flat` from rank 0 to all other ranks, in place."""
        ...

    def close(self) -> None:
        """Leave the group even during an operation, because another rank may have exited."""
        ...


class GlooTransport:
    """Transport over gloo, for CPUs."""

    def __init__(self, rendezvous: Rendezvous, store: Store, *, rank: int, device: torch.device) -> None:
        assert device.type == "cpu", f"gloo does not send tensors on {device}"
        self.store = store
        limit = timedelta(seconds=rendezvous.timeout_s)
        # torch's types omit the collectives of this class
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("weights", store), rank, rendezvous.size, limit)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast `flat` from rank 0 to all other ranks, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()

    def close(self) -> None:
        """Do nothing: an operation in progress ends when the group's timeout expires.

        gloo's abort does not end an operation in progress (torch 2.13).
        """


class NcclTransport:
    """Transport over NCCL, for GPUs.

    Every thread has its own current GPU, at first GPU 0, so each call names the GPU.
    """

    def __init__(self, rendezvous: Rendezvous, store: Store, *, rank: int, device: torch.device) -> None:
        """Join the group.

        Raises:
            RuntimeError: NCCL cannot be loaded. vLLM's communicator would then send nothing.
        """
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.store = store
        group = StatelessProcessGroup(rank=rank, world_size=rendezvous.size, store=store)
        self._device = device
        self._communicator = PyNcclCommunicator(group, device=device)
        if self._communicator.disabled:
            raise RuntimeError("NCCL is not available to vLLM: libnccl.so.2 cannot be loaded, or VLLM_DISABLE_PYNCCL is set")
        self._stream = torch.cuda.Stream(device)  # a broadcast to a dead server must not block others

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast `flat` from rank 0 to all other ranks, in place.

        On rank 0, `flat` may be in host memory, as the buckets that are kept for a server that
        rejoins are.
        """
        flat = flat.to(self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the bucket was packed or copied on the default stream
        self._communicator.broadcast(flat, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        """Destroy the NCCL communicator."""
        self._communicator.destroy()


TRANSPORTS: Mapping[str, Callable[..., Transport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


def open_store(rendezvous: Rendezvous, *, rank: int) -> TCPStore:
    """Return the store of a process group; rank 0 hosts it, and the other ranks connect to it.

    Rank 0 uses a free port if `rendezvous.port` is 0.
    """
    limit = timedelta(seconds=rendezvous.timeout_s)
    return TCPStore(rendezvous.address, rendezvous.port, rendezvous.size, rank == 0, limit, wait_for_workers=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Bucket:
    """Byte layout of one broadcast, sent as `update_info` in vLLM's /update_weights call."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int
    digest: str = ""
    """Digest of the whole update if this is the last bucket of the update, else empty."""


def pack_bucket(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Bucket, torch.Tensor]:
    """Pack tensors into one buffer on their device; return the layout and the buffer.

    The buffer is uint8 [num_bytes].
    """
    sizes = [_align(tensor.nbytes) for _, tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0][1].device)
    for part, (_, tensor) in zip(flat.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    shapes = [list(tensor.shape) for _, tensor in tensors]
    return Bucket(names=[name for name, _ in tensors], dtypes=dtypes, shapes=shapes, num_bytes=flat.numel()), flat


def unpack_bucket(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the names and tensors of a bucket; the tensors are views of `flat`."""
    tensors: list[tuple[str, torch.Tensor]] = []
    offset = 0
    for name, dtype, shape in zip(bucket.names, map(DTYPES.__getitem__, bucket.dtypes), map(torch.Size, bucket.shapes), strict=True):
        num_bytes = shape.numel() * dtype.itemsize
        tensors.append((name, flat[offset : offset + num_bytes].view(dtype).view(shape)))
        offset += _align(num_bytes)
    return tensors


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class UpdateDigest:
    """Digest of an update's tensor names and tensor bytes, in sending order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add tensors to the digest."""
        for name, tensor in tensors:
            self._hash.update(f"{name} {checksum(tensor)}\n".encode())

    def hexdigest(self) -> str:
        """Return the digest of all tensors added so far."""
        return self._hash.copy().hexdigest()
