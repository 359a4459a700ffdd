"""Reads checkpoints of any format as Hugging Face tensors and checks that they are complete.

A source provides the attribute `specs` and the method `read`. `specs` maps each tensor name, as
used in released checkpoints, to the tensor's dtype and shape. The tensors are listed in the order
in which they should be read. Constructing a source reads headers only. The constructor raises
ValueError unless the checkpoint contains exactly the tensors of the model, each of them once and
with the shape required by config.json. Three deviations are accepted:
- Vocabulary rows beyond config.vocab_size are treated as padding and cut off.
- The last two dimensions of the experts' tensors may be swapped, as transformers 5.19 saves them.
- A stored copy of tied embeddings must be bitwise equal to the embeddings.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.models.name_mapping import ParamMapping, is_expert_tensor, swap_last_dims
from megatron_rl.models.vocabulary import check_vocabulary

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        """Return the dtype and the shape as text, for example `bfloat16 [8, 4]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|attn\.masked_bias|attn\.bias)")
"""Pattern for the names of buffers stored in older checkpoints. These tensors are not read, because
they are computed when a model is built; transformers also ignores them.
"""
MTP = "mtp."
"""Prefix of the tensors for multi-token prediction in checkpoints of Qwen3.5. transformers 5.19
also ignores them.
"""


class TensorSource(Protocol):
    """Checkpoint of any format, read as Hugging Face tensors."""

    specs: Mapping[str, TensorSpec]
    skipped: Sequence[str]
    """Names of stored tensors that are ignored, because they do not belong to the model; see
    BUFFERS and MTP.
    """

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with the given Hugging Face name."""
        ...


def iterate_tensors(source: TensorSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and content of every tensor, one at a time."""
    for name in source.specs:
        yield name, source.read(name)


class StoredTensors(Protocol):
    """Tensors of a folder under their stored names, before they are compared with a model.

    The stored names are either Hugging Face names or Megatron names.
    """

    folder: Path
    specs: Mapping[str, TensorSpec]

    def locate(self, name: str) -> str:
        """Return the location of a tensor (paths of files or of a folder) for error messages."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with the given stored name."""
        ...


def describe_skipped(source: TensorSource) -> str:
    """Return one line that lists ignored tensors, or '' if no tensor was ignored."""
    kinds = {"are recomputed": [], "belong to multi-token prediction": []}
    for name in source.skipped:
        kinds["belong to multi-token prediction" if name.startswith(MTP) else "are recomputed"].append(name)
    found = [f"{len(names)} stored tensors that {kind} ({_first_names(names)})" for kind, names in kinds.items() if names]
    return f"skipped: {', '.join(found)}" if found else ""


def check_names(found: Iterable[str], wanted: Iterable[str], *, source: str, target: str) -> None:
    """Raise ValueError unless `found` and `wanted` contain the same names.

    The message lists the missing and the unknown names.
    """
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        heads = ", and remove tensors that are not part of the model (such as a value head) from its files" if unknown else ""
        raise ValueError(
            f"{source}: does not contain exactly the tensors of {target}. "
            f"Missing: {_first_names(missing)}; unknown: {_first_names(unknown)}. "
            f"Copy the whole checkpoint, and use the config.json that belongs to it{heads}"
        )


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + more


def check_shape(spec: TensorSpec, name: str, shape: torch.Size, *, stored: str) -> TensorSpec:
    """Return the tensor's spec without vocabulary padding.

    Raises ValueError if the stored shape differs from the model's `shape`. The error message starts
    with `stored`, which consists of the file name and the tensor's stored name.
    """
    found = spec.shape
    if name in (EMBEDDINGS, HEAD) and found[1:] == shape[1:] and found[0] > shape[0]:
        return TensorSpec(spec.dtype, shape)
    if found != shape:
        raise ValueError(f"{stored}: {name} has the shape {list(found)}, but config.json requires {list(shape)}")
    return spec


def check_rows(specs: Mapping[str, TensorSpec], shapes: Mapping[str, torch.Size], *, num_token_ids: int, where: str) -> None:
    """Raise ValueError if a token id has no stored vocabulary row or is not below vocab_size.

    `specs` maps canonical names to stored specs, and `shapes` maps canonical names to the model's
    shapes.
    """
    rows = {name: specs[name].shape[0] for name in (EMBEDDINGS, HEAD) if name in specs and specs[name].shape}
    check_vocabulary(rows, vocab_size=shapes[EMBEDDINGS][0], num_token_ids=num_token_ids, where=where)


def trim_vocabulary(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor without vocabulary padding."""
    return tensor if tensor.shape == spec.shape else tensor[: spec.shape[0]]


def _released_spec(spec: TensorSpec, name: str, shape: torch.Size) -> TensorSpec:
    """Return the spec of a stored tensor in the form of released checkpoints.

    transformers 5.19 saves the experts' tensors with their last two dimensions swapped.
    """
    is_swapped = is_expert_tensor(name) and spec.shape != shape and swap_last_dims(spec.shape) == shape
    return TensorSpec(spec.dtype, shape) if is_swapped else spec


class HfNamedSource:
    """Source of tensors that are stored under Hugging Face names."""

    specs: Mapping[str, TensorSpec]
    skipped: Sequence[str]

    def __init__(self, stored: StoredTensors, shapes: Mapping[str, torch.Size], *, num_token_ids: int = 0) -> None:
        """Compare the stored tensors with the model's names and shapes.

        `num_token_ids` is the tokenizer's largest token id plus one, or 0 to skip the check that
        every token id has a row.
        """
        self._stored = stored
        self._has_copy = HEAD in stored.specs and HEAD not in shapes
        ignored = (name for name in stored.specs if BUFFERS.fullmatch(name) or name.startswith(MTP))
        self.skipped = sorted(name for name in ignored if name not in shapes)
        names = stored.specs.keys() - ({HEAD} if self._has_copy else set()) - set(self.skipped)
        check_names(names, shapes, source=str(stored.folder), target="the model that config.json describes")
        check_rows(stored.specs, shapes, num_token_ids=num_token_ids, where=str(stored.folder))
        self.specs = {
            name: check_shape(_released_spec(stored.specs[name], name, shape), name, shape, stored=f"{stored.locate(name)}: {name}")
            for name, shape in shapes.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with the given name, without vocabulary padding.

        Experts have the form of released checkpoints. Raises ValueError if a stored copy of tied
        embeddings differs from the embeddings.
        """
        tensor = self._stored.read(name)
        if name == EMBEDDINGS and self._has_copy and not torch.equal(tensor, self._stored.read(HEAD)):
            raise ValueError(f"{self._stored.locate(HEAD)}: {HEAD} differs from {EMBEDDINGS}, but config.json specifies tied embeddings")
        if is_expert_tensor(name):
            return tensor if tensor.shape == self.specs[name].shape else tensor.transpose(-1, -2).contiguous()
        return trim_vocabulary(tensor, self.specs[name])


class MegatronSource:
    """Source of tensors that are stored under Megatron's names.

    All Hugging Face tensors of one Megatron parameter are computed together. Each tensor can be
    read only once.
    """

    specs: Mapping[str, TensorSpec]
    skipped: Sequence[str]

    def __init__(
        self, ranks: Sequence[StoredTensors], rows: list[ParamMapping], shapes: Mapping[str, torch.Size], *,
        leave_out: Collection[str] = (),
        num_token_ids: int = 0,
    ) -> None:  # fmt: skip
        """Compare the stored tensors with the name mappings and the model's shapes.

        Args:
            ranks: Stored tensors of each tensor-parallel rank; a single element if the checkpoint
                contains unsharded tensors. All ranks have the same tensor names, which are those of
                ParamMapping.mcore_name or ParamMapping.checkpoint_key.
            rows: Name mappings of the model.
            shapes: Shapes of the model's tensors, keyed by Hugging Face name.
            leave_out: Stored names that do not belong to the model.
            num_token_ids: The tokenizer's largest token id plus one, or 0 to skip the check that
                every token id has a row.
        """
        self._ranks, self.skipped = ranks, ()
        spellings = {spelling: row for row in rows for spelling in (row.mcore_name, row.checkpoint_key)}
        names: dict[str, str] = {}
        for name in sorted(ranks[0].specs.keys() - set(leave_out)):
            key = spellings[name].checkpoint_key if name in spellings else name
            if key in names:
                raise ValueError(f"{self._locate(name)}: {name} and {names[key]} are two names of the same tensor; remove one of them")
            names[key] = name
        copies = {row.checkpoint_key for row in rows if not row.is_exported}
        exported = {row.checkpoint_key: row for row in rows if row.is_exported}
        check_names(names.keys() - copies, exported, source=str(ranks[0].folder), target="the model that config.json describes")
        check_names(
            (name for row in exported.values() for name in row.hf_names), shapes, source="the name mapping", target="transformers' model"
        )
        self._names = names
        self._tied_copy = next((key for key in copies if key in names), None)
        self._rows = {name: row for row in exported.values() for name in row.hf_names}
        self._row_tensors: dict[str, torch.Tensor] = {}
        made = {name: spec for row in exported.values() for name, spec in self._row_specs(row).items()}
        check_rows(made, shapes, num_token_ids=num_token_ids, where=str(ranks[0].folder))
        places = {
            hf: f"{self._locate(names[row.checkpoint_key])}: {names[row.checkpoint_key]}"
            for row in exported.values()
            for hf in row.hf_names
        }
        self.specs = {name: check_shape(spec, name, shapes[name], stored=places[name]) for name, spec in made.items()}

    def _locate(self, name: str) -> str:
        return ", ".join(rank.locate(name) for rank in self._ranks)

    def _row_specs(self, row: ParamMapping) -> dict[str, TensorSpec]:
        name = self._names[row.checkpoint_key]
        specs, stored = [rank.specs[name] for rank in self._ranks], f"{self._locate(name)}: {name}"
        if len(set(specs)) > 1:
            raise ValueError(f"{stored}: the tensor-parallel parts differ: {', '.join(map(str, specs))}")
        try:
            tensors = row.to_hf([torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs])
        except RuntimeError as error:
            parts = f"{len(specs)} part(s) of shape {list(specs[0].shape)}"
            raise ValueError(f"{stored}: {parts} cannot be converted to {', '.join(row.hf_names)} with the sizes in config.json") from error
        return {hf: TensorSpec(tensor.dtype, tensor.shape) for hf, tensor in zip(row.hf_names, tensors, strict=True)}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with the given name, without vocabulary padding.

        Raises ValueError if the ranks' copies of a replicated parameter differ, or if a stored copy
        of tied embeddings differs from the embeddings.
        """
        if name not in self._row_tensors:
            row = self._rows[name]
            self._row_tensors = dict(zip(row.hf_names, row.to_hf(self._read_shards(row)), strict=True))
        return trim_vocabulary(self._row_tensors.pop(name), self.specs[name])

    def _read_shards(self, row: ParamMapping) -> list[torch.Tensor]:
        name = self._names[row.checkpoint_key]
        if row.shard_dim is not None:
            shards = [rank.read(name) for rank in self._ranks]
            if row.hf_names == (EMBEDDINGS,) and self._tied_copy is not None:
                self._check_copy(shards)
            return shards
        first = self._ranks[0].read(name)
        for number, rank in enumerate(self._ranks[1:], start=1):
            if not torch.equal(first, rank.read(name)):
                raise ValueError(
                    f"{self._locate(name)}: {name} is replicated, but tensor-parallel ranks 0 and {number} contain different values"
                )
        return [first]

    def _check_copy(self, shards: list[torch.Tensor]) -> None:
        assert self._tied_copy is not None
        copy = self._names[self._tied_copy]
        for rank, shard in zip(self._ranks, shards, strict=True):
            if not torch.equal(shard, rank.read(copy)):
                raise ValueError(f"{self._locate(copy)}: {copy} differs from the embeddings, but config.json specifies tied embeddings")
