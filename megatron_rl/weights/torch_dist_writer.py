"""Writes Megatron's `torch_dist` format tensor by tensor, so that memory holds one of them however large the model.

torch 2.13's own FileSystemWriter keeps every tensor of a file until the file ends (checkpoint/filesystem.py, _write_files_from_queue),
and `dist_checkpointing.save` has all of them to begin with; here each is a torch.save at the file's end, which is what they write too.
"""

import json
import os
import pickle
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

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

from megatron_rl.weights.torch_dist import METADATA

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
        self._file: BinaryIO | None = None
        self._num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.raw.close()  # not the buffered file, which would try to write what did not fit

    def add(self, key: str, tensor: torch.Tensor, *, dim: int = 0, parts: int = 1) -> None:
        """Write a whole tensor under its key, cut along `dim` into `parts` equal chunks: what a rank reads without the rest."""
        assert key not in self._metadata.state_dict_metadata, f"{key} was written already"
        assert parts == 1 or tensor.shape[dim] % parts == 0, f"{key} {tuple(tensor.shape)} in {parts} along {dim}"
        entry = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, [])
        offsets = [0] * tensor.dim()
        for part in tensor.chunk(parts, dim) if parts > 1 else [tensor]:
            is_view = part.untyped_storage().nbytes() != part.nbytes  # it would be stored with all of its tensor behind it
            whole = part.clone(memory_format=torch.contiguous_format) if is_view else part.contiguous()
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            self._append(MetadataIndex(key, offsets), whole)
            if parts > 1:
                offsets[dim] += part.shape[dim]
        self._metadata.state_dict_metadata[key] = entry

    def add_empty_object(self, key: str) -> None:
        """A Megatron ShardedObject without content (the `_extra_state` of a linear layer): Megatron insists on finding one."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [None])

    def _append(self, index: MetadataIndex, content: torch.Tensor | list[None]) -> None:
        file = self._open_file()
        offset = file.tell()
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's zip writer raises its own where the file could not be written
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error
        self._metadata.storage_data[index] = _StorageInfo(Path(file.name).name, offset, file.tell() - offset)
        file.flush()
        # Linux begins to write out the pages it is told nobody needs, and does not wait for them (mm/fadvise.c).
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file.tell() >= self.file_bytes:
            self._close_file()

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            self._file = (self.folder / f"__0_{self._num_files}{DEFAULT_SUFFIX}").open("wb")
            self._num_files += 1
        return self._file

    def _close_file(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def finish(self) -> None:
        """Write what makes the files a checkpoint."""
        if self._file is not None:
            self._close_file()
        torch.save({}, self.folder / "common.pt")
        (self.folder / "metadata.json").write_text(json.dumps(BACKENDS))
        with (self.folder / METADATA).open("wb") as file:
            pickle.dump(self._metadata, file)
