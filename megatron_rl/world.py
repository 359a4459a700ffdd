"""This process's place among its peers, and the group they talk through. Knows nothing of Megatron."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def place() -> World:
    """Read torchrun's variables; without torchrun this process is a world of one."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank=int(os.environ.get("RANK", 0)), size=int(os.environ.get("WORLD_SIZE", 1)), local_rank=local_rank, device=device)


def connect(world: World, *, timeout_s: float) -> None:
    """Join the default process group: gloo on CPUs, NCCL beside it on GPUs. A collective that waits longer than timeout_s raises."""
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1 and os.environ.get("MASTER_PORT", "0") == "0":  # no launcher, or this process was such a world before
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def disconnect() -> None:
    """Leave the process group, if this process is still in one: vLLM's shutdown leaves it too."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(mine: T) -> list[T]:
    """What every rank hands in, in their order, on every rank."""
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def on_main_rank(act: Callable[[], T]) -> T:
    """Let rank 0 do something while the others wait: its result, or the OSError or ValueError that it met, on every rank."""
    told: list = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = act()
        except OSError as reason:
            told[1] = OSError(str(reason))
        except ValueError as reason:
            told[1] = ValueError(str(reason))
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]
