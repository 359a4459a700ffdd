"""Tensors in files of torch.save that others wrote, found without reading their bytes and without running anything of theirs.

The pickle is read with weights_only=True, and even so every class it names beyond torch's own tensors is replaced by an inert record:
what a DTensor, its mesh and its placements become when torch changes them does not matter here, and no process group is needed. With
map_location="meta" torch notes where in the file the bytes lie (torch 2.13, serialization.py, `_checkpoint_offset`), and they are read
from there one tensor at a time: neither memory nor a memory map grows with the file.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import serialization


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """One tensor in a file: all of a model's tensor, or a rank's part of it."""

    path: Path
    offset: int
    """Where its bytes begin in the file."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    whole: torch.Size | None = None
    """The shape of the DTensor that this is a part of; None for a tensor that is whole."""
    placements: tuple[tuple[str, int | None], ...] = ()
    """How the DTensor that this is a part of lies on each dimension of the mesh: ("Shard", dimension) or ("Replicate", None)."""
    coordinate: tuple[int, ...] | None = None
    """Where the rank that saved a part of a DTensor stood in the mesh."""

    def read(self) -> torch.Tensor:
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(span, dtype=self.dtype)
        data = memoryview(flat.view(torch.uint8).numpy())
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(data) != len(data):
                raise ValueError(f"{self.path}: the file ends inside a tensor; copy it again")
        return flat.as_strided(self.shape, self.stride)


class _Record:
    """Stands for an object of a class that is not loaded: what it was made of, and nothing of what it did."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _DTensorRecord(torch.Tensor):
    """Stands for a DTensor: `_local_tensor` and `_spec` are in its __dict__ (torch 2.4 to 2.13, distributed/tensor, DTensor.__slots__)."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206 (signature fixed by torch)
        raise AssertionError(f"{func} of a record")


def load(path: Path) -> object:
    """What torch.save was given, with tensors on the meta device and records in place of all that is no tensor, number, text or container.

    Raises ValueError naming the file when it is truncated or no file of torch.save (1.6 or newer).
    """
    try:
        with _nothing_allowed():
            names = serialization.get_unsafe_globals_in_checkpoint(path)
            with serialization.safe_globals([(_stand_in(name), name) for name in names]):
                return torch.load(path, map_location="meta", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: is corrupt or no file that torch.save wrote ({str(error).splitlines()[0]}); copy it again") from error


@contextmanager
def _nothing_allowed() -> Iterator[None]:
    """Allow none of the classes that importing torch.distributed.tensor or transformers allowed for the whole process."""
    allowed = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        yield
    finally:
        serialization.add_safe_globals(allowed)


def _stand_in(name: str) -> type:
    return _DTensorRecord if name.endswith(".DTensor") else type(name.rsplit(".", 1)[-1], (_Record,), {})


def piece(tensor: torch.Tensor, path: Path) -> StoredTensor:
    """Where the bytes of a tensor out of `load(path)` lie."""
    dtensor: dict[str, object] = {}
    if isinstance(tensor, _DTensorRecord):
        spec = tensor._spec
        place = spec.mesh.__dict__.get("_coordinate_on_dim")
        dtensor = {
            "whole": tensor.shape,
            "placements": tuple((type(each).__name__, each.__dict__.get("dim")) for each in spec.placements),
            "coordinate": None if place is None else tuple(place),
        }
        tensor = tensor._local_tensor
    offset = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
    return StoredTensor(path, offset, tensor.dtype, tensor.shape, tensor.stride(), **dtensor)
