"""Checks of a node's GPUs and driver before a model is loaded.

Each problem is reported as one error line.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config import Settings
from megatron_rl.distributed.world import World, is_mig_slice

DRIVER = Path("/proc/driver/nvidia/version")
"""File with the driver version, provided by NVIDIA's kernel module on the host and in containers.
"""
NEEDS_DRIVER = {"12": 525, "13": 580}
"""Minimum driver version per CUDA major version (NVIDIA's CUDA compatibility guide, minor version
compatibility).
"""
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 256 << 20
"""Maximum number of bytes in /dev/shm that NCCL may use for each rank on a node."""
MIN_SHARED_BYTES = 64 << 20
"""Minimum number of bytes in /dev/shm per rank that NCCL needs to start.

NCCL creates a few shared-memory segments of 10 to 33 MB per rank. A container without --shm-size
has 64 MB for all ranks. The 1 GB recommended for NVIDIA's containers is twice the minimum for eight
ranks.
"""
HIDING_VARIABLES = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU. With these values, a run uses the CPU."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Gpu:
    """Name and memory of a visible GPU."""

    name: str
    """Name reported by torch, such as `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int
    """Total memory in bytes; for a MIG slice, the memory of the slice."""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch finds, in CUDA's order."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(name=device.name, memory_bytes=device.total_memory) for device in found]


def check_gpus(settings: Settings, world: World, *, needed: int | ValueError | OSError) -> None:
    """Raise ValueError if a run cannot start on this node's GPUs.

    Args:
        settings: Settings of the run.
        world: Rank and device of this process, and the number of processes in the job.
        needed: Planned peak memory in bytes of the GPU that needs the most, 0 if there is no plan,
            or the error that prevented the plan. This error is raised only if the other checks
            pass, because with a MIG slice or mixed GPU types it would name the wrong cause.
    """
    devices, driver = visible_gpus(), read_driver_version(DRIVER)
    troubles = []
    if driver and torch.version.cuda and settings.engine.device != "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDING_VARIABLES:
        troubles.append(driver_error(driver, torch.version.cuda, num_devices=len(devices)))
    if world.device.type == "cuda":
        mine = devices[: world.local_size]
        troubles += find_mismatches(settings, mine, num_ranks=world.size)
        free = shutil.disk_usage(SHARED_MEMORY).free
        small = find_too_small(settings, mine, needed=needed) if isinstance(needed, int) else ""
        troubles += [small, shared_memory_error(free, len(mine), bytes_per_rank=MIN_SHARED_BYTES)]
    told = next(filter(None, troubles), "")
    if told:
        raise ValueError(told)
    if not isinstance(needed, int):
        raise needed


def find_mismatches(settings: Settings, node_gpus: Sequence[Gpu], *, num_ranks: int) -> list[str]:
    """Return one error line for each problem with a node's GPUs.

    This function detects MIG slices in a job with several ranks, GPUs of different types, and
    tensor-parallel groups that would span nodes.

    Args:
        settings: Settings of the run.
        node_gpus: GPUs of this node, one per rank.
        num_ranks: Number of ranks in the whole job.
    """
    visible, found = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}", []
    slices = [gpu.name for gpu in node_gpus if is_mig_slice(gpu.name)]
    if slices and num_ranks > 1:
        remedy = "NCCL needs whole GPUs; start one process, or disable MIG (nvidia-smi -mig 0)"
        found.append(f"{visible}: {slices[0]} is a slice of a GPU, but {remedy}")
    kinds = Counter(gpu.name for gpu in node_gpus)
    if len(kinds) > 1:
        told = " and ".join(f"{count} {name}" for name, count in kinds.items())
        found.append(f"{visible}: this node has {told}, but all ranks need the same type; select GPUs of one type")
    tp = settings.parallel.tp
    if num_ranks > len(node_gpus) and len(node_gpus) % tp:
        fitting = ", ".join(str(size) for size in (1, 2, 4, 8, 16) if len(node_gpus) % size == 0)
        found.append(f"parallel.tp={tp}: would split layers across nodes of {len(node_gpus)} GPUs; use one of {fitting}, or parallel.pp")
    return found


def find_too_small(settings: Settings, node_gpus: Sequence[Gpu], *, needed: int) -> str:
    """Return an error if the smallest GPU has less memory than planned, else an empty string.

    The error has the form `engine.gpu_memory_utilization=0.9: ...`.
    """
    index, gpu = min(enumerate(node_gpus), key=lambda each: each[1].memory_bytes)
    if gpu.memory_bytes >= needed:
        return ""
    remedy = "lower it, or the other memory that plan.only=true shows (batch.micro_batch_tokens, parallel.offload_*), or raise parallel.tp"
    lacks = f"GPU {index} ({gpu.name}) has {gpu.memory_bytes / 1e9:.1f} GB, but the plan needs {needed / 1e9:.1f}"
    return f"engine.gpu_memory_utilization={settings.engine.gpu_memory_utilization}: {lacks}; {remedy}"


def shared_memory_error(free: int, num_ranks: int, *, bytes_per_rank: int) -> str:
    """Return an error if the free space in /dev/shm is below `bytes_per_rank` * `num_ranks`.

    Return an empty string if there is enough space. No error is returned for a single rank, or with
    NCCL_SHM_DISABLE=1, which lets NCCL work without shared memory.
    """
    if num_ranks == 1 or free >= bytes_per_rank * num_ranks or os.environ.get("NCCL_SHM_DISABLE") == "1":
        return ""
    remedy = f"NCCL may need {SHARED_BYTES * num_ranks / 2**30:.1f}; start the container with --shm-size, or --ipc=host"
    return f"{SHARED_MEMORY}: {free / 2**30:.2f} GiB are free, but {remedy}"


def read_driver_version(version_file: Path) -> str:
    """Return the version of NVIDIA's driver, e.g. 580.65.06.

    Return an empty string if there is no driver.
    """
    try:
        found = re.search(r"Module(?: for \S+)?\s+(\d+\.[\d.]+)", version_file.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def driver_error(driver: str, cuda_version: str | None, *, num_devices: int) -> str:
    """Return an error that explains why torch finds no GPU although there is a driver.

    Return an empty string if torch finds a GPU.
    """
    if num_devices:
        return ""
    if cuda_version is None:
        return f"torch={torch.__version__}: is built for CPUs, but this machine has NVIDIA's driver {driver}; run bash launch/install.sh"
    needed = NEEDS_DRIVER.get(cuda_version.split(".")[0], 0)
    if int(driver.split(".")[0]) < needed:
        return f"driver={driver}: is too old for torch's CUDA {cuda_version}; install {needed} or newer"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"CUDA_VISIBLE_DEVICES={visible}: torch finds no GPU, but driver {driver} is installed; check nvidia-smi, or use -1 for the CPU"
