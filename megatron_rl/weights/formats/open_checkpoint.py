"""Opens a checkpoint of any format as a source of Hugging Face tensors.

Supported formats are torch_dist (written by this trainer), classic Megatron, verl's FSDP shards,
and Hugging Face.
"""

from pathlib import Path

import torch

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.vocabulary import check_vocabulary, count_token_ids
from megatron_rl.weights.formats.checkpoint_source import EMBEDDINGS, HEAD, HfNamedSource, MegatronSource, TensorSource
from megatron_rl.weights.formats.classic import open_classic, rank_folders
from megatron_rl.weights.formats.expert_layouts import fuse_experts
from megatron_rl.weights.formats.fsdp import FsdpTensors, rank_paths
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.torch_dist import McoreTensors
from megatron_rl.weights.formats.torch_dist_metadata import METADATA
from megatron_rl.weights.stream import is_adapter, is_of_value_head


def detect_format(folder: Path, *, key: str) -> str:
    """Return 'torch_dist', 'classic', 'fsdp' or 'hf', depending on the files in the folder.

    Raises ValueError if the folder contains no checkpoint in any of these formats.
    """
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
        f"{key}={folder}: contains no checkpoint: no {METADATA} (Megatron's torch_dist), no mp_rank_* folders (classic Megatron), "
        "no model_world_size_*_rank_*.pt (FSDP shards) and no *.safetensors; use the folder that contains these files"
    )


def find_hf_folder(folder: Path) -> Path | None:
    """Return the folder that contains a checkpoint's config, tokenizer and processor, or None.

    The folder is `hf` in checkpoints of this trainer, `huggingface` in checkpoints of verl, and the
    checkpoint folder itself otherwise.
    """
    return next((part for part in (folder / "hf", folder / "huggingface", folder) if (part / "config.json").is_file()), None)


def open_source(folder: Path, spec: ModelSpec, *, key: str, read_once: bool = False) -> TensorSource:
    """Open a checkpoint and check that its tensors are exactly those of the model.

    Args:
        folder: Checkpoint of any supported format. If a training checkpoint of this trainer
            contains an adapter, the adapter is merged into the weights; a value head is ignored.
        spec: Model that the checkpoint must match.
        key: Setting or option that names the folder, for error messages.
        read_once: Set to True if each tensor is read only once, and only by this process. With
            memory-mapped formats (torch_dist, Hugging Face), tensors are then dropped from the page
            cache after use.

    Returns:
        Source of the model's tensors.

    Raises:
        ValueError: The checkpoint is incomplete or damaged, or belongs to a different model.
    """
    kind, shapes = detect_format(folder, key=key), spec.shapes()
    companions = find_hf_folder(folder)
    num_token_ids = count_token_ids(companions) if companions else 0
    if kind in ("hf", "fsdp"):
        stored = HfTensors(folder, key=key, read_once=read_once) if kind == "hf" else FsdpTensors(folder)
        return HfNamedSource(fuse_experts(stored, shapes), shapes, num_token_ids=num_token_ids)
    rows = spec.param_mappings()
    if kind == "torch_dist":
        stored = McoreTensors(folder, key=key, read_once=read_once)
        adapters = [name for name in stored.specs if is_adapter(name)]
        leave_out = [*adapters, *filter(is_of_value_head, stored.specs)]
        base = MegatronSource([stored], rows, shapes, leave_out=leave_out, num_token_ids=num_token_ids)
        if not adapters:
            return base
        if not (folder / "adapter").is_dir():
            raise ValueError(
                f"{key}={folder}: contains the training state of an adapter, but the folder adapter/ is missing; copy the whole checkpoint"
            )
        return MergedTensors(base, folder / "adapter", key=key)
    ranks = open_classic(folder)
    has_megatron_tower = any(name.startswith("vision.decoder.") for name in ranks[0].specs)
    if has_megatron_tower:
        rows = spec.family.megatron_tower_mappings(spec.vision) + [row for row in rows if not row.mcore_name.startswith("vision.")]
    return MegatronSource(ranks, rows, shapes, num_token_ids=num_token_ids)


def check_tokenizer(folder: Path, spec: ModelSpec, *, key: str) -> None:
    """Raise ValueError if a token id is not below config.vocab_size or has no row in the weights.

    `folder` is a Hugging Face folder. Only the headers of the weight files are read.
    """
    has_weights = any(folder.glob("*.safetensors"))
    specs = HfTensors(folder, key=key).specs if has_weights else {}
    rows = {name: specs[name].shape[0] for name in (EMBEDDINGS, HEAD) if name in specs and specs[name].shape}
    check_vocabulary(rows, vocab_size=spec.vocab_size, num_token_ids=count_token_ids(folder), where=f"{key}={folder}")


def find_critic_parts(folder: Path, *, key: str) -> list[str]:
    """Return the names of the critic's parts in a checkpoint written by this trainer.

    If the critic shares the policy's backbone, the parts are the value head's tensors.
    If the critic is a separate model, the only part is the subfolder "critic/".
    """
    if detect_format(folder, key=key) != "torch_dist":
        return []
    heads = [name for name in McoreTensors(folder, key=key).specs if is_of_value_head(name)]
    return heads + (["critic/"] if (folder / "critic").is_dir() else [])


def set_config_dtype(config: dict[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return a copy of a config.json's content in which every dtype field is set to `dtype`.

    The field is named `torch_dtype` up to transformers 4.55, and `dtype` in later versions.
    """
    changed: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = set_config_dtype(value, dtype)
        changed[key] = str(dtype).removeprefix("torch.") if key in ("dtype", "torch_dtype") else value
    return changed
