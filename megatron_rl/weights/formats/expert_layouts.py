"""Layouts of experts in Hugging Face checkpoints: fused and separate.

Fused, a layer has the tensors `experts.gate_up_proj` and `experts.down_proj` with the matrices of
all experts, as in released checkpoints. Separate, each expert has three matrices of its own,
`experts.0.gate_proj.weight` [F, H], `experts.0.up_proj.weight` [F, H] and
`experts.0.down_proj.weight` [H, F], as in released Qwen3-MoE models. All readers of Hugging Face
names read both layouts.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.models.name_mapping import is_expert_tensor
from megatron_rl.weights.formats.checkpoint_source import StoredTensors, TensorSpec, check_names

SEPARATE = re.compile(r".*\.mlp\.experts\.\d+\..*")
"""Pattern for the names of a single expert's tensors."""
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of an expert in a fused tensor, keyed by the last part of the tensor's name."""


@dataclass(slots=True, frozen=True)
class ExpertMatrices:
    """Separate tensors that make up one fused tensor."""

    names: tuple[str, ...]
    """Names of the matrices, grouped by expert."""
    shape: torch.Size
    """Shape of each matrix: [output features, input features]."""
    is_transposed: bool
    """True if the fused tensor [E, inputs, outputs] contains the transposed matrices."""

    def views(self, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each matrix and a view of it in the fused tensor."""
        by_expert = fused.transpose(1, 2) if self.is_transposed else fused
        matrices = [matrix for expert in by_expert for matrix in expert.split(self.shape[0])]
        yield from zip(self.names, matrices, strict=True)


def expert_matrices(name: str, shapes: Mapping[str, torch.Size]) -> ExpertMatrices:
    """Return the separate tensors of the fused tensor `name`.

    `shapes` contains the shapes of both fused tensors of the layer. They determine whether the
    matrices are transposed, as H is the last dimension of only one of the two forms of down_proj.
    """
    stem, _, kind = name.rpartition(".")
    parts = MATRICES[kind]
    is_transposed = shapes[f"{stem}.gate_up_proj"][-2] == shapes[f"{stem}.down_proj"][-1]
    num_experts, rows, columns = shapes[name]
    if is_transposed:
        rows, columns = columns, rows
    names = tuple(f"{stem}.{expert}.{part}.weight" for expert in range(num_experts) for part in parts)
    return ExpertMatrices(names, torch.Size((rows // len(parts), columns)), is_transposed)


class FusedExperts:
    """Stored tensors in which separate experts appear as fused tensors.

    Raises ValueError if a matrix of an expert is missing, unknown or of another shape or dtype, or
    if the same experts are stored in both layouts.
    """

    specs: Mapping[str, TensorSpec]

    def __init__(self, stored: StoredTensors, shapes: Mapping[str, torch.Size]) -> None:
        """Find the separate experts; `shapes` are the shapes of the model's tensors."""
        self.folder, self._stored = stored.folder, stored
        found = {name for name in stored.specs if SEPARATE.fullmatch(name)}
        layers = {name: expert_matrices(name, shapes) for name in shapes if is_expert_tensor(name)}
        self._fused = {name: layer for name, layer in layers.items() if not found.isdisjoint(layer.names)}
        for name in self._fused.keys() & stored.specs.keys():
            part = next(part for part in self._fused[name].names if part in found)
            raise ValueError(f"{stored.locate(name)}: {name} and {part} are the same experts in two layouts; remove one of them")
        wanted = [part for layer in self._fused.values() for part in layer.names]
        check_names(found, wanted, source=str(stored.folder), target="the model that config.json describes")
        self.specs = {name: spec for name, spec in stored.specs.items() if name not in found}
        self.specs |= {name: TensorSpec(self._check_matrices(layer), shapes[name]) for name, layer in self._fused.items()}

    def _check_matrices(self, layer: ExpertMatrices) -> torch.dtype:
        """Return the dtype of the matrices; raise ValueError if a shape or a dtype is wrong."""
        dtype = self._stored.specs[layer.names[0]].dtype
        for name in layer.names:
            spec, place = self._stored.specs[name], f"{self._stored.locate(name)}: {name}"
            if spec.shape != layer.shape:
                raise ValueError(f"{place} has the shape {list(spec.shape)}, but config.json requires {list(layer.shape)}")
            if spec.dtype != dtype:
                raise ValueError(f"{place} is {spec}, but {layer.names[0]} is {self._stored.specs[layer.names[0]]}; store both alike")
        return dtype

    def locate(self, name: str) -> str:
        """Return the location of a tensor; of its first matrix, if its experts are separate."""
        return self._stored.locate(self._fused[name].names[0] if name in self._fused else name)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with the given name. At most one matrix is held apart from it."""
        if name not in self._fused:
            return self._stored.read(name)
        spec = self.specs[name]
        fused = torch.empty(spec.shape, dtype=spec.dtype)
        for part, view in self._fused[name].views(fused):
            view.copy_(self._stored.read(part))
        return fused


def fuse_experts(stored: StoredTensors, shapes: Mapping[str, torch.Size]) -> StoredTensors:
    """Return the stored tensors with all experts fused, given the shapes of the model's tensors."""
    return FusedExperts(stored, shapes) if any(map(is_expert_tensor, shapes)) else stored


def check_loads_in_transformers(stored: StoredTensors, *, key: str) -> None:
    """Raise ValueError if the experts are separate.

    transformers 5.19 reads separate experts of language models, but not of the vision-language
    models that are supported here (conversion_mapping.py).
    """
    name = next((name for name in stored.specs if SEPARATE.fullmatch(name)), None)
    if name is not None:
        raise ValueError(
            f"{key}={stored.folder}: transformers does not read experts with separate tensors ({name}), so its logits cannot be "
            "computed; merge the folder with --experts fused first"
        )


def _keep(name: str, tensor: torch.Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, tensor


def _separate(name: str, tensor: torch.Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    return expert_matrices(name, shapes).views(tensor) if is_expert_tensor(name) else _keep(name, tensor, shapes)


EXPERT_LAYOUTS: Mapping[str, Callable[[str, torch.Tensor, Mapping[str, torch.Size]], Iterator[tuple[str, torch.Tensor]]]] = {
    "fused": _keep,
    "separate": _separate,
}
"""Functions (name, tensor, shapes) -> the written tensors of a tensor of the model."""
