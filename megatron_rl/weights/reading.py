"""Tensors out of large files without waiting for them: mapped, asked for early, and made while others are written."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")


def mapped(path: Path, *, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """The contiguous tensor whose bytes begin there. Its part of the file is mapped for as long as the tensor lives, and the kernel begins
    to read it now; writing to it changes memory, never the file."""
    before = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        part = mmap.mmap(file.fileno(), before + shape.numel() * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset - before)
    part.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(part, dtype=dtype, offset=before).view(shape)


def made_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """make(item) for every item in order, each in a thread while the caller is busy with the one before it."""
    with ThreadPoolExecutor(1) as maker:
        pending: Future[Made] | None = None
        for item in items:
            coming = maker.submit(make, item)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()
