"""Megatron's distributed checkpoint format `torch_dist`, one tensor at a time and without process groups.

A folder holds `*.distcp` files (every chunk of a tensor is a torch.save of its own at an offset), `.metadata` (a pickled torch
Metadata: which chunks make a tensor, and where they lie), `common.pt` and `metadata.json` (megatron-core 0.16.1, dist_checkpointing).
"""

import itertools
import math
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_rl.weights.formats.reading import mapped

METADATA = ".metadata"
KNOWN = {
    **{(kind.__module__, kind.__name__): kind for kind in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata,
        metadata.BytesStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo, filesystem._StoragePrefix,
        planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData,
    )},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
}  # fmt: skip
"""All that a `.metadata` of torch 2.13 or megatron-core 0.16.1 names, besides dtypes."""


class _Unpickler(pickle.Unpickler):
    """Pickles come from strangers: nothing but the records of the format is ever called."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")
        return KNOWN[module, name]


def read_metadata(folder: Path, *, key: str) -> metadata.Metadata:
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{key}={folder}: no {METADATA} in it; give a Megatron torch_dist checkpoint folder")
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key}={folder}: {METADATA} is damaged ({error}); copy it again") from error
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"{key}={folder}: {METADATA} is damaged (it holds a {type(found).__name__}, no Metadata); copy it again")
    return found


class McoreTensors:
    """The model's tensors in a torch_dist folder by key, each read on its own; the optimizer's are left out.

    Raises ValueError where chunks do not make up their tensor or lie beyond the end of their file.
    """

    def __init__(self, folder: str | Path, *, key: str = "--checkpoint", once: bool = False) -> None:
        """`once`: each tensor is read once, by this process alone (reading.mapped)."""
        self.folder, self.option, self._once = Path(folder), key, once
        stored = read_metadata(self.folder, key=key)
        self._tensors = {
            name: entry for name, entry in stored.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata) and not name.startswith("optimizer.")
        }  # fmt: skip
        self._places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = stored.storage_data
        self._check()

    def _check(self) -> None:
        lengths: dict[str, int] = {}
        for name, entry in self._tensors.items():
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size) or _overlap(entry.chunks):
                raise self._damaged(name, "its chunks do not cover it once")
            for chunk in entry.chunks:
                place = self._places.get(metadata.MetadataIndex(name, chunk.offsets))
                if place is None:
                    raise self._damaged(name, f"its chunk at {tuple(chunk.offsets)} lies nowhere")
                file = place.relative_path
                if file not in lengths:
                    path = self.folder / file
                    lengths[file] = path.stat().st_size if path.is_file() else -1
                if place.offset + place.length > lengths[file]:
                    raise self._damaged(name, f"{file} is missing" if lengths[file] < 0 else f"{file} is cut off")

    def _damaged(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self.option}={self.folder}: {name}: {why}; copy the whole checkpoint again")

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    def chunks(self, name: str) -> list[tuple[torch.Size, torch.Size]]:
        """(offsets, sizes) of each chunk."""
        return [(chunk.offsets, chunk.sizes) for chunk in self._tensors[name].chunks]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on CPU in the stored dtype."""
        entry = self._tensors[name]
        if len(entry.chunks) == 1:
            return self._read_chunk(name, entry.chunks[0])
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = self._read_chunk(name, chunk)
        return whole

    def _read_chunk(self, name: str, chunk: metadata.ChunkStorageMetadata) -> torch.Tensor:
        place = self._places[metadata.MetadataIndex(name, chunk.offsets)]
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as file:  # on the meta device torch notes where the bytes lie (torch 2.13, serialization.py)
                tensor = torch.load(_create_file_view(file, place.offset, place.length), map_location="meta", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise self._damaged(name, f"{place.relative_path} is corrupt ({str(error).splitlines()[0]})") from error
        if tensor.shape != chunk.sizes or tensor.dtype != self.dtype(name) or not tensor.is_contiguous():
            raise self._damaged(name, f"{place.relative_path} holds {tensor.dtype} {tuple(tensor.shape)}, not {tuple(chunk.sizes)}")
        offset = place.offset + tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        return mapped(path, offset=offset, dtype=tensor.dtype, shape=tensor.shape, once=self._once)


def _overlap(chunks: list[metadata.ChunkStorageMetadata]) -> bool:
    return any(
        all(a0 < b0 + b and b0 < a0 + a for a0, a, b0, b in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
        for one, other in itertools.combinations(chunks, 2)
    )
