"""This process's place among its peers, and the group they talk through. Knows nothing of Megatron."""

import ctypes
import os
import pickle
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import InfraError, RunFailed

T = TypeVar("T")
MIN_OPEN_FILES, TARGET_OPEN_FILES = 256, 65536
"""Open files of a process: a nano run on a CPU has 144, each server, judge or sandbox that is asked adds its connections."""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
"""Options of glibc's mallopt (malloc.h)."""
MMAP_THRESHOLD_BYTES = 4 << 20
"""A block of as many is mapped by itself, and goes when it is freed; its pages are made and wiped again when the next one is written. With
1 MiB, as large as activations of a small model, that took a quarter more of a run's processor time on a CPU (docs/log.md)."""
TRIM_THRESHOLD_BYTES = 64 << 20
"""Kept of what is free at a heap's end: what the library comes to by itself."""


@dataclass(slots=True, frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1
    """Processes of this node."""
    node: int = 0
    num_nodes: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Of the processes of its node."""
        return self.local_rank == 0


def read_world() -> World:
    """Read torchrun's variables; without torchrun this process is a world of one. A node is what one torchrun has started."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(
        rank=int(os.environ.get("RANK", 0)), size=int(os.environ.get("WORLD_SIZE", 1)), local_rank=local_rank, device=device,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), node=int(os.environ.get("GROUP_RANK", 0)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
    )  # fmt: skip


def connect(world: World, *, timeout_s: float) -> None:
    """Join the default process group: gloo on CPUs, NCCL beside it on GPUs. A collective that waits longer than timeout_s raises.

    ValueError: this node has fewer GPUs than processes, or may open too few files, or its processes do not find the others in timeout_s.
    """
    raise_file_limit()
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if world.device.type == "cuda":
        require_gpu_per_rank(world)
        torch.cuda.set_device(world.device)
    if world.size == 1 and os.environ.get("MASTER_PORT", "0") == "0":  # no launcher, or this process was such a world before
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            raise ValueError(
                f"--nnodes={world.num_nodes}: the {world.size} processes did not meet within parallel.timeout_s={timeout_s:g} "
                f"({first_line(error)}); see that every node began, "
                "and name the interface between them (ip addr lists all) in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            ) from error


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one. ValueError: that allows fewer than a run needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max_open_files()
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < MIN_OPEN_FILES:
        remedy = "raise the hard limit: ulimit -Hn, limits.conf, docker run --ulimit"
        raise ValueError(f"ulimit -n {most}: a run needs {MIN_OPEN_FILES} open files at least; {remedy}")


def max_open_files() -> int:
    """Return how many files this process may have open once its soft limit is raised."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return TARGET_OPEN_FILES if hard == resource.RLIM_INFINITY else min(TARGET_OPEN_FILES, hard)


def expand_segments() -> None:
    """Let segments of torch's memory on GPUs grow, where the environment says nothing of that memory: micro-batches differ in length, and
    segments of fixed sizes fit none but the batch they were made for. To be called before the first tensor on a GPU.

    In this process alone: the ranks of an engine of several, or of a judge's server that a run starts, hand each other blocks by cudaIpc,
    which takes no segment that grows (vllm 0.32.0, distributed/device_communicators/custom_all_reduce.py).
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def trim_malloc() -> None:
    """Have the C library give large blocks back when they are freed. By itself it comes to keep those of up to 32 MB, as pictures and
    activations are, in heaps with holes that the next ones do not fit (glibc 2.36, malloc/malloc.c, M_MMAP_THRESHOLD)."""
    heap = ctypes.CDLL(None)
    for option, size in ((M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)):
        assert heap.mallopt(option, size), f"mallopt({option}, {size})"


def require_gpu_per_rank(world: World) -> None:
    """ValueError on every process of this node: it has fewer GPUs than processes."""
    found, host, visible = torch.cuda.device_count(), socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if found >= world.local_size:
        return
    name = torch.cuda.get_device_properties(0).name if found else ""
    if is_mig_slice(name):
        told = f"a process sees one slice of a GPU at most, here {name}; switch MIG off (nvidia-smi -mig 0), or start one process"
        raise ValueError(f"--nproc_per_node={world.local_size}: on {host} {told}")
    if visible is not None:
        told = f"leaves {found} GPUs to the {world.local_size} processes of {host}; name one for each"
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: {told}")
    raise ValueError(f"--nproc_per_node={world.local_size}: {host} has {found} GPUs; start one process a GPU")


def is_mig_slice(name: str) -> bool:
    """Whether torch's name of a device is that of a part of a GPU (MIG). Example: NVIDIA A100-SXM4-40GB MIG 1g.5gb"""
    return " MIG " in name


def disconnect() -> None:
    """Leave the process group, if this process is still in one: vLLM's shutdown leaves it too."""
    if dist.is_initialized():
        dist.destroy_process_group()


def long_timeout_group(*, timeout_s: float) -> dist.ProcessGroup | None:
    """A group of all ranks for collectives that some of them come to much later; None, which is the default group, in a world of one.
    A rank that dies is noticed in it at once. All ranks together."""
    return None if dist.get_world_size() == 1 else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def round_up_to_minutes(timeout_s: float) -> int:
    """What groups wait whose maker takes minutes alone."""
    return max(1, round(timeout_s / 60))


def is_collective_error(error: BaseException) -> bool:
    """Whether it tells of peers: torch 2.13's own errors, and gloo's, which have no class but name their source."""
    if isinstance(error, InfraError | RunFailed):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def default_store() -> dist.Store:
    """What the default process group's ranks met in, for numbers that they share without a collective."""
    return dist.group.WORLD.get_group_store()


def all_gather_object(local_value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank hands in, in their order, on every rank."""
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, local_value, group=group)
    return everyones


def all_gather_large_object(local_value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """`gather` of what is long, on some ranks or on all: that one sends every rank as much from each as the longest has, however few ranks
    have anything (torch 2.13, distributed_c10d.py, all_gather_object). Here a rank is sent what was said, twice as the ranks add it up, and
    16 bytes a rank: no more in a large world than in a small one.
    """
    said = torch.frombuffer(bytearray(pickle.dumps(local_value)), dtype=torch.uint8)
    size_W = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    size_W[dist.get_rank()] = len(said)
    dist.all_reduce(size_W, group=group)
    everyones = torch.zeros(int(size_W.sum()), dtype=torch.uint8)
    parts = everyones.split(size_W.tolist())
    parts[dist.get_rank()].copy_(said)
    dist.all_reduce(everyones, group=group)
    return [pickle.loads(part.numpy()) for part in parts]


class SharedValueError(ValueError):
    """A mistake of the user that every rank raises with the same text: one line for the world is enough."""


class SharedOSError(OSError):
    """The same of the system."""


def raise_on_all_ranks(fn: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """What every rank does for itself; where one of them meets an OSError or a ValueError, every rank raises it (the first of several).

    It is told of whom it is, unless all have met it.
    """
    result, met = None, None
    try:
        result = fn()
    except OSError as reason:
        met = (SharedOSError, str(reason))
    except ValueError as reason:
        met = (SharedValueError, str(reason))
    everyones = all_gather_object((met, socket.gethostname()), group=group)
    troubles = [(rank, host, *trouble) for rank, (trouble, host) in enumerate(everyones) if trouble is not None]
    if troubles:
        rank, host, kind, text = troubles[0]
        raise kind(text if len(troubles) == len(everyones) else f"{text} (rank {rank} on {host})")
    return result


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def run_on_rank_zero(fn: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Let rank 0 do something while the others wait: its result, or the OSError or ValueError that it met, on every rank."""
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
