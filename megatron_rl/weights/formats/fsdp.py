"""Reader of FSDP shards in verl's format (`model_world_size_N_rank_R.pt`).

Each file contains a state dict of DTensors, keyed by Hugging Face names. A DTensor is either
replicated on all ranks, or sharded (Shard) along one tensor dimension over the last dimension of
the mesh. In a (ddp, fsdp) mesh, a sharded DTensor is replicated over the first mesh dimension.
Ranks are numbered row by row over the mesh, as in init_device_mesh. In rank order, the parts of the
first replica are therefore followed by the parts of the second replica, and so on.

Before any tensor is read, the reader checks that the sizes of the parts add up to the size of the
tensor, and that all replicas have the same shapes. Only the first replica is read. A tensor that is
not a DTensor is unsharded. Unsharded tensors occur if the world size is 1, and for parameters that
FSDP does not manage.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.models.name_mapping import canonical_name
from megatron_rl.weights.formats import pickle_tensors
from megatron_rl.weights.formats.checkpoint_source import TensorSpec, check_names
from megatron_rl.weights.formats.pickle_tensors import StoredTensor

FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class FsdpTensors:
    """Full tensors assembled from FSDP shards, under Hugging Face names.

    Raises ValueError for a missing rank, tensor or part, and for unsupported layouts.
    """

    specs: Mapping[str, TensorSpec]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = [_pieces(path) for path in _rank_files(folder)]
        for rank, pieces in enumerate(ranks[1:], start=1):
            check_names(pieces, ranks[0], source=f"{folder}: rank {rank}", target="rank 0")
        lora = sorted(name for name in ranks[0] if "lora_" in name)
        if lora:
            raise ValueError(
                f"{folder}: contains a LoRA adapter ({lora[0]}); use the base model's checkpoint, and the exported adapter as --lora"
            )
        self._parts = {name: _select_parts(name, [pieces[name] for pieces in ranks]) for name in ranks[0]}
        self.specs = {name: TensorSpec(parts[0].dtype, _full_shape(parts[0])) for name, parts in self._parts.items()}

    def locate(self, name: str) -> str:
        """Return the path of the file that contains the first part of a tensor."""
        return str(self._parts[name][0].path)

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor."""
        parts, spec = self._parts[name], self.specs[name]
        if len(parts) == 1:
            return parts[0].read()
        dimension = _shard_dimension(parts[0])
        assert dimension is not None
        tensor, start = torch.empty(spec.shape, dtype=spec.dtype), 0
        for part in parts:
            tensor.narrow(dimension, start, part.shape[dimension]).copy_(part.read())
            start += part.shape[dimension]
        return tensor


def rank_paths(folder: Path) -> list[Path]:
    """Return the FSDP shard files in a folder, sorted by name.

    The order by name differs from the rank order: for example, rank_10 sorts before rank_2.
    """
    return sorted(path for path in folder.iterdir() if FILE.fullmatch(path.name))


def _rank_files(folder: Path) -> list[Path]:
    matches = ((FILE.fullmatch(path.name), path) for path in rank_paths(folder))
    numbers = {tuple(map(int, match.groups())): path for match, path in matches if match is not None}
    sizes = {size for size, _ in numbers}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder}: contains shards for world sizes {', '.join(map(str, sorted(sizes)))}; keep the shards of one world size"
        )
    size = sizes.pop()
    absent = [f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size) if (size, rank) not in numbers]
    if absent:
        raise ValueError(
            f"{folder}: missing files: {', '.join(absent[:4])} ({len(absent)} of {size} ranks have no file); copy the whole checkpoint"
        )
    return [numbers[size, rank] for rank in range(size)]


def _pieces(path: Path) -> dict[str, StoredTensor]:
    state = pickle_tensors.load(path)
    if not isinstance(state, dict):
        raise ValueError(f"{path}: contains a {type(state).__name__} instead of a state dict")
    pieces: dict[str, StoredTensor] = {}
    for name, value in state.items():
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{path}: {name} is not a tensor but a {type(value).__name__}; save a sharded state dict of DTensors")
        if canonical_name(name) in pieces:
            raise ValueError(f"{path}: {name} is stored under two different names")
        pieces[canonical_name(name)] = value
    return pieces


def _shard_dimension(piece: StoredTensor) -> int | None:
    """Return the dimension along which a tensor is sharded; None for an unsharded tensor."""
    kinds = [kind for kind, _ in piece.placements]
    if kinds in ([], ["Replicate"], ["Replicate", "Replicate"]):
        return None
    if kinds in (["Shard"], ["Replicate", "Shard"]):
        return piece.placements[-1][1]
    raise ValueError(
        f"{piece.path}: placements {kinds} are not supported; "
        "tensors must be sharded over the last dimension of an (fsdp) or (ddp, fsdp) mesh"
    )


def _select_parts(name: str, pieces: list[StoredTensor]) -> list[StoredTensor]:
    """Return the parts of the first replica of a tensor, in order.

    Raises ValueError if the ranks store different tensors under this name, or if the parts do not
    form one or more complete replicas of the tensor.
    """
    first = pieces[0]
    for piece in pieces:
        if (piece.dtype, piece.full_shape, piece.placements) != (first.dtype, first.full_shape, first.placements):
            raise ValueError(
                f"{first.path.parent}: {name} has a different dtype, shape or placement in {first.path.name} than in {piece.path.name}"
            )
    whole, dimension = _full_shape(first), _shard_dimension(first)
    cut = [whole] if dimension is None else _shard_shapes(whole, dimension, [piece.shape[dimension] for piece in pieces])
    shapes = [piece.shape for piece in pieces]
    if not cut or shapes != cut * (len(pieces) // len(cut)):
        held = [list(shape) for shape in shapes]
        raise ValueError(
            f"{first.path.parent}: {name} has the shape {list(whole)}, but the parts on the ranks have the shapes {held}; "
            "copy the shards of one checkpoint"
        )
    for rank, piece in enumerate(pieces):
        if dimension is not None and piece.coordinate is not None and piece.coordinate[-1] != rank % len(cut):
            raise ValueError(
                f"{piece.path}: was saved by a different rank (mesh coordinate {list(piece.coordinate)}); copy the files again"
            )
    return pieces[: len(cut)]


def _shard_shapes(whole: torch.Size, dimension: int, sizes: list[int]) -> list[torch.Size]:
    """Return the shapes of the parts into which torch shards a tensor.

    `sizes` are the sizes of the stored parts along `dimension`; they determine the number of parts.
    The last parts may be smaller or empty. Returns [] if the stored parts cannot form one or more
    complete replicas of the tensor.
    """
    replicas = sum(sizes) // whole[dimension]
    if replicas * whole[dimension] != sum(sizes) or replicas == 0 or len(sizes) % replicas:
        return []
    num_parts = len(sizes) // replicas
    chunks = [chunk.shape for chunk in torch.empty(whole, device="meta").chunk(num_parts, dimension)]
    empty = torch.Size(0 if index == dimension else size for index, size in enumerate(whole))
    return chunks + [empty] * (num_parts - len(chunks))


def _full_shape(piece: StoredTensor) -> torch.Size:
    return piece.shape if piece.full_shape is None else piece.full_shape
