"""Locates tensors in untrusted torch.save files without executing code from them.

A torch.save file is a zip archive with uncompressed members. The member `data.pkl` is a pickle of
the saved object, and each storage is a member `data/KEY`. Loading untrusted files with torch.load
is not safe, even with weights_only: torch.load inflates compressed members, trusts strides, and
allocates byte arrays of any length.

Objects in the pickle other than tensors become inert records (safe_unpickler.py), so DTensors can
be read without their classes, a mesh or a process group. `load` records only the positions of
tensor data. The data is read one tensor at a time, so that neither the memory usage nor the number
of memory maps grows with the size of the file.
"""

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from megatron_rl.io.bounded_files import open_regular
from megatron_rl.weights.formats.safe_unpickler import UNPICKLING_ERRORS, InertRecord, SafeUnpickler, make_record_maker
from megatron_rl.weights.formats.torch_dist_metadata import make_shape

MAX_PICKLE_BYTES = 16 << 20
"""Maximum size of data.pkl in bytes. A DTensor state dict needs 1.5 KB per tensor."""
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """Position of an unsharded tensor, or of one rank's part of a DTensor, in a file."""

    path: Path
    offset: int
    """Position of the tensor's data in the file, in bytes."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    full_shape: torch.Size | None = None
    """Shape of the DTensor that this part belongs to; None for an unsharded tensor."""
    placements: tuple[tuple[str, int | None], ...] = ()
    """Placement of the DTensor for each dimension of the mesh: ("Shard", tensor dimension) or
    ("Replicate", None).
    """
    coordinate: tuple[int, ...] | None = None
    """Mesh coordinate of the rank that saved this part of a DTensor."""

    @property
    def is_contiguous(self) -> bool:
        """Return True if the data is stored in row-major order without gaps."""
        steps = [math.prod(self.shape[number + 1 :]) for number in range(len(self.shape))]
        return all(size == 1 or step == own for size, step, own in zip(self.shape, steps, self.stride, strict=True)) or 0 in self.shape

    def read(self) -> torch.Tensor:
        """Read the tensor's data from the file.

        Raises ValueError if the file ends inside the tensor.
        """
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.empty(_num_spanned(self.shape, self.stride), dtype=self.dtype)
        data = flat.view(torch.uint8).numpy().data
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(data) != len(data):
                raise ValueError(f"{self.path}: the file ends inside a tensor; copy it again")
        return flat.as_strided(self.shape, self.stride)


@dataclass(slots=True, frozen=True)
class _Storage:
    """Archive member with the data of one storage; tensors are views of storages."""

    dtype: torch.dtype
    offset: int
    size: int
    """Number of elements in the storage."""


def load(path: Path, *, start: int = 0, length: int | None = None) -> object:
    """Return the object that torch.save wrote, with a StoredTensor in place of each tensor.

    Objects other than tensors, numbers, strings and containers become inert records. `start` and
    `length` select the part of the file that torch.save wrote. Raises ValueError if that part is
    truncated or was not written by torch.save (1.6 or newer).
    """
    try:
        with open_regular(path) as file:
            length = file.seek(0, 2) - start if length is None else length
            return _Archive(path, cast("io.BufferedReader", file), start, length).load()
    except (*UNPICKLING_ERRORS, zipfile.BadZipFile, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{path}: is corrupt or was not written by torch.save ({why}); copy it again") from error


class _FileSlice(io.RawIOBase):
    """File object that contains only a part of another file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        num_read = self._file.readinto(room)
        self._at += num_read
        return num_read


