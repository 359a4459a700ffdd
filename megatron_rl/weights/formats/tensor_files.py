"""Reads and writes large tensor files efficiently, and creates folders atomically.

Files are read through memory maps, and the mapped pages are loaded before a tensor is used. A
thread prepares the next tensor while the current tensor is written. Writing is sequential, and the
kernel writes data to disk while the file grows. A folder is renamed to its final name only after
all its files are on disk, so that a killed process leaves no incomplete folder under that name.
"""

import ctypes
import errno
import io
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from megatron_rl.weights.formats.pixel_limits import write_pixel_limits

Item = TypeVar("Item")
MadeItem = TypeVar("MadeItem")

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 (include/uapi/asm-generic/mman-common.h), not defined by Python
3.11.
"""
LIBC = ctypes.CDLL(None, use_errno=True)
"""C library, used to call madvise without holding the GIL. The madvise method of Python 3.11 holds
the GIL while it waits for the disk (Modules/mmapmodule.c).
"""
WRITE_BYTES = 64 << 20
"""Number of written bytes after which the kernel is asked to start writing a file to disk, so that
fsync has little left to write.
"""
NO_COMPANIONS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}
"""Suffixes of weight files in a Hugging Face folder; `*.index.json` files also count as weights."""

MAX_COMPANION_BYTES = 256 << 20
"""Maximum size in bytes of a companion file; larger files are treated as weights. The largest
tokenizer files are about 40 MB.
"""


def map_tensor(path: Path, *, offset: int, dtype: torch.dtype, shape: torch.Size, read_once: bool = False) -> torch.Tensor:
    """Return the contiguous tensor at `offset` in a file, mapped privately into memory.

    The tensor's part of the file is read immediately and stays mapped as long as the tensor exists.
    Writing to the tensor changes memory, never the file. Set `read_once` to True if no process
    reads the tensor's part of the file again. When the tensor is freed, its part of the file is
    then dropped from the page cache. This leaves memory for the next tensor. Raises OSError if the
    disk cannot be read.
    """
    before = offset % mmap.ALLOCATIONGRANULARITY
    num_bytes = shape.numel() * dtype.itemsize
    with path.open("rb") as file:
        part = mmap.mmap(file.fileno(), before + num_bytes, access=mmap.ACCESS_COPY, offset=offset - before)
        if read_once:
            weakref.finalize(part, _forget, os.dup(file.fileno()), offset, num_bytes).atexit = False
    part.madvise(mmap.MADV_WILLNEED)
    pages = torch.frombuffer(part, dtype=torch.uint8)
    if LIBC.madvise(ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(len(pages)), POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # older Linux: pages are loaded at first access
            raise OSError(number, os.strerror(number), str(path))
    return torch.frombuffer(part, dtype=dtype, offset=before).view(shape)


def _forget(descriptor: int, offset: int, num_bytes: int) -> None:
    """Drop a part of a file from the page cache and close the file descriptor.

    Pages that other processes have mapped stay in the page cache.
    """
    os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def prefetch(make: Callable[[Item], MadeItem], items: Iterable[Item]) -> Iterator[MadeItem]:
    """Yield make(item) for each item in order, while a thread computes the next result."""
    with ThreadPoolExecutor(1) as maker:
        pending: Future[MadeItem] | None = None
        for item in items:
            coming = maker.submit(make, item)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()


class FlushedFile(io.FileIO):
    """New unbuffered file that the kernel writes to disk while the file grows.

    If the disk is full, the call that fails raises an OSError that contains the file's name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.path = path
        self._waiting = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data at the current position."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while left:
                written = super().write(left[: WRITE_BYTES - self._waiting])
                left = left[written:]
                self._waiting += written
                if self._waiting == WRITE_BYTES:
                    # Linux starts writing the dirty pages to disk, and this call does not wait for
                    # that (mm/fadvise.c).
                    os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    self._waiting = 0
        except OSError as error:
            raise self._named(error) from error
        return num_bytes

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write the data of a CPU tensor in row-major order."""
        self.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Wait until the whole file is on disk, then close it."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            raise self._named(error) from error
        self.close()

    def _named(self, error: OSError) -> OSError:
        return OSError(f"{self.path.name}: {error.strerror}")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `out` when the block ends.

    The temporary folder is hidden and next to `out`. At the end of the block, the temporary folder
    is flushed to disk and renamed to `out`. If the block raises an exception, the temporary folder
    is removed together with parent folders created for it, and an existing `out` is kept.

    Leftovers of a killed process are removed by the next call with the same `out`. If the process
    was killed between the two renames that replace an existing folder, the next call restores that
    folder. Raises OSError if the disk is full, if permission is missing, or if a file exists at the
    path of a folder that must be created.
    """
    partial, replaced = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.replaced")
    if replaced.exists() and not out.exists():
        replaced.rename(out)
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        for folder, _, files in os.walk(partial):
            for file in files:
                fsync_path(Path(folder, file))
            fsync_path(Path(folder))
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        fsync_path(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        with suppress(OSError):  # not empty, or it was never created
            for parent in made:
                parent.rmdir()
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file_name(name: object) -> bool:
    """Return True if an untrusted value is a plain file name, without a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def list_companions(source: Path) -> list[Path]:
    """Return the config, tokenizer, processor and chat template files of a Hugging Face folder.

    Returns all files except weights and hidden files. Raises ValueError if a file is a symbolic
    link to a target outside the folder, because a copy of the folder would publish that target.
    Links to the blobs of a Hugging Face cache are accepted.
    """
    folder = source.resolve()
    found, homes = [], [folder, *(home.parent / "blobs" for home in folder.parents if home.name == "snapshots")]
    for path in sorted(source.glob("*")):
        is_weights = path.suffix in NO_COMPANIONS or path.name.endswith(".index.json")
        if is_weights or path.name.startswith(".") or not path.is_file() or path.stat().st_size > MAX_COMPANION_BYTES:
            continue
        if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
            raise ValueError(f"{path}: is a link to {path.resolve()}, outside its folder; replace it with a copy of the file")
        found.append(path)
    return found


def copy_companions(source: Path, into: Path, *, pixels: tuple[int, int] | None = None) -> list[str]:
    """Copy a Hugging Face folder without its weights, and optionally set the copy's pixel limits.

    `pixels` is (min_pixels, max_pixels); see pixel_limits.py. Returns the components that are still
    missing from `into`, such as "tokenizer" or "processor". Raises ValueError if `list_companions`
    rejects a symbolic link in `source`.
    """
    into.mkdir(exist_ok=True)
    for path in list_companions(source):
        shutil.copyfile(path, into / path.name)
    if pixels is not None:
        write_pixel_limits(into, pixels)
    names = {path.name for path in into.iterdir()}
    parts = {
        "tokenizer": {"tokenizer.json", "vocab.json"},
        "processor": {"preprocessor_config.json", "processor_config.json"},
        "generation config": {"generation_config.json"},
    }
    return [part for part, files in parts.items() if not files & names]
