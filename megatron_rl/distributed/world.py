"""Rank, device and process groups of this process, and collectives for Python objects."""

import ctypes
import math
import os
import pickle
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  torch documents this class; its types omit the export
from torch.distributed.distributed_c10d import Store

from megatron_rl.errors import InfraError, RunFailed

T = TypeVar("T")
MIN_OPEN_FILES, TARGET_OPEN_FILES = 256, 65536
"""Minimum and target for the limit on open files per process. A CPU run of the nano model opens 144
files, and each connection to a server, judge or sandbox adds one.
"""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
"""Options of glibc's mallopt (malloc.h)."""
MMAP_THRESHOLD_BYTES = 4 << 20
"""Minimum size in bytes of the blocks that glibc allocates with mmap and returns to the system when
they are freed. A low threshold costs time, because the pages of such a block are zeroed on each
allocation. With a threshold of 1 MiB, the size of a small model's activations, CPU time rose by 25%
(docs/log.md).
"""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Number of free bytes that glibc keeps at the end of a heap. This is the value that glibc's own
dynamic adjustment reaches.
"""


@dataclass(slots=True, frozen=True)
class World:
    """Rank and device of this process, and the number of processes and nodes in the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1
    """Number of processes on this node."""
    node: int = 0
    num_nodes: int = 1

    @property
    def is_main(self) -> bool:
        """True if this process is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True if this process is local rank 0 on its node."""
        return self.local_rank == 0


def read_world() -> World:
    """Read torchrun's environment variables; without torchrun, return a world of size 1.

    A node is the set of processes that one torchrun process has started.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(
        rank=int(os.environ.get("RANK", 0)), size=int(os.environ.get("WORLD_SIZE", 1)), local_rank=local_rank, device=device,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), node=int(os.environ.get("GROUP_RANK", 0)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
    )  # fmt: skip


def connect(world: World, *, timeout_s: float) -> None:
    """Join the default process group, with gloo for CPU tensors and NCCL for GPU tensors.

    A collective that takes longer than timeout_s seconds raises an error.

    Raises:
        ValueError: This node has fewer GPUs than processes, the limit on open files is too low, or
            not all processes joined within timeout_s.
    """
    raise_file_limit()
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if world.device.type == "cuda":
        require_gpu_per_rank(world)
        torch.cuda.set_device(world.device)
    if world.size == 1 and os.environ.get("MASTER_PORT", "0") == "0":  # no launcher; an earlier run in this process may have set port 0
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            raise ValueError(
                f"--nnodes={world.num_nodes}: the {world.size} processes did not connect within parallel.timeout_s={timeout_s:g} "
                f"({first_line(error)}); check that all nodes have started, "
                "and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between them (see ip addr)"
            ) from error


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit, but at most to TARGET_OPEN_FILES.

    Raises:
        ValueError: The hard limit is below MIN_OPEN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max_open_files()
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < MIN_OPEN_FILES:
        remedy = "raise the hard limit: ulimit -Hn, limits.conf, docker run --ulimit"
        raise ValueError(f"ulimit -n {most}: a run needs at least {MIN_OPEN_FILES} open files; {remedy}")


def max_open_files() -> int:
    """Return the soft limit on open files that `raise_file_limit` sets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return TARGET_OPEN_FILES if hard == resource.RLIM_INFINITY else min(TARGET_OPEN_FILES, hard)


