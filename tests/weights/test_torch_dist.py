"""The torch_dist checkpoint format, read and written one tensor at a time, against torch's own
reader and writer."""

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.weights.formats.torch_dist import McoreTensors, TorchDistWriter
from tests.conftest import ROOT

TENSORS = {
    "rows": torch.arange(48, dtype=torch.float32).reshape(8, 6),
    "columns": torch.arange(48, dtype=torch.bfloat16).reshape(8, 6) + 100,
    "view": torch.arange(1000, dtype=torch.float64)[10:20],
    "optimizer.state": torch.ones(3),
}
CUTS = {"rows": (0, 4), "columns": (1, 3), "view": (0, 1), "optimizer.state": (0, 1)}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "written"
    folder.mkdir()
    with TorchDistWriter(folder, file_bytes=4000) as writer:
        for key, tensor in TENSORS.items():
            writer.add(key, tensor, dim=CUTS[key][0], parts=CUTS[key][1])
            writer.add_empty_object(f"{key}/shard_0_1")
        writer.finish()
    return folder


def test_torch_reads_what_was_written(written: Path) -> None:
    """torch's reader loads the written tensors.

    Files are split at file_bytes, and a view is written without the rest of its storage.
    """
    state = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    dcp.load(state, checkpoint_id=written, no_dist=True)
    assert all(torch.equal(state[key], tensor) for key, tensor in TENSORS.items())
    assert len(list(written.glob("*.distcp"))) > 2, "file_bytes was not heeded"
    assert sum(path.stat().st_size for path in written.glob("*.distcp")) < 20_000, "a view brought all of its tensor along"


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (0, 2), (0, 5), (0, 10), (1, 3)])
def test_runs_of_rows_are_one_tensor(tmp_path: Path, dim: int, parts: int) -> None:
    """A tensor written as several row slices is one tensor to torch's reader.

    Ten rows come from three tensors, with chunk borders independent of the slices.
    """
    whole, other = torch.arange(60, dtype=torch.float32).reshape(10, 6), torch.ones(3)
    with TorchDistWriter(tmp_path) as writer:
        writer.add("other", other)
        writer.add("runs", *whole.clone().split([3, 1, 6]), dim=dim, parts=parts)
        writer.finish()
    state = {"runs": torch.zeros(10, 6), "other": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["runs"], whole) and torch.equal(state["other"], other)
    stored = McoreTensors(tmp_path)
    assert [sizes for _, sizes in stored.chunks("runs")] == [chunk.shape for chunk in whole.chunk(parts, dim)]
    assert torch.equal(stored.read("runs"), whole)


def test_what_torch_wrote_is_read(tmp_path: Path) -> None:
    """Tensors that torch's writer saved are read, without optimizer state."""
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path, no_dist=True)
    stored = McoreTensors(tmp_path)
    assert stored.specs.keys() == {"rows", "columns", "view"}
    assert all(torch.equal(stored.read(key), TENSORS[key]) for key in stored.specs)


def test_chunks_are_those_of_the_ranks(written: Path) -> None:
    """The stored chunks have the offsets and sizes of the ranks' shards."""
    stored = McoreTensors(written)
    chunks = [(tuple(offsets), tuple(sizes)) for offsets, sizes in stored.chunks("columns")]
    assert chunks == [((0, 0), (8, 2)), ((0, 2), (8, 2)), ((0, 4), (8, 2))]
    assert (stored.specs["rows"].shape, stored.specs["columns"].dtype) == (torch.Size([8, 6]), torch.bfloat16)
    assert all(torch.equal(stored.read(key), TENSORS[key]) for key in stored.specs)


def damage(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Apply `change` to the folder's metadata and store the result."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_a_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["rows"].chunks.pop()


def double_a_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["rows"].chunks
    chunks[1] = chunks[0]


def forget_a_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "rows")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_a_chunk, "do not cover the tensor exactly once"),
        (double_a_chunk, "do not cover the tensor exactly once"),
        (forget_a_place, "is not in any file"),
    ],
)
def test_chunks_that_are_not_the_tensor(change: Callable[[Metadata], None], said: str, written: Path) -> None:
    """Metadata with missing or duplicate chunks, or without a storage location, is rejected."""
    damage(written, change)
    with pytest.raises(ValueError, match=f"^--checkpoint={written}: rows: .*{said}"):
        McoreTensors(written)


def test_files_that_are_cut_off_or_missing(written: Path) -> None:
    """A truncated or missing data file is rejected by name when the checkpoint is opened."""
    first = written / "__0_0.distcp"
    os.truncate(first, first.stat().st_size // 2)
    with pytest.raises(ValueError, match="rows: __0_0.distcp is truncated"):
        McoreTensors(written)
    first.unlink()
    with pytest.raises(ValueError, match="rows: __0_0.distcp is missing"):
        McoreTensors(written)


def test_a_file_that_was_overwritten(written: Path) -> None:
    """An overwritten data file is rejected by name when a tensor is read."""
    path = written / "__0_0.distcp"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ValueError, match="rows: __0_0.distcp is corrupt"):
        McoreTensors(written).read("rows")


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("exit 0",)


def test_a_strange_pickle_is_not_run(written: Path) -> None:
    """A metadata pickle that calls a foreign function is rejected and not executed."""
    (written / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="system, which is not allowed"):
        McoreTensors(written)


@pytest.mark.parametrize("content", [None, [1], {"state_dict_metadata": {}}])
def test_another_pickle_is_no_metadata(content: object, written: Path) -> None:
    """A pickle that holds no Metadata is rejected in one line."""
    (written / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(
        ValueError,
        match=f"^--checkpoint={written}: .metadata is damaged .the pickle contains an object .* instead of Metadata.; copy it again",
    ):
        McoreTensors(written)


WRITES_384_MB = """
import resource, sys
from pathlib import Path
import torch
from megatron_rl.weights.formats.torch_dist import TorchDistWriter
with TorchDistWriter(Path(sys.argv[1])) as writer:
    writer.add("first", torch.ones(1 << 22))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(24):
        writer.add(str(number), torch.ones(1 << 22))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    """Writing 24 tensors of 16 MiB raises peak memory by at most 48 MiB. torch's own writer holds
    all tensors until the file is full."""
    command = [sys.executable, "-c", WRITES_384_MB, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) > 25 << 24
    assert int(result.stdout) <= 48


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    """A full disk raises OSError, and no metadata is written.

    A file-size limit stands in for a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with TorchDistWriter(tmp_path) as writer:
            writer.add("small", torch.ones(10))
            with pytest.raises(OSError, match="File too large"):
                writer.add("large", torch.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / ".metadata").exists()
