"""Reader of the file `.metadata` in a torch_dist folder.

The file is a pickled torch Metadata object with the chunks of each tensor and their positions. In
torch 2.13, the file is read with pickle.load (distributed/checkpoint/filesystem.py, read_metadata).
This module reads the file with SafeUnpickler instead and accepts only the classes that torch 2.13
and megatron-core 0.16.1 write. The types of all used fields are checked.
"""

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_rl.io.bounded_files import read_bytes
from megatron_rl.weights.formats.safe_unpickler import UNPICKLING_ERRORS, InertRecord, SafeUnpickler, make_blank_maker
from megatron_rl.weights.formats.tensor_files import is_file_name

METADATA = ".metadata"
"""Name of the metadata file."""
MAX_BYTES = 256 << 20
"""Maximum size of the metadata file in bytes, enough for a million chunks."""
MAX_DIMENSIONS = 8
_RECORDS = (
    metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata,
    metadata.BytesStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo, filesystem._StoragePrefix,
    planner.SavePlan, planner.WriteItem, planner.TensorWriteData,
)  # fmt: skip
_FIELDS = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _RECORDS}


def make_shape(sizes: object = ()) -> torch.Size:
    """Return a torch.Size made from untrusted data.

    Raises ValueError for more than 2 * MAX_DIMENSIONS sizes, because a long list could exhaust
    memory.
    """
    if not isinstance(sizes, tuple | list) or len(sizes) > 2 * MAX_DIMENSIONS:
        raise ValueError(
            f"tensor sizes have an invalid number or type ({len(sizes) if isinstance(sizes, tuple | list) else type(sizes).__name__})"
        )
    return torch.Size(sizes)


_KNOWN = {
    **{(kind.__module__, kind.__name__): make_blank_maker(kind) for kind in _RECORDS},
    **{(kind.__module__, kind.__name__): kind for kind in (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)},
    ("torch", "Size"): make_shape,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): lambda *parts: InertRecord("PosixPath", parts),
}
"""Constructors of all objects in a `.metadata` file except dtypes, keyed by module and name (torch
2.13, megatron-core 0.16.1).
"""


def _find_known(module: str, name: str) -> object:
    if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
        return torch.__dict__[name]
    if (module, name) not in _KNOWN:
        raise ValueError(f"the pickle refers to {module}.{name}, which is not allowed")
    return _KNOWN[module, name]


def _fill(made: Any, state: Any) -> None:
    """Set the state of an unpickled object (opcode BUILD).

    Raises TypeError for an object of a class that does not belong to the format.
    """
    kind = type(made)
    if kind not in _FIELDS:
        raise TypeError(f"the pickle sets the state of an object of type {kind.__name__}")
    if kind is metadata.TensorProperties:
        made.__setstate__(state)
        return
    if kind is metadata.MetadataIndex and not (isinstance(state["fqn"], str) and isinstance(state.get("offset"), torch.Size | None)):
        raise TypeError("a chunk index does not consist of a name and an offset")
    made.__dict__.update({name: value for name, value in state.items() if name in _FIELDS[kind]})


def read_metadata(folder: Path, *, key: str) -> metadata.Metadata:
    """Read and check the metadata of a torch_dist folder.

    Raises ValueError if the metadata is missing or was not written by torch. `key` is the setting
    or option that names the folder, used in error messages.
    """
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{key}={folder}: {METADATA} is missing; use a Megatron torch_dist checkpoint folder")
    try:
        content = read_bytes(path, at_most=MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{key}={folder}: {METADATA} {error}; copy it again") from error
    try:
        found = SafeUnpickler(content, find_maker=_find_known, set_state=_fill, key_types=(metadata.MetadataIndex,)).load()
        _check(found)
    except UNPICKLING_ERRORS as error:
        raise ValueError(f"{key}={folder}: {METADATA} is damaged ({str(error)[:200]}); copy it again") from error
    return found


def _check(found: object) -> None:
    """Raise TypeError or ValueError for an invalid field or a file name outside the folder."""
    if not isinstance(found, metadata.Metadata):
        raise TypeError(f"the pickle contains an object of type {type(found).__name__} instead of Metadata")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata):
            raise TypeError(f"{str(name)[:80]} has an entry of unsupported type {type(entry).__name__}")
        if isinstance(entry, metadata.TensorStorageMetadata):
            _check_tensor(name, entry)
    for index, place in found.storage_data.items():
        if not isinstance(index, metadata.MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise TypeError(f"a storage entry has the unsupported type {type(place).__name__}")
        _check_place(place)


def _check_tensor(name: str, entry: metadata.TensorStorageMetadata) -> None:
    if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
        raise TypeError(f"{name} has an invalid dtype {entry.properties.dtype} or size {entry.size}")
    boxes = [*((chunk.offsets, chunk.sizes) for chunk in entry.chunks), ((0,) * len(entry.size), entry.size)]
    for offsets, sizes in boxes:
        if not isinstance(sizes, torch.Size) or len(offsets) != len(entry.size) or len(sizes) != len(entry.size):
            raise TypeError(f"{name} has a chunk with a different number of dimensions than the tensor")
        if len(sizes) > MAX_DIMENSIONS or min((*offsets, *sizes), default=0) < 0:
            raise ValueError(f"{name} has a chunk with invalid sizes {tuple(sizes)} or offsets {tuple(offsets)}")


def _check_place(place: filesystem._StorageInfo) -> None:
    name, offset, length = place.relative_path, place.offset, place.length
    if not is_file_name(name):
        raise ValueError(f"{str(name)[:80]!r} is not a file name")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or place.transform_descriptors:
        raise ValueError(f"a chunk in {name} has an invalid offset {offset}, length {length} or transform {place.transform_descriptors}")


def chunks_cover_tensor(whole: torch.Size, chunks: list[metadata.ChunkStorageMetadata]) -> bool:
    """Return True if the chunks cover the tensor exactly once, without gap or overlap.

    Each corner of a box has a sign (+1 or -1) that alternates along every dimension. The chunks
    cover the tensor exactly once if, at every point, the signs of the chunks' corners sum to the
    sign of the tensor's corner (0 if the point is not a corner of the tensor).
    """
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [((0,) * len(whole), whole, -1), *((chunk.offsets, chunk.sizes, 1) for chunk in chunks)]
    for offsets, sizes, sign in boxes:
        for ends in itertools.product((0, 1), repeat=len(whole)):
            corner = tuple(start + end * size for start, size, end in zip(offsets, sizes, ends, strict=True))
            corners[corner] += sign * math.prod(1 - 2 * end for end in ends)
    return not any(corners.values())
