"""How weights travel from the trainer to a server of vLLM: buckets of bytes, one broadcast each, by gloo on CPUs and by NCCL on GPUs.

Each server has a group of its own with the trainer (rank 0), its workers are the ranks from 1 on: a server that dies breaks nobody else's.
What the bytes mean travels by HTTP with vLLM's own calls (`/update_weights`). The last bucket carries a digest of all that was sent.

Read against vLLM 0.32.0: distributed/weight_transfer/{base,nccl_common}.py. NCCL was never run.
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
"""Bytes: where a tensor of a bucket may begin."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a group meet."""

    address: str
    port: int
    size: int
    kind: str
    """One of WIRES."""
    timeout_s: float


class Transport(Protocol):
    """A group of the trainer and the workers of one server. What is lost on it raises RuntimeError."""

    store: dist.Store

    def broadcast(self, flat: torch.Tensor) -> None:
        """From rank 0 to all others, in place."""
        ...

    def close(self) -> None:
        """Leave the group, whatever is under way in it: another rank may be gone."""
        ...


class GlooTransport:
    def __init__(self, rendezvous: Rendezvous, store: dist.Store, *, rank: int) -> None:
        self.store = store
        limit = timedelta(seconds=rendezvous.timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, rendezvous.size, limit)

    def broadcast(self, flat: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()

    def close(self) -> None:
        """What is under way ends with the group's own limit of time: gloo's abort ends none of it (torch 2.13)."""


class NcclTransport:
    def __init__(self, rendezvous: Rendezvous, store: dist.Store, *, rank: int) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.store = store
        group = StatelessProcessGroup(rank=rank, world_size=rendezvous.size, store=store)
        self._communicator = PyNcclCommunicator(group, device=torch.accelerator.current_device_index())
        self._stream = torch.cuda.Stream()  # a broadcast to a server that has died stands in nobody else's way

    def broadcast(self, flat: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.default_stream())  # on which the bytes were put together
        self._communicator.broadcast(flat, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        self._communicator.destroy()


TRANSPORTS: Mapping[str, Callable[..., Transport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


def open_store(rendezvous: Rendezvous, *, rank: int) -> dist.TCPStore:
    """Rank 0's store, at a free port where meeting.port is 0, or a way to it."""
    limit = timedelta(seconds=rendezvous.timeout_s)
    return dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.size, rank == 0, limit, wait_for_workers=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Bucket:
    """What lies where in the bytes of one broadcast: the `update_info` of vLLM's call."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    num_bytes: int
    digest: str = ""
    """Of the whole update, with its last bucket."""


def pack_bucket(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Bucket, torch.Tensor]:
    """A bucket's content, and its bytes: uint8 [num_bytes], on the tensors' device."""
    sizes = [_align(tensor.nbytes) for _, tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0][1].device)
    for part, (_, tensor) in zip(flat.split(sizes), tensors, strict=True):
        part[: tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    shapes = [list(tensor.shape) for _, tensor in tensors]
    return Bucket(names=[name for name, _ in tensors], dtypes=dtypes, shapes=shapes, num_bytes=flat.numel()), flat


def unpack_bucket(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of the bytes."""
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
    """Of an update: of names and bytes in the order in which they are sent."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._hash.update(f"{name} {checksum(tensor)}\n".encode())

    def hexdigest(self) -> str:
        return self._hash.copy().hexdigest()