def expand_segments() -> None:
    """Enable torch's expandable CUDA segments, unless the environment configures the allocator.

    Expandable segments reduce fragmentation, because micro-batches differ in length and a segment
    of fixed size may not fit the next micro-batch. Call this before the first GPU tensor is
    created.

    The setting applies to this process only, because a judge server that the run starts must not
    inherit the setting. The ranks of such a server, like those of a tensor-parallel engine,
    exchange memory by cudaIpc, which does not support expandable segments (vllm 0.32.0,
    distributed/device_communicators/custom_all_reduce.py).
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def trim_malloc() -> None:
    """Make glibc return large memory blocks to the system when they are freed.

    By default, glibc raises its mmap threshold up to 32 MB. Blocks below the threshold, such as
    images and activations, are then kept in heaps that fragment (glibc 2.36, malloc/malloc.c,
    M_MMAP_THRESHOLD).
    """
    heap = ctypes.CDLL(None)
    for option, size in ((M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)):
        assert heap.mallopt(option, size), f"mallopt({option}, {size})"


def require_gpu_per_rank(world: World) -> None:
    """Check that this node has at least one GPU per process.

    Raises:
        ValueError: The node has fewer GPUs than processes. Every process on the node raises this
            error.
    """
    found, host, visible = torch.cuda.device_count(), socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if found >= world.local_size:
        return
    name = torch.cuda.get_device_properties(0).name if found else ""
    if is_mig_slice(name):
        told = f"a process can use at most one slice of a GPU, here {name}; disable MIG (nvidia-smi -mig 0), or start one process"
        raise ValueError(f"--nproc_per_node={world.local_size}: on {host} {told}")
    if visible is not None:
        told = f"leaves {found} GPUs to the {world.local_size} processes on {host}; list one for each process"
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: {told}")
    raise ValueError(f"--nproc_per_node={world.local_size}: {host} has {found} GPUs; start one process per GPU")


def is_mig_slice(name: str) -> bool:
    """Return True if a torch device name denotes a MIG slice of a GPU.

    The name of a MIG slice is, for example, `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    """
    return " MIG " in name


def disconnect() -> None:
    """Destroy the process group, unless vLLM's shutdown has already destroyed it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def long_timeout_group(*, timeout_s: float) -> dist.ProcessGroup | None:
    """Return a process group of all ranks, for collectives that ranks enter at different times.

    All ranks must call this function together. In a world of size 1, the result is None, which
    stands for the default group. Despite the long timeout, a collective in this group fails
    immediately if a rank dies.
    """
    if dist.get_world_size() == 1:
        return None
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))  # every rank is a member


def round_up_to_minutes(timeout_s: float) -> int:
    """Convert a timeout to whole minutes, for libraries that accept only whole minutes.

    The timeout is rounded up, so that it is never shorter than `timeout_s`.
    """
    return max(1, math.ceil(timeout_s / 60))


def is_collective_error(error: BaseException) -> bool:
    """Return True if the error comes from a failed collective.

    A failed collective raises dist.DistError (torch 2.13) or, with gloo, a RuntimeError with "gloo"
    in the message.
    """
    if isinstance(error, InfraError | RunFailed):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def default_store() -> Store:
    """Return the default process group's store, for sharing values without a collective."""
    world = dist.group.WORLD
    assert world is not None, "the process group exists"
    return world.get_group_store()


def all_gather_object(local_value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather one value from every rank and return the values in rank order on every rank."""
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, local_value, group=group)
    return everyones


def all_gather_large_object(local_value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather values as `all_gather_object` does, for values that are large on at least one rank.

    torch's all_gather_object pads the value of each rank to the size of the largest value (torch
    2.13, distributed_c10d.py). This function transfers only the actual values and 16 bytes per
    rank. Each value is transferred twice, because the values are gathered with an all-reduce. Apart
    from the 16 bytes per rank, the traffic per rank does not grow with the world size.
    """
    said = torch.frombuffer(bytearray(pickle.dumps(local_value)), dtype=torch.uint8)
    size_W = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    size_W[dist.get_rank()] = len(said)
    dist.all_reduce(size_W, group=group)
    everyones = torch.zeros(int(size_W.sum()), dtype=torch.uint8)
    parts = everyones.split(size_W.tolist())
    parts[dist.get_rank()].copy_(said)
    dist.all_reduce(everyones, group=group)
    return [pickle.loads(part.numpy().data) for part in parts]


class SharedValueError(ValueError):
    """ValueError that every rank raises with the same text, so the text is printed only once."""


class SharedOSError(OSError):
    """OSError that every rank raises with the same text, so the text is printed only once."""


def raise_on_all_ranks(fn: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `fn` on every rank and return its result; if `fn` fails, raise its error on all ranks.

    This applies only to OSError and ValueError. If `fn` fails on several ranks, the error of the
    lowest of these ranks is raised. The message names this rank, unless `fn` failed on all ranks.
    """
    results: list[T] = []
    met: tuple[type[SharedOSError | SharedValueError], str] | None = None
    try:
        results.append(fn())
    except OSError as reason:
        met = (SharedOSError, str(reason))
    except ValueError as reason:
        met = (SharedValueError, str(reason))
    everyones = all_gather_object((met, socket.gethostname()), group=group)
    troubles = [(rank, host, trouble) for rank, (trouble, host) in enumerate(everyones) if trouble is not None]
    if troubles:
        rank, host, (kind, text) = troubles[0]
        raise kind(text if len(troubles) == len(everyones) else f"{text} (rank {rank} on {host})")
    return results[0]


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return str(error).strip().partition("\n")[0]


def run_on_rank_zero(fn: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `fn` on rank 0 and return its result on every rank.

    If `fn` raises OSError or ValueError, the error is raised on every rank.
    """
    told: list = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = fn()
        except OSError as reason:
            told[1] = SharedOSError(str(reason))
        except ValueError as reason:
            told[1] = SharedValueError(str(reason))
    dist.broadcast_object_list(told, src=0, group=group)
    if told[1] is not None:
        raise told[1]
    return told[0]
