"""Writes Megatron's `torch_dist` format tensor by tensor, so that memory holds one of them however large the model.

torch 2.13's own FileSystemWriter keeps every tensor of a file until the file ends (checkpoint/filesystem.py, _write_files_from_queue),
and `dist_checkpointing.save` has all of them to begin with; here each is a torch.save at the file's end, which is what they write too.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from megatron_rl.models.mapping import Tensors
from megatron_rl.weights.formats.torch_dist import METADATA
from megatron_rl.weights.formats.writing import SteadyFile

BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
"""The content of metadata.json (megatron-core 0.16.1, dist_checkpointing/core.py, CheckpointingConfig)."""


class TorchDistWriter:
    """Add every tensor, then `finish`. A context: leaving it early closes the files, and the folder is no checkpoint.

    Raises OSError (disk full), from whichever call notices.
    """

    def __init__(self, folder: Path, *, file_bytes: int = 4 << 30) -> None:
        """A new file begins when one has reached file_bytes."""
        self.folder, self.file_bytes = folder, file_bytes
        self._metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
        self._file: SteadyFile | None = None
        self._num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, *runs: torch.Tensor, dim: int = 0, parts: int = 1) -> None:
        """Write a tensor, given whole or as the runs of rows that make it up, cut along `dim` into `parts` equal chunks: what a rank
        reads without the rest."""
        assert key not in self._metadata.state_dict_metadata, f"{key} was written already"
        shape = _stacked(runs)
        assert parts == 1 or shape[dim] % parts == 0, f"{key} {tuple(shape)} in {parts} along {dim}"
        entry = TensorStorageMetadata(TensorProperties(runs[0].dtype), shape, [])
        offsets = [0] * len(shape)
        for chunk in _cut(runs, dim, parts):
            sizes = _stacked(chunk)
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
            self._append(MetadataIndex(key, offsets), torch.empty(sizes, dtype=runs[0].dtype), chunk)
            if parts > 1:
                offsets[dim] += sizes[dim]
        self._metadata.state_dict_metadata[key] = entry

    def add_empty_object(self, key: str) -> None:
        """A Megatron ShardedObject without content (the `_extra_state` of a linear layer): Megatron insists on finding one."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [None])

    def _append(self, index: MetadataIndex, content: torch.Tensor | list[None], runs: Tensors = ()) -> None:
        """torch.save of the content; the numbers of a tensor are those of the runs, and its own are never touched."""
        file = self._open_file()
        offset = file.tell()
        filled = _Filled(file, content, runs) if runs else None
        try:
            with config.patch({"save.compute_crc32": False}):  # torch.load does not check it (torch.serialization.set_crc32_options)
                torch.save(content, file if filled is None else filled)
        except RuntimeError as error:  # torch's zip writer raises its own where the file could not be written
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error
        assert filled is None or filled.is_done, f"torch.save did not write the numbers of {index.fqn} in one piece"
        self._metadata.storage_data[index] = _StorageInfo(file.path.name, offset, file.tell() - offset)
        if file.tell() >= self.file_bytes:
            self._close_file()

    def _open_file(self) -> SteadyFile:
        if self._file is None:
            self._file = SteadyFile(self.folder / f"__0_{self._num_files}{DEFAULT_SUFFIX}")
            self._num_files += 1
        return self._file

    def _close_file(self) -> None:
        self._file.finish()
        self._file = None

    def finish(self) -> None:
        """Write what makes the files a checkpoint."""
        if self._file is not None:
            self._close_file()
        torch.save({}, self.folder / "common.pt")
        (self.folder / "metadata.json").write_text(json.dumps(BACKENDS))
        with (self.folder / METADATA).open("wb") as file:
            pickle.dump(self._metadata, file)


class _Filled:
    """The file for one torch.save: where torch writes the numbers of `tensor`, those of the runs are written."""

    def __init__(self, file: SteadyFile, tensor: torch.Tensor, runs: Tensors) -> None:
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


def _stacked(runs: Tensors) -> torch.Size:
    """The shape of the tensor that they make up."""
    return runs[0].shape if len(runs) == 1 else torch.Size((sum(map(len, runs)), *runs[0].shape[1:]))


def _cut(runs: Tensors, dim: int, parts: int) -> Iterator[Tensors]:
    """The runs of each of `parts` equal chunks along `dim`."""
    if parts == 1:
        yield runs
    elif dim:
        yield from zip(*(run.chunk(parts, dim) for run in runs), strict=True)
    else:
        yield from _cut_rows(runs, sum(map(len, runs)) // parts)


def _cut_rows(runs: Tensors, num_rows: int) -> Iterator[Tensors]:
    chunk, room = [], num_rows
    for run in runs:
        left = run
        while len(left):
            chunk.append(left[:room])
            left, room = left[room:], room - len(chunk[-1])
            if not room:
                yield tuple(chunk)
                chunk, room = [], num_rows
