"""Reader and writer of Megatron's checkpoint format `torch_dist`.

The reader and the writer handle one tensor at a time and need no process group. A folder contains
`*.distcp` files, `.metadata`, `common.pt` and `metadata.json` (megatron-core 0.16.1,
dist_checkpointing). A `*.distcp` file is a sequence of tensor chunks, each written by a separate
torch.save call. The file `.metadata` is a pickled torch Metadata object that contains the chunks of
each tensor and the positions of the chunks in the files.

The writer appends each tensor to a file with torch.save, so only one tensor is in memory at a time.
In contrast, torch 2.13's FileSystemWriter keeps every tensor of a file in memory until the file is
complete (checkpoint/filesystem.py, _write_files_from_queue), and `dist_checkpointing.save` requires
all tensors at once. The writer's files have the same format as the files of FileSystemWriter.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.utils.serialization import config

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.name_mapping import Tensors
from megatron_rl.weights.formats import pickle_tensors
from megatron_rl.weights.formats.checkpoint_source import TensorSpec
from megatron_rl.weights.formats.digests import RecordedFiles, recorded_files
from megatron_rl.weights.formats.pickle_tensors import StoredTensor
from megatron_rl.weights.formats.tensor_files import FlushedFile, map_tensor
from megatron_rl.weights.formats.torch_dist_metadata import METADATA, chunks_cover_tensor, read_metadata

FORMAT_FILE = "metadata.json"
"""Name of the file that identifies the format."""
FORMAT_METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
"""Content of metadata.json, as written by CheckpointingConfig (megatron-core 0.16.1,
dist_checkpointing/core.py).
"""
MERGE_PREFIX = "merge."
"""Beginning of the keys of a merge of checkpoints (policy/checkpoint_merge.py)."""
_NOT_OF_MODEL = ("optimizer.", MERGE_PREFIX)


def read_format_metadata(folder: Path, *, key: str) -> object:
    """Return the content of metadata.json.

    Raises ValueError if the file is missing or damaged. `key` is the setting or option that names
    the folder, used in error messages.
    """
    path = folder / FORMAT_FILE
    if not path.is_file():
        raise ValueError(f"{key}={folder}: {FORMAT_FILE} is missing; use a Megatron torch_dist checkpoint folder")
    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"{key}={folder}: {FORMAT_FILE} {error}; copy it again") from error


class McoreTensors:
    """Tensors of a torch_dist folder, read one at a time by key.

    By default, the tensors of the optimizer and of a merge are omitted. Raises ValueError if the
    chunks of a tensor do not cover the tensor exactly once, if a chunk extends beyond the end of
    its file, or if a file of a training checkpoint differs from its recorded digest. A tensor file
    is compared with its digest before the first tensor is read from the file.
    """

    specs: Mapping[str, TensorSpec]

    def __init__(
        self,
        folder: str | Path,
        *,
        key: str = "--checkpoint",
        read_once: bool = False,
        with_optimizer: bool = False,
        is_verified: bool = False,
    ) -> None:
        """Read and check the metadata.

        Args:
            folder: The torch_dist folder.
            key: Setting or option that names the folder, for error messages.
            read_once: Set to True if each tensor is read only once, and only by this process; see
                tensor_files.map_tensor.
            with_optimizer: Include the tensors of the optimizer and of a merge.
            is_verified: Set to True if all files have already been compared with their digests.
        """
        self.folder, self.key, self._read_once = Path(folder), key, read_once
        self._recorded = None if is_verified else self._read_record()
        self._verified: set[str] = set()
        self.metadata = read_metadata(self.folder, key=key)
        self._tensors = {
            name: entry for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata) and (with_optimizer or not name.startswith(_NOT_OF_MODEL))
        }  # fmt: skip
        self._sizes = {(name, chunk.offsets): chunk.sizes for name, entry in self._tensors.items() for chunk in entry.chunks}
        self._places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = self.metadata.storage_data
        self._check()
        self.specs = {name: TensorSpec(entry.properties.dtype, entry.size) for name, entry in self._tensors.items()}

    def _read_record(self) -> RecordedFiles | None:
        try:
            recorded = recorded_files(self.folder)
        except ValueError as error:
            raise ValueError(f"{self.key}={self.folder}: {error}; copy the whole checkpoint again") from error
        self._compare(recorded, recorded.non_tensor_files() if recorded else [])
        return recorded

    def _compare(self, recorded: RecordedFiles | None, names: list[str]) -> None:
        difference = recorded.find_difference(names) if recorded else ""
        if difference:
            raise ValueError(f"{self.key}={self.folder}: damaged: {difference}; copy the checkpoint again, or use another one")

    def _check(self) -> None:
        lengths: dict[str, int] = {}
        for name, entry in self._tensors.items():
            if not chunks_cover_tensor(entry.size, entry.chunks):
                raise self._damaged(name, "the chunks do not cover the tensor exactly once")
            for chunk in entry.chunks:
                place = self._places.get(metadata.MetadataIndex(name, chunk.offsets))
                if place is None:
                    raise self._damaged(name, f"the chunk at offset {tuple(chunk.offsets)} is not in any file")
                file = place.relative_path
                if file not in lengths:
                    path = self.folder / file
                    lengths[file] = path.stat().st_size if path.is_file() else -1
                if place.offset + place.length > lengths[file]:
                    raise self._damaged(name, f"{file} is missing" if lengths[file] < 0 else f"{file} is truncated")
                if chunk.sizes.numel() * entry.properties.dtype.itemsize > place.length:
                    raise self._damaged(name, f"a chunk of shape {tuple(chunk.sizes)} does not fit into {place.length} bytes of {file}")

    def _damaged(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self.key}={self.folder}: {name}: {why}; copy the whole checkpoint again")

    def locate(self, name: str) -> str:
        """Return the folder, for error messages."""
        return str(self.folder)

    def chunks(self, name: str) -> list[tuple[torch.Size, torch.Size]]:
        """Return the (offsets, sizes) of each chunk of a tensor."""
        return [(chunk.offsets, chunk.sizes) for chunk in self._tensors[name].chunks]

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor, on the CPU and in the stored dtype."""
        entry = self._tensors[name]
        if len(entry.chunks) == 1:
            return self.read_chunk(name, entry.chunks[0].offsets)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = self.read_chunk(name, chunk.offsets)
        return whole

    def read_chunk(self, name: str, offsets: torch.Size) -> torch.Tensor:
        """Return the chunk at the given offsets.

        Raises ValueError if the file does not contain the chunk.
        """
        place, spec = self._places[metadata.MetadataIndex(name, offsets)], self.specs[name]
        sizes, path = self._sizes[name, offsets], self.folder / place.relative_path
        if place.relative_path not in self._verified:
            self._compare(self._recorded, [place.relative_path])
            self._verified.add(place.relative_path)
        try:
            stored = pickle_tensors.load(path, start=place.offset, length=place.length)
        except ValueError as error:
            raise self._damaged(name, f"{place.relative_path} is corrupt ({error})") from error
        is_tensor = isinstance(stored, StoredTensor)
        if not is_tensor or (stored.shape, stored.dtype) != (sizes, spec.dtype) or not stored.is_contiguous:
            held = f"{stored.dtype} of shape {tuple(stored.shape)}" if is_tensor else f"a {type(stored).__name__}"
            raise self._damaged(name, f"{place.relative_path} contains {held}, expected {spec.dtype} of shape {tuple(sizes)}")
        return map_tensor(path, offset=stored.offset, dtype=stored.dtype, shape=stored.shape, read_once=self._read_once)


