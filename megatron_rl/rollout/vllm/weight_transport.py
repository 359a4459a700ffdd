"""Transports weights from the trainer to a vLLM server as buckets of bytes.

Each bucket is one broadcast, by gloo on CPUs and by NCCL on GPUs. Each server has its own process
group with the trainer (rank 0); its workers are the ranks from 1 on. A dead server thus breaks no
other server's group. The layout of the bytes is sent by HTTP with vLLM's own calls
(`/update_weights`). The last bucket has a digest of the whole update.

Written against vLLM 0.32.0: distributed/weight_transfer/{base,nccl_common}.py. NCCL has not been
tested on hardware yet.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.rollout.vllm.weight_receiver import checksum

ALIGNMENT = 16
"""Alignment in bytes of the tensors in a bucket."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rendezvous:
    """Address and size of a process group."""

    address: str
    port: int
    size: int
    kind: str
    """Key of TRANSPORTS."""
    timeout_s: float


class Transport(Protocol):
    """Process group of the trainer and the workers of one server.

    Raises RuntimeError if the connection is lost.
    """

    store: dist.Store

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast from rank 0 to all others, in place."""
        ...

    def close(self) -> None:
        """Leave the group even if an operation is in progress: another rank may be gone."""
        ...


class GlooTransport:
    """Transport over gloo, for CPUs."""

    def __init__(self, rendezvous: Rendezvous, store: dist.Store, *, rank: int) -> None:
        self.store = store
        limit = timedelta(seconds=rendezvous.timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, rendezvous.size, limit)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast from rank 0 to all others, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()

    def close(self) -> None:
        """Do nothing: an operation in progress ends by the group's own timeout.

        gloo's abort does not end it (torch 2.13).
        """


class NcclTransport:
    """Transport over NCCL, for GPUs."""

    def __init__(self, rendezvous: Rendezvous, store: dist.Store, *, rank: int) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.store = store
        group = StatelessProcessGroup(rank=rank, world_size=rendezvous.size, store=store)
        self._communicator = PyNcclCommunicator(group, device=torch.accelerator.current_device_index())
        self._stream = torch.cuda.Stream()  # a broadcast to a dead server must not block others

    def broadcast(self, flat: torch.Tensor) -> None:
        """Broadcast from rank 0 to all others, in place."""
        self._stream.wait_stream(torch.cuda.default_stream())  # the bucket was packed on it
        self._communicator.broadcast(flat, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        """Destroy the NCCL communicator."""
        self._communicator.destroy()


TRANSPORTS: Mapping[str, Callable[..., Transport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


def open_store(rendezvous: Rendezvous, *, rank: int) -> dist.TCPStore:
    """Return the store of a group: rank 0 hosts it, the other ranks connect to it.

    Rank 0 uses a free port if `rendezvous.port` is 0.
    """
    limit = timedelta(seconds=rendezvous.timeout_s)
    return dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.size, rank == 0, limit, wait_for_workers=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Bucket:
    """Layout of the bytes of one broadcast: the `update_info` of vLLM's call."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int
    digest: str = ""
    """Digest of the whole update; empty except in its last bucket."""


def pack_bucket(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Bucket, torch.Tensor]:
    """Return the layout of these tensors, and their bytes: uint8 [num_bytes] on their device."""
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
    """Digest of the names and bytes of an update, in the order in which they are sent."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add tensors to the digest."""
        for name, tensor in tensors:
            self._hash.update(f"{name} {checksum(tensor)}\n".encode())

    def hexdigest(self) -> str:
        """Return the digest of all tensors added so far."""
        return self._hash.copy().hexdigest()
