"""Reader of Megatron's classic checkpoints.

A checkpoint consists of folders `mp_rank_TT` or `mp_rank_TT_PPP` with one torch.save file each. The
reader supports files of Megatron-LM and of verl. Megatron-LM's file `model_optim_rng.pt` contains
the state dict under "model", or under "model0", "model1" ... for an interleaved pipeline. verl's
file `model/mp_rank_TT_PPP/model.pt` contains a list of state dicts, one per model chunk. Optimizer
and random states in the files are ignored. Layer numbers count from the first layer of a chunk. The
chunks of an interleaved pipeline are assigned to the stages cyclically.

The language model's parameters are named as in name_mapping.py, with or without the prefix
`language_model.`. The names of norms follow the local layer spec or the Transformer Engine layer
spec. The vision tower is on the first stage, and its parameters have the prefix `vision_model.`,
`visual.` or `vision.`. The tower is either Hugging Face's tower, which is replicated on all ranks,
or a tower of Megatron layers, which is sharded by tensor parallelism (models/megatron_tower.py).
The reader was written from descriptions of the formats, without access to real files, so an unknown
name raises an error instead of being skipped.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.weights.formats import pickle_tensors
from megatron_rl.weights.formats.checkpoint_source import TensorSpec
from megatron_rl.weights.formats.pickle_tensors import StoredTensor

FILES = ("model_optim_rng.pt", "model_rng.pt", "model.pt")
PREFIXES = {
    "language_model.": "language.", "language.": "language.", "embedding.": "language.embedding.", "decoder.": "language.decoder.",
    "output_layer.": "language.output_layer.", "vision_model.": "vision.", "visual.": "vision.", "vision.": "vision.",
}  # fmt: skip
LAYER = re.compile(r"^(language\.decoder\.layers\.)(\d+)(\..*)$")


class ClassicRank:
    """Parameters of one tensor-parallel rank on all pipeline stages, with global layer numbers."""

    specs: Mapping[str, TensorSpec]

    def __init__(self, folder: Path, pieces: dict[str, StoredTensor]) -> None:
        self.folder, self._pieces = folder, pieces
        self.specs = {name: TensorSpec(piece.dtype, piece.shape) for name, piece in pieces.items()}

    def locate(self, name: str) -> str:
        """Return the path of the file that contains a parameter."""
        return str(self._pieces[name].path)

    def read(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter."""
        return self._pieces[name].read()


def open_classic(folder: Path) -> list[ClassicRank]:
    """Return one ClassicRank per tensor-parallel rank of a checkpoint, in rank order.

    All ranks have the same parameter names. Raises ValueError for a missing rank, file or tensor.
    """
    files = _rank_files(folder)
    tp, pp = max(rank for rank, _ in files) + 1, max(stage for _, stage in files) + 1
    absent = [f"tensor-parallel rank {rank}, stage {stage}" for rank in range(tp) for stage in range(pp) if (rank, stage) not in files]
    if absent:
        raise ValueError(f"{folder}: no mp_rank folder for {'; '.join(absent)}; copy the whole checkpoint")
    chunks = {place: _chunks(path) for place, path in files.items()}
    if len({len(parts) for parts in chunks.values()}) > 1:
        counts = {files[place].parent.name: len(parts) for place, parts in chunks.items()}
        raise ValueError(f"{folder}: the ranks contain different numbers of model chunks: {counts}; copy the whole checkpoint")
    found: dict[str, list[StoredTensor]] = {}
    first_layer = 0
    for chunk in range(len(chunks[0, 0])):
        for stage in range(pp):
            first_layer += _add_chunk(found, [chunks[rank, stage][chunk] for rank in range(tp)], first_layer, folder=folder)
    return [ClassicRank(folder, {name: pieces[rank] for name, pieces in found.items()}) for rank in range(tp)]


def _add_chunk(found: dict[str, list[StoredTensor]], ranks: list[dict[str, StoredTensor]], first_layer: int, *, folder: Path) -> int:
    """Add a model chunk to `found`, with global layer numbers; return the chunk's number of layers.

    `ranks` holds the chunk's tensors for each tensor-parallel rank.
    """
    num_layers = 0
    for name in sorted(set().union(*ranks)):
        lacking = [rank for rank, part in enumerate(ranks) if name not in part]
        present = next(part[name] for part in ranks if name in part)
        if lacking:
            raise ValueError(
                f"{folder}: {name} is in {_describe_file(present)} but not in the file of tensor-parallel rank {lacking[0]}; "
                "copy the whole checkpoint"
            )
        layer = LAYER.match(name)
        if layer:
            num_layers = max(num_layers, int(layer[2]) + 1)
        whole = f"{layer[1]}{int(layer[2]) + first_layer}{layer[3]}" if layer else name
        if whole in found:
            raise ValueError(f"{folder}: {whole} is both in {_describe_file(found[whole][0])} and in {_describe_file(present)}")
        found[whole] = [part[name] for part in ranks]
    return num_layers


def _describe_file(piece: StoredTensor) -> str:
    return f"{piece.path.parent.name}/{piece.path.name}"


def rank_folders(folder: Path) -> list[Path]:
    """Return the mp_rank folders of a checkpoint, including those in verl's subfolder `model`."""
    return sorted([*folder.glob("mp_rank_*"), *folder.glob("model/mp_rank_*")])


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    files: dict[tuple[int, int], Path] = {}
    for path in rank_folders(folder):
        name = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name)
        if name is None:
            raise ValueError(f"{path}: is neither mp_rank_TT nor mp_rank_TT_PPP; expert parallelism is not supported")
        file = next((path / each for each in FILES if (path / each).is_file()), None)
        if file is None:
            raise ValueError(f"{path}: contains none of {', '.join(FILES)}; copy the whole checkpoint")
        place = (int(name[1]), int(name[2] or 0))
        if place in files:
            raise ValueError(f"{path}: contains the same rank as {files[place].parent}; remove one of the two folders")
        files[place] = file
    return files


def _chunks(path: Path) -> list[dict[str, StoredTensor]]:
    """Return the state dict of each model chunk in a file.

    Parameter names have the prefixes that name_mapping.py uses. Layer numbers count from the first
    layer of the chunk.
    """
    state = pickle_tensors.load(path)
    if isinstance(state, dict) and "model" in state:
        state = state["model"]
    elif isinstance(state, dict) and "model0" in state:
        state = [state[f"model{chunk}"] for chunk in range(sum(re.fullmatch(r"model\d+", str(key)) is not None for key in state))]
    chunks = state if isinstance(state, list) else [state]
    return [_pieces(chunk, path) for chunk in chunks]


def _pieces(state: object, path: Path) -> dict[str, StoredTensor]:
    if not isinstance(state, dict):
        raise ValueError(f"{path}: contains a {type(state).__name__} instead of a state dict")
    pieces: dict[str, StoredTensor] = {}
    spelled: dict[str, str] = {}
    for name, value in state.items():
        if str(name).endswith("_extra_state"):  # Transformer Engine's fp8 scales, not weights
            continue
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{path}: {name} is not a tensor but a {type(value).__name__}; use a Megatron-Core model's checkpoint")
        plain = str(name)
        while plain.startswith("module."):
            plain = plain.removeprefix("module.")
        prefix = next((prefix for prefix in PREFIXES if plain.startswith(prefix)), "")
        whole = PREFIXES[prefix] + plain.removeprefix(prefix) if prefix else plain
        if whole in pieces:
            raise ValueError(f"{path}: {spelled[whole]} and {name} are two names of the same tensor; remove one of them")
        pieces[whole], spelled[whole] = value, str(name)
    return pieces
