"""A checkpoint of any format seen as Hugging Face tensors, one at a time, after it was proven complete.

A source has `specs` (what it will give, under the released checkpoints' names, in the order it is best read in) and `read`. Building one
reads headers only and raises ValueError, naming the tensor on both sides, unless its tensors are exactly the model's: every one there
once, none left over, every shape the one that config.json asks for. The two exceptions are rules: rows of the vocabulary beyond
config.vocab_size are padding and are cut off, and a stored copy of tied embeddings must equal them to the last bit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.models.mapping import Row
from megatron_rl.weights.formats.torch_dist import McoreTensors
from megatron_rl.weights.stream import is_adapter

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True, frozen=True)
class Spec:
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Source(Protocol):
    """A checkpoint as Hugging Face tensors."""

    specs: Mapping[str, Spec]

    def read(self, name: str) -> torch.Tensor: ...


class Stored(Source, Protocol):
    """Tensors stored under Hugging Face's names, not yet held against a model."""

    folder: Path

    def where(self, name: str) -> str:
        """The file or files it stands in, for errors."""


class Shards(Protocol):
    """A Megatron checkpoint: parameters by their name in `Row.mcore` or `Row.key`, cut over tensor-parallel ranks."""

    folder: Path

    def names(self) -> set[str]: ...

    def specs(self, name: str) -> list[Spec]:
        """One for each tensor-parallel rank."""

    def where(self, name: str) -> str:
        """The file or files it stands in, for errors."""

    def read(self, name: str, rank: int) -> torch.Tensor: ...


class WholeShards:
    """A torch_dist checkpoint, where every tensor is stored whole, whatever layout wrote it; without the adapters of a LoRA run."""

    def __init__(self, folder: Path, *, once: bool = False) -> None:
        self.folder, self._tensors = folder, McoreTensors(folder, once=once)

    def names(self) -> set[str]:
        return {name for name in self._tensors.names() if not is_adapter(name)}

    def has_adapters(self) -> bool:
        return self.names() != self._tensors.names()

    def specs(self, name: str) -> list[Spec]:
        return [Spec(self._tensors.dtype(name), self._tensors.shape(name))]

    def where(self, name: str) -> str:
        return str(self.folder)

    def read(self, name: str, rank: int) -> torch.Tensor:
        assert rank == 0, f"{name} is whole"
        return self._tensors.read(name)


def check_names(found: Iterable[str], wanted: Iterable[str], *, source: str, target: str) -> None:
    """Raise ValueError naming what one side has and the other has not."""
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"{source}: does not hold exactly the tensors of {target}. "
            f"Missing: {_some(missing)}; unknown: {_some(unknown)}. Copy the whole checkpoint, and give the config.json that belongs to it"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + more


def fit(spec: Spec, name: str, shape: torch.Size, *, stored: str) -> Spec:
    """The spec without padding of the vocabulary. Raises ValueError naming both sides where the shape is not the model's."""
    found = spec.shape
    if name in (EMBEDDINGS, HEAD) and found[1:] == shape[1:] and found[0] > shape[0]:
        return Spec(spec.dtype, shape)
    if found != shape:
        raise ValueError(f"{stored}: gives {name} the shape {list(found)}, but by config.json it has {list(shape)}")
    return spec


def trim(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Without the padding of the vocabulary."""
    return tensor if tensor.shape == spec.shape else tensor[: spec.shape[0]]


class NamedSource:
    """Tensors stored under Hugging Face's names, held against the model."""

    def __init__(self, stored: Stored, shapes: Mapping[str, torch.Size]) -> None:
        self._stored = stored
        self._has_copy = HEAD in stored.specs and HEAD not in shapes
        names = stored.specs.keys() - ({HEAD} if self._has_copy else set())
        check_names(names, shapes, source=str(stored.folder), target="the model that config.json describes")
        self.specs = {name: fit(stored.specs[name], name, shape, stored=f"{stored.where(name)}: {name}") for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._stored.read(name)
        if name == EMBEDDINGS and self._has_copy and not torch.equal(tensor, self._stored.read(HEAD)):
            raise ValueError(f"{self._stored.where(HEAD)}: {HEAD} differs from {EMBEDDINGS}, but config.json ties them")
        return trim(tensor, self.specs[name])


class MegatronSource:
    """A Megatron checkpoint through the table. A row's tensors are made together, and each can be read once."""

    def __init__(self, shards: Shards, rows: list[Row], shapes: Mapping[str, torch.Size]) -> None:
        spellings = {spelling: row for row in rows for spelling in (row.mcore, row.key)}
        names: dict[str, str] = {}
        for name in sorted(shards.names()):
            key = spellings[name].key if name in spellings else name
            if key in names:
                raise ValueError(f"{shards.where(name)}: {name} and {names[key]} are the same tensor; remove one of them")
            names[key] = name
        copies = {row.key for row in rows if not row.exported}
        exported = {row.key: row for row in rows if row.exported}
        check_names(names.keys() - copies, exported, source=str(shards.folder), target="the model that config.json describes")
        check_names((name for row in exported.values() for name in row.hf), shapes, source="the table", target="transformers' model")
        self._shards, self._names = shards, names
        self._copy = next((key for key in copies if key in names), None)
        self._rows = {name: row for row in exported.values() for name in row.hf}
        self._ready: dict[str, torch.Tensor] = {}
        self.specs = {name: spec for row in exported.values() for name, spec in self._row_specs(row, shapes).items()}

    def _row_specs(self, row: Row, shapes: Mapping[str, torch.Size]) -> dict[str, Spec]:
        """What the row's shards give, computed on tensors without data."""
        name = self._names[row.key]
        specs, stored = self._shards.specs(name), f"{self._shards.where(name)}: {name}"
        if len(set(specs)) > 1:
            raise ValueError(f"{stored}: its tensor-parallel parts differ: {', '.join(map(str, specs))}")
        try:
            tensors = row.to_hf([torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs])
        except RuntimeError as error:
            parts = f"{len(specs)} part(s) of shape {list(specs[0].shape)}"
            raise ValueError(f"{stored}: {parts} cannot be {', '.join(row.hf)} of the sizes in config.json") from error
        made = {hf: Spec(tensor.dtype, tensor.shape) for hf, tensor in zip(row.hf, tensors, strict=True)}
        return {hf: fit(spec, hf, shapes[hf], stored=stored) for hf, spec in made.items()}

    def read(self, name: str) -> torch.Tensor:
        if name not in self._ready:
            row = self._rows[name]
            self._ready = dict(zip(row.hf, row.to_hf(self._read_shards(row)), strict=True))
        return trim(self._ready.pop(name), self.specs[name])

    def _read_shards(self, row: Row) -> list[torch.Tensor]:
        name = self._names[row.key]
        ranks = range(len(self._shards.specs(name)))
        if row.shard_dim is not None:
            shards = [self._shards.read(name, rank) for rank in ranks]
            if row.hf == (EMBEDDINGS,) and self._copy is not None:
                self._check_copy(shards)
            return shards
        first = self._shards.read(name, 0)
        for rank in ranks[1:]:
            if not torch.equal(first, self._shards.read(name, rank)):
                raise ValueError(
                    f"{self._shards.where(name)}: {name} is replicated, but tensor-parallel ranks 0 and {rank} hold different values"
                )
        return [first]

    def _check_copy(self, shards: list[torch.Tensor]) -> None:
        copy = self._names[self._copy]
        for rank, shard in enumerate(shards):
            if not torch.equal(shard, self._shards.read(copy, rank)):
                raise ValueError(f"{self._shards.where(copy)}: {copy} differs from the embeddings, but config.json ties them")
