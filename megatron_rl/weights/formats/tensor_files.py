"""Large files of tensors without waiting for the disk, and folders that are whole or absent.

Read: a file is mapped, read before it is asked for, and the next tensor is made while the last one is written. Written: from front to
end, on its way to the disk while it grows. Published: a folder takes its name when all of it is on the disk, whatever kills the process.
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
MadeItem = TypeVar("Made")

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 (include/uapi/asm-generic/mman-common.h), which Python 3.11 does not name."""
LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library, for its madvise: Python 3.11's waits for the disk without letting other threads run (Modules/mmapmodule.c)."""
WRITE_BYTES = 64 << 20
"""The kernel is told to begin writing a growing file out after every so many bytes, so that fsync finds little left to do."""
NO_COMPANIONS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}
"""Suffixes of weights in a Hugging Face folder; `*.index.json` belongs to them."""

MAX_COMPANION_BYTES = 256 << 20
"""What is larger is weights, by whatever name: the largest tokenizers have some 40 MB."""


def map_tensor(path: Path, *, offset: int, dtype: torch.dtype, shape: torch.Size, read_once: bool = False) -> torch.Tensor:
    """The contiguous tensor whose bytes begin at an offset of a file. Its part of the file is read and mapped for as long as the tensor
    lives; writing to it changes memory, never the file. `read_once`: nobody else needs that part, and it leaves the page cache with the
    tensor, which spares the kernel finding other memory for what is read next. Raises OSError where the disk cannot be read."""
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
        if number != errno.EINVAL:  # an older Linux, where pages are mapped as they are touched
            raise OSError(number, os.strerror(number), str(path))
    return torch.frombuffer(part, dtype=dtype, offset=before).view(shape)


def _forget(descriptor: int, offset: int, num_bytes: int) -> None:
    """Take a part of a file, which is not mapped any more, out of the page cache; what other processes map stays."""
    os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def prefetch(make: Callable[[Item], MadeItem], items: Iterable[Item]) -> Iterator[MadeItem]:
    """Yield make(item) for every item in order, each made in a thread while the caller is busy with the one before it."""
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
    """A new file without a buffer. Raises OSError naming it (disk full), from whichever call notices."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.path = path
        self._waiting = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data, where the file stands."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        try:
            while left:
                written = super().write(left[: WRITE_BYTES - self._waiting])
                left = left[written:]
                self._waiting += written
                if self._waiting == WRITE_BYTES:
                    # Linux begins to write out the pages it is told nobody needs, and does not wait for them (mm/fadvise.c).
                    os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    self._waiting = 0
        except OSError as error:
            raise self._named(error) from error
        return num_bytes

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write the numbers of a tensor on CPU, row by row."""
        self.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))

    def finish(self) -> None:
        """Wait until all of the file is on the disk, and close it."""
        try:
            os.fsync(self.fileno())
        except OSError as error:
            raise self._named(error) from error
        self.close()

    def _named(self, error: OSError) -> OSError:
        return OSError(f"{self.path.name}: {error.strerror}")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """An empty hidden folder beside `out`; when the block ends it is flushed to disk and takes out's name and place.

    If the block raises, what was written is removed, with the parents that were made for it, and a folder that was at `out` stays.
    What a killed process left is removed by the next one, which puts the old folder back if it died between the two renames.
    Raises OSError (disk full, no permission, a file in the way).
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
        with suppress(OSError):  # somebody else's file is in it by now, or it was not made
            for parent in made:
                parent.rmdir()
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file_name(name: object) -> bool:
    """Whether a stranger's word names a file of a folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def list_companions(source: Path) -> list[Path]:
    """Config, tokenizer, processor and chat template: every file of a Hugging Face folder but its weights and hidden files.

    ValueError: one of them is a link that leads out of the folder, and what it leads to is nobody's to publish. In a cache of Hugging Face,
    a model's files are links to its blobs.
    """
    folder = source.resolve()
    found, homes = [], [folder, *(home.parent / "blobs" for home in folder.parents if home.name == "snapshots")]
    for path in sorted(source.glob("*")):
        is_weights = path.suffix in NO_COMPANIONS or path.name.endswith(".index.json")
        if is_weights or path.name.startswith(".") or not path.is_file() or path.stat().st_size > MAX_COMPANION_BYTES:
            continue
        if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
            raise ValueError(f"{path}: is a link to {path.resolve()}, out of its folder; put a copy of the file in its place")
        found.append(path)
    return found


def copy_companions(source: Path, into: Path, *, pixels: tuple[int, int] | None = None) -> list[str]:
    """Copy what stands beside the weights, with these limits of a picture's pixels in the processor's files (pixel_limits.py).

    Returns the parts of a complete folder that are missing, in words. ValueError: `list_companions`.
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