class _Archive:
    def __init__(self, path: Path, file: io.BufferedReader, start: int, length: int) -> None:
        self._path, self._start, self._length = path, start, length
        self._file = _FileSlice(file, start, length)
        self._zip = zipfile.ZipFile(self._file)
        self._members = {}
        for member in self._zip.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise ValueError(f"{member.filename} is compressed, which torch.save never does")
            self._members[member.filename.partition("/")[2]] = member

    def load(self) -> object:
        if "byteorder" in self._members and self._content("byteorder", 16) != b"little":
            raise ValueError("its tensors are big-endian")
        content = self._content("data.pkl", MAX_PICKLE_BYTES)
        return SafeUnpickler(content, find_maker=self._known, set_state=_fill, load_stored=self._storage).load()

    def _content(self, name: str, at_most: int) -> bytes:
        size = self._members[name].file_size
        if size > at_most:
            raise ValueError(f"{name} has {size} bytes, more than the maximum of {at_most}")
        self._file.seek(self._place(name))
        return self._file.read(size)

    def _place(self, name: str) -> int:
        """Return the position of an archive member's data, computed from the member's local header.

        See PKWARE APPNOTE 6.3.10, section 4.3.7. Raises ValueError if the data extends beyond the
        archive.
        """
        member = self._members[name]
        self._file.seek(member.header_offset)
        header = self._file.read(30)
        if len(header) < 30 or header[:4] != b"PK\3\4":
            raise ValueError(f"{name} has no header")
        place = member.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if place + member.file_size > self._length:
            raise ValueError(f"{name} is truncated")
        return place

    def _known(self, module: str, name: str) -> object:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        known = {
            ("collections", "OrderedDict"): _empty, ("torch", "Size"): make_shape,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor, ("torch._utils", "_rebuild_parameter"): _first_argument,
            ("torch._utils", "_rebuild_parameter_with_state"): _first_argument, ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_typed,
        }  # fmt: skip
        return known.get((module, name), make_record_maker(module, name))

    def _storage(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(size) is not int:
            raise TypeError(f"a storage entry has a dtype of the invalid type {type(dtype).__name__}")
        name = f"data/{key}"
        if not 0 <= size * dtype.itemsize <= self._members[name].file_size:
            raise ValueError(f"{name} has {self._members[name].file_size} bytes, too few for {size} elements of {dtype}")
        return _Storage(dtype, self._start + self._place(name), size)

    def _tensor(self, storage: _Storage, first: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> StoredTensor:
        sizes, steps = make_shape(size), make_shape(stride)
        if len(sizes) != len(steps) or min((first, *sizes, *steps)) < 0 or first + _num_spanned(sizes, steps) > storage.size:
            raise ValueError(
                f"a tensor of shape {tuple(sizes)} with strides {tuple(steps)} extends beyond its storage of {storage.size} elements"
            )
        return StoredTensor(self._path, storage.offset + first * storage.dtype.itemsize, storage.dtype, sizes, tuple(steps))


def _num_spanned(sizes: torch.Size, steps: tuple[int, ...]) -> int:
    """Return the number of storage elements from the tensor's first element to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if math.prod(sizes) else 0


def _empty() -> dict:
    """Return an empty dict in place of an OrderedDict; opcodes of the pickle then add the items.

    The function accepts no arguments. Otherwise, a pickle could pass the same list of items again
    and again, and every three bytes of the pickle could create another copy of the items.
    """
    return {}


def _first_argument(tensor: object, *_: object) -> object:
    return tensor


def _rebuild_typed(function: Callable[..., object], kind: Callable[[], Any], arguments: tuple, state: object) -> object:
    """Rebuild a tensor that has attributes or is an instance of a tensor subclass.

    For a DTensor, returns the local part saved by the rank that wrote the file.
    """
    made = function(*arguments)
    if not isinstance(made, InertRecord) or kind().name != "DTensor":
        return made
    slots = next(part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict) and "_spec" in part)
    spec = slots["_spec"].state
    place = spec["mesh"].state.get("_coordinate_on_dim")
    return replace(
        slots["_local_tensor"],
        full_shape=make_shape(arguments[2]),
        placements=tuple((each.name, (each.state or {}).get("dim")) for each in spec["placements"]),
        coordinate=None if place is None else tuple(place),
    )


def _fill(made: object, state: object) -> None:
    if isinstance(made, InertRecord):
        made.set_state(state)
