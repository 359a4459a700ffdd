"""Helpers for the scripts in this folder: device, timing and Markdown tables."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def device() -> torch.device:
    """Return the CUDA device, or the CPU if there is no CUDA device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    """Return the device name and the versions of torch and cuDNN as one line."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version() or '-'}"


def settle() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(act: Callable[[], T]) -> tuple[float, T]:
    """Return the duration of a call in seconds and the result of the call.

    The device is idle before and after the call.
    """
    settle()
    started = time.perf_counter()
    result = act()
    settle()
    return time.perf_counter() - started, result


def print_head(*names: str) -> None:
    """Print the header of a table."""
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def distance(ours: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> list[float]:
    """Return |ours - truth| / |truth| for each pair of tensors, computed in float64 on the host."""
    pairs = ((mine.detach().double().cpu(), exact.detach().double().cpu()) for mine, exact in zip(ours, truth, strict=True))
    return [((mine - exact).norm() / exact.norm()).item() for mine, exact in pairs]