class TorchDistWriter:
    """Writer of a torch_dist folder: call `add` for every tensor, then call `finish`.

    Use the writer as a context manager. If the block ends before `finish`, files are closed, but
    the folder is not a valid checkpoint. Methods that write raise OSError if the disk is full.
    """

    def __init__(self, folder: Path, *, file_bytes: int = 4 << 30) -> None:
        """Write into `folder`; start a new file when the current one has reached `file_bytes`."""
        self.folder, self.file_bytes = folder, file_bytes
        self._metadata = metadata.Metadata({}, storage_data={}, storage_meta=metadata.StorageMeta(), version=filesystem.CURRENT_DCP_VERSION)
        self._file: FlushedFile | None = None
        self._num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, *runs: torch.Tensor, dim: int = 0, parts: int = 1) -> None:
        """Write a tensor, passed either in one piece or as consecutive slices of rows.

        The tensor is stored as `parts` equal chunks along `dim`, so that a rank can read its shard
        without reading the rest of the tensor. With dim=0, the last chunk is shorter if `parts`
        does not divide the number of rows.
        """
        assert key not in self._metadata.state_dict_metadata, f"{key} has already been written"
        shape = _stacked_shape(runs)
        assert parts == 1 or dim == 0 or shape[dim] % parts == 0, (
            f"{key}: cannot divide {tuple(shape)} into {parts} equal parts along dimension {dim}"
        )
        entry = metadata.TensorStorageMetadata(metadata.TensorProperties(runs[0].dtype), shape, [])
        offsets = [0] * len(shape)
        for chunk in _cut_runs(runs, dim, parts):
            sizes = _stacked_shape(chunk)
            entry.chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), sizes))
            self._append(metadata.MetadataIndex(key, offsets), torch.empty(sizes, dtype=runs[0].dtype), chunk)
            if parts > 1:
                offsets[dim] += sizes[dim]
        self._metadata.state_dict_metadata[key] = entry

    def add_empty_object(self, key: str) -> None:
        """Write an empty Megatron ShardedObject (the `_extra_state` of a linear layer).

        Megatron requires an entry with this key when it loads the checkpoint.
        """
        self._metadata.state_dict_metadata[key] = metadata.BytesStorageMetadata()
        self._append(metadata.MetadataIndex(key), [None])

    def _append(self, index: metadata.MetadataIndex, content: torch.Tensor | list[None], runs: Tensors = ()) -> None:
        """Append the output of torch.save for `content` to the current file.

        If `runs` is not empty, the data of the slices in `runs` is written, and the data of
        `content` is never accessed.
        """
        file = self._open_file()
        offset = file.tell()
        filled = _ChunkBuffer(file, cast("torch.Tensor", content), runs) if runs else None
        try:
            # torch.load does not check CRC32 (torch.serialization.set_crc32_options).
            with cast("Any", config).patch({"save.compute_crc32": False}):
                torch.save(content, cast("IO[bytes]", file if filled is None else filled))
        except RuntimeError as error:  # raised by torch's zip writer after an OSError of the file
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error
        assert filled is None or filled.is_done, f"torch.save did not write the numbers of {index.fqn} in one piece"
        self._metadata.storage_data[index] = filesystem._StorageInfo(file.path.name, offset, file.tell() - offset)
        if file.tell() >= self.file_bytes:
            self._close_file()

    def _open_file(self) -> FlushedFile:
        if self._file is None:
            self._file = FlushedFile(self.folder / f"__0_{self._num_files}{filesystem.DEFAULT_SUFFIX}")
            self._num_files += 1
        return self._file

    def _close_file(self) -> None:
        assert self._file is not None
        self._file.finish()
        self._file = None

    def finish(self) -> None:
        """Write the metadata files that complete the checkpoint."""
        if self._file is not None:
            self._close_file()
        torch.save({}, self.folder / "common.pt")
        (self.folder / FORMAT_FILE).write_text(json.dumps(FORMAT_METADATA))
        with (self.folder / METADATA).open("wb") as file:
            pickle.dump(self._metadata, file)


