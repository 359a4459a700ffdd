"""What the scripts of this folder have in common: a device, a clock that waits for it, and tables that can be pasted."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    """Device, torch and cuDNN, for the head of a table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version() or '-'}"


def settle() -> None:
    """Until the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(act: Callable[[], T]) -> tuple[float, T]:
    """Seconds from an idle device to an idle device, and the result."""
    settle()
    started = time.perf_counter()
    result = act()
    settle()
    return time.perf_counter() - started, result


def print_head(*names: str) -> None:
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def distance(ours: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> list[float]:
    """|ours - truth| / |truth| of each, in float64 on the host."""
    pairs = ((mine.detach().double().cpu(), exact.detach().double().cpu()) for mine, exact in zip(ours, truth, strict=True))
    return [((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs]
