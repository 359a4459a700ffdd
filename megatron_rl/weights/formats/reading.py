"""Tensors out of large files without waiting for them: mapped, read before they are asked for, and made while others are written."""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 (include/uapi/asm-generic/mman-common.h), which Python 3.11 does not name."""
LIBC = ctypes.CDLL(None, use_errno=True)
"""Its madvise, because Python 3.11's waits for the disk without letting other threads run (Modules/mmapmodule.c)."""


def mapped(path: Path, *, offset: int, dtype: torch.dtype, shape: torch.Size, once: bool = False) -> torch.Tensor:
    """The contiguous tensor whose bytes begin there. Its part of the file is read and mapped for as long as the tensor lives; writing to
    it changes memory, never the file. `once`: nobody else needs that part, and it leaves the page cache with the tensor, which spares
    the kernel finding other memory for what is read next. Raises OSError where the disk cannot be read."""
    before = offset % mmap.ALLOCATIONGRANULARITY
    num_bytes = shape.numel() * dtype.itemsize
    with path.open("rb") as file:
        part = mmap.mmap(file.fileno(), before + num_bytes, access=mmap.ACCESS_COPY, offset=offset - before)
        if once:
            weakref.finalize(part, _forget, os.dup(file.fileno()), offset, num_bytes).atexit = False
    part.madvise(mmap.MADV_WILLNEED)
    pages = torch.frombuffer(part, dtype=torch.uint8)
    if LIBC.madvise(ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(len(pages)), POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # an older Linux, where pages are mapped as they are touched
            raise OSError(number, os.strerror(number), str(path))
    return torch.frombuffer(part, dtype=dtype, offset=before).view(shape)


def _forget(descriptor: int, offset: int, num_bytes: int) -> None:
    """Take a part of a file, which is not mapped any more, out of the page cache; what other processes map stays."""
    os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


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