class _ChunkBuffer:
    """File object for torch.save; writes the data of `runs` instead of the data of `tensor`."""

    def __init__(self, file: FlushedFile, tensor: torch.Tensor, runs: Tensors) -> None:
        self.file, self.tensor, self.runs = file, tensor, runs
        self.flush = file.flush
        self.is_done = False

    def write(self, data: memoryview) -> int:
        if np.frombuffer(data, np.uint8).ctypes.data != self.tensor.data_ptr():
            return self.file.write(data)
        for run in self.runs:
            self.file.write_tensor(run)
        self.is_done = True
        return len(data)


def _stacked_shape(runs: Tensors) -> torch.Size:
    return runs[0].shape if len(runs) == 1 else torch.Size((sum(map(len, runs)), *runs[0].shape[1:]))


def _cut_runs(runs: Tensors, dim: int, parts: int) -> Iterator[Tensors]:
    """Split the tensor into `parts` equal chunks along `dim`; yield the slices in each chunk."""
    if parts == 1:
        yield runs
    elif dim:
        yield from zip(*(run.chunk(parts, dim) for run in runs), strict=True)
    else:
        yield from _cut_rows(runs, -(-sum(map(len, runs)) // parts))


def _cut_rows(runs: Tensors, num_rows: int) -> Iterator[Tensors]:
    chunk, num_remaining = [], num_rows
    for run in runs:
        left = run
        while len(left):
            chunk.append(left[:num_remaining])
            left, num_remaining = left[num_remaining:], num_remaining - len(chunk[-1])
            if not num_remaining:
                yield tuple(chunk)
                chunk, num_remaining = [], num_rows
    if chunk:
        yield tuple(chunk)
