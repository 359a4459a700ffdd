"""Memory-mapped reading and flushed writing of large files, and atomic replacement of folders.

Contents are compared with plain reads, and the page cache with the kernel's report. A folder is
complete or absent, whatever fails while it is written.
"""

import gc
import os
import random
import resource
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.formats import tensor_files
from megatron_rl.weights.formats.tensor_files import FlushedFile, atomic_folder, map_tensor

PAGES = 64


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Write a file of 64 pages to disk and drop it from the page cache."""
    path = tmp_path / "numbers"
    path.write_bytes(random.Random(0).randbytes(PAGES * 4096))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return path


def is_cached(path: Path, page: int) -> bool:
    """Return True if the page can be read without disk access."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], page * 4096, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def test_a_mapped_tensor_is_the_files_and_changing_it_is_not_the_files(stored: Path) -> None:
    """A mapped tensor has the file's content, at an offset that is no multiple of a page.

    Writing to the tensor does not change the file.
    """
    before = stored.read_bytes()
    tensor = map_tensor(stored, offset=4100, dtype=torch.int16, shape=torch.Size([3, 5000]))
    assert tensor.shape == (3, 5000) and tensor.numpy().tobytes() == before[4100:34100]
    tensor.zero_()
    assert stored.read_bytes() == before


@pytest.mark.parametrize("once", [False, True])
def test_what_is_read_once_leaves_the_page_cache_with_its_tensor(stored: Path, once: bool) -> None:
    """With read_once, the file leaves the page cache when the last view of its tensor is freed."""
    if is_cached(stored, PAGES // 2):
        pytest.skip("the temporary folder lies on a file system that is its page cache")
    tensor = map_tensor(stored, offset=0, dtype=torch.uint8, shape=torch.Size([PAGES * 4096]), read_once=once)
    part = tensor[4096:]
    assert is_cached(stored, PAGES // 2)
    del tensor
    gc.collect()
    assert is_cached(stored, PAGES // 2), "a view of it still lives"
    del part
    gc.collect()
    assert is_cached(stored, PAGES // 2) != once


def test_a_steady_file_holds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlushedFile contains exactly the bytes written.

    The pieces end on both sides of the flush threshold and include a tensor view and a tensor
    without dimensions.
    """
    monkeypatch.setattr(tensor_files, "WRITE_BYTES", 7)
    columns, number = torch.arange(12, dtype=torch.int16).reshape(3, 4)[:, 1:3], torch.tensor(2.5)
    file = FlushedFile(tmp_path / "file")
    assert [file.write(data) for data in (b"abc", memoryview(b"defghijklmnopqrstuvwxyz"), b"")] == [3, 23, 0]
    file.write_tensor(columns)
    file.write_tensor(number)
    file.seek(0)
    file.write(b"ABC")
    file.finish()
    expected = b"ABCdefghijklmnopqrstuvwxyz" + columns.numpy().tobytes() + number.numpy().tobytes()
    assert (tmp_path / "file").read_bytes() == expected


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """A failed write raises OSError with the file name.

    A file-size limit stands in for a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="^weights.bin: File too large$"), FlushedFile(tmp_path / "weights.bin") as file:
            file.write(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_is_replaced_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder survives if the second of the two renames fails, or if the process is killed
    between them. A later write can then replace it."""
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "old").touch()

    def fails(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise OSError("no more renames")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no more renames"), atomic_folder(out):
        (tmp_path / ".out.partial").touch()
    monkeypatch.undo()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/old"]
    out.rename(tmp_path / ".out.replaced")
    with pytest.raises(ValueError, match="refused"), atomic_folder(out):
        raise ValueError("refused")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/old"]
    with atomic_folder(out) as partial:
        (partial / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/new"]


def test_parents_that_were_made_for_nothing_go(tmp_path: Path) -> None:
    """After a failed write, parent folders created for it are removed.

    Parents that existed before, or that contain something by now, stay.
    """
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="refused"), atomic_folder(tmp_path / "there" / "a" / "b" / "out"):
        raise ValueError("refused")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]

    def refused_beside_a_file() -> None:
        with atomic_folder(tmp_path / "there" / "a" / "b" / "out"):
            (tmp_path / "there" / "a" / "mine").touch()
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        refused_beside_a_file()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "mine", "there"]
