"""Opening a checkpoint of any format as Hugging Face tensors: torch_dist (ours), classic Megatron, verl's FSDP shards, Hugging Face."""

from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig

from megatron_rl.models.hf_config import hf_shapes, rows_of
from megatron_rl.models.mapping import Heads, Row
from megatron_rl.weights.formats.classic import ClassicShards, megatron_tower_rows, rank_folders
from megatron_rl.weights.formats.fsdp import FsdpTensors, rank_paths
from megatron_rl.weights.formats.merge_lora import Merged
from megatron_rl.weights.formats.source import MegatronSource, NamedSource, Source, Spec, WholeShards
from megatron_rl.weights.formats.tensors import HfTensors
from megatron_rl.weights.formats.torch_dist import METADATA


class HfSource:
    """The tensors of a Hugging Face folder as they are."""

    def __init__(self, folder: Path, *, key: str, once: bool = False) -> None:
        tensors = HfTensors(folder, key=key, once=once)
        self.folder = folder
        self.specs = {name: Spec(tensors.dtype(name), tensors.shape(name)) for name in sorted(tensors.names())}
        self.read = tensors.read

    def where(self, name: str) -> str:
        return str(self.folder)


def kind_of(folder: Path, *, key: str) -> str:
    """'torch_dist', 'classic', 'fsdp' or 'hf', by the files in the folder. Raises ValueError where there are none of these."""
    if not folder.is_dir():
        raise ValueError(f"{key}={folder}: no such folder")
    if (folder / METADATA).is_file():
        return "torch_dist"
    if rank_folders(folder):
        return "classic"
    if rank_paths(folder):
        return "fsdp"
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return "hf"
    raise ValueError(
        f"{key}={folder}: holds no checkpoint: no {METADATA} (Megatron's torch_dist), no mp_rank_* folders (classic Megatron), "
        "no model_world_size_*_rank_*.pt (FSDP shards) and no *.safetensors; give the folder that has these files in it"
    )


def hf_part(folder: Path) -> Path | None:
    """Where a checkpoint keeps config, tokenizer and processor: `hf` in ours, `huggingface` in verl's, the folder itself elsewhere."""
    return next((part for part in (folder / "hf", folder / "huggingface", folder) if (part / "config.json").is_file()), None)


def open_source(folder: Path, config: Qwen2_5_VLConfig, *, key: str, once: bool = False) -> Source:
    """The checkpoint's tensors, proven to be exactly those of the model that `config` (of read_config) describes.

    A training checkpoint of ours with an adapter (a LoRA run's) gives the merged weights. `once`: each tensor
    is read once, by this process alone; the page cache is spared where tensors are mapped (torch_dist, Hugging Face).
    """
    kind, shapes = kind_of(folder, key=key), hf_shapes(config)
    if kind in ("hf", "fsdp"):
        return NamedSource(HfSource(folder, key=key, once=once) if kind == "hf" else FsdpTensors(folder), shapes)
    rows = rows_of(config)
    if kind == "torch_dist":
        stored = WholeShards(folder, once=once)
        base = MegatronSource(stored, rows, shapes)
        if not stored.has_adapters():
            return base
        if not (folder / "adapter").is_dir():
            raise ValueError(f"{key}={folder}: its run trained an adapter, but there is no adapter/ in it; copy the whole checkpoint")
        return Merged(base, folder / "adapter", key=key)
    shards = ClassicShards(folder)
    return MegatronSource(shards, _with_megatron_tower(rows, config) if shards.has_megatron_tower else rows, shapes)


def _with_megatron_tower(rows: list[Row], config: Qwen2_5_VLConfig) -> list[Row]:
    vision = config.vision_config
    heads = Heads(vision.num_heads, vision.num_heads, vision.hidden_size // vision.num_heads)
    return megatron_tower_rows(depth=vision.depth, heads=heads) + [row for row in rows if not row.mcore.startswith("vision.")]


def as_dtype(config: dict[str, object], dtype: torch.dtype) -> dict[str, object]:
    """A config.json that says the weights are of this dtype, wherever it says so (`torch_dtype` until transformers 4.55, then `dtype`)."""
    changed: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = as_dtype(value, dtype)
        changed[key] = str(dtype).removeprefix("torch.") if key in ("dtype", "torch_dtype") else value
    return changed
