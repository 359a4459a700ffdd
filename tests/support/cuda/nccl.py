"""Stand-in for the NCCL library under vLLM's PyNcclCommunicator, between threads of one process.

Each rank is a thread. All ranks of a communicator must call the same collective with the same
sizes; a rank that calls another one, or none within TIMEOUT_S, lets every rank raise RuntimeError.
"""

import ctypes
import os
import threading
from dataclasses import dataclass, field

from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum, ncclUniqueId

TIMEOUT_S = 20.0
NUM_BYTES = {ncclDataTypeEnum.ncclUint8: 1, ncclDataTypeEnum.ncclFloat32: 4}
"""Bytes per element of the types that this trainer sends, and that vLLM warms communicators up
with.
"""


@dataclass
class Group:
    """The ranks of a communicator, and the call of each rank: (collective, source, target)."""

    size: int
    barrier: threading.Barrier = field(init=False)
    calls: dict[int, tuple[tuple, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=TIMEOUT_S)

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("NCCL error: a rank has left the communicator") from None

    def exchange(self, rank: int, call: tuple, source: int, target: int) -> list[int]:
        """Return the sources of all ranks, by rank."""
        self.calls[rank] = (call, source, target)
        self.wait()
        calls = {each[0] for each in self.calls.values()}
        if len(calls) > 1:
            raise RuntimeError(f"NCCL error: ranks call different collectives: {sorted(calls)}")
        return [self.calls[each][1] for each in range(self.size)]


groups: dict[bytes, Group] = {}
_lock = threading.Lock()


class EmulatedNccl:
    """The functions of vLLM's NCCLLibrary that weight transfers call."""

    def __init__(self, library_path: str | None = None) -> None:
        pass

    def ncclGetRawVersion(self) -> int:
        return 22907

    def ncclGetVersion(self) -> str:
        return "2.29.7"

    def ncclGetUniqueId(self) -> ncclUniqueId:
        made = ncclUniqueId()
        for index, byte in enumerate(os.urandom(16)):
            made.internal[index] = byte
        return made

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> tuple[Group, int]:
        with _lock:
            group = groups.setdefault(bytes(unique_id.internal), Group(world_size))
        assert group.size == world_size
        return group, rank

    def ncclBroadcast(self, source, target, count, dtype, root, comm, stream) -> None:  # noqa: ANN001
        group, rank = comm
        sources = group.exchange(rank, ("broadcast", count, dtype, root), source.value or 0, target.value)
        if rank != root:
            ctypes.memmove(target.value, sources[root], count * NUM_BYTES[dtype])
        group.wait()

    def ncclAllReduce(self, source, target, count, dtype, operation, comm, stream) -> None:  # noqa: ANN001
        """Add float32 numbers."""
        group, rank = comm
        assert dtype == ncclDataTypeEnum.ncclFloat32
        sources = group.exchange(rank, ("all_reduce", count, dtype, operation), source.value, target.value)
        sums = [sum(each) for each in zip(*((ctypes.c_float * count).from_address(at) for at in sources), strict=True)]
        group.wait()
        (ctypes.c_float * count).from_address(target.value)[:] = sums
        group.wait()

    def ncclCommAbort(self, comm: tuple[Group, int]) -> None:
        comm[0].barrier.abort()


def install() -> None:
    """Use the stand-in in communicators that vLLM creates from now on."""
    pynccl.NCCLLibrary = EmulatedNccl
