"""LoRA adapters (arXiv 2106.09685) in PEFT's format: name mappings, initialization, load and save.

PEFT has one adapter for each Hugging Face linear layer. The adapter consists of lora_A [rank,
inputs] and lora_B [outputs, rank], and adds alpha / rank * B A x to the layer's output. In this
trainer, adapters belong to Megatron's (fused) linear layers, are sharded like these layers, and are
named `<linear>.adapter.lora_a.<projection>`.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.name_mapping import PEFT_PREFIX, ParamMapping, Tensors, nested_name
from megatron_rl.weights.formats.base_digest import DIGEST
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.tensor_files import atomic_folder
from megatron_rl.weights.stream import ShardLocation, fill_parameters, is_adapter

KNOWN_FIELDS = (
    DIGEST, "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "inference_mode", "init_lora_weights",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_dtype", "lora_ga_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
)  # fmt: skip
"""Fields of adapter_config.json (PEFT 0.21, and the lora*_ fields of ms-swift) that are read, or
that have no effect in plain LoRA. Adapters with a value in any other field are rejected, because
the field may change the computation. Examples are layers_to_transform, exclude_modules, use_dora,
rank_pattern, and fields of newer PEFT versions.
"""
TARGET_PREFIXES = (True, False, None, "gaussian", "eva", "orthogonal")
"""Accepted values of init_lora_weights: initializations that leave the base model unchanged. PiSSA,
OLoRA, CorDA, LoftQ and LoRA-GA subtract the initial adapters from the base weights (PEFT 0.21,
tuners/lora/layer.py), so adapters trained with them cannot be added to the released weights.
"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

LANGUAGE_TARGETS = {
    "attention": (
        ("self_attention.linear_qkv", "self_attn.q_proj", 0),
        ("self_attention.linear_qkv", "self_attn.k_proj", 0),
        ("self_attention.linear_qkv", "self_attn.v_proj", 0),
        ("self_attention.linear_proj", "self_attn.o_proj", 1),
    ),
    "mlp": (
        ("mlp.linear_fc1", "mlp.gate_proj", 0),
        ("mlp.linear_fc1", "mlp.up_proj", 0),
        ("mlp.linear_fc2", "mlp.down_proj", 1),
    ),
}
"""Adapted linear layers of a decoder layer, keyed by the value in lora.targets. Each entry consists
of Megatron's linear layer, Hugging Face's projection, and the weight dimension that tensor
parallelism shards.
"""


def projection_name(module: str) -> str:
    """Return the last part of a module's name: model.layers.0.self_attn.q_proj -> q_proj.

    The last part is used in the names of adapter parameters.
    """
    return module.rpartition(".")[2]


def is_vision_target(module: str, targets: Sequence[str], vision_lora: Mapping[str, str]) -> bool:
    """Return True if one of the targets selects this module of the vision tower.

    `vision_lora` maps each target to a regular expression for module names
    (ModelFamily.vision_lora_patterns).
    """
    return any(re.fullmatch(pattern, module) for target, pattern in vision_lora.items() if target in targets)


def adapter_table(
    *, targets: Sequence[str], num_layers: int, vision_names: Sequence[str], vision_lora: Mapping[str, str]
) -> list[ParamMapping]:
    """Return the name mappings of all adapter tensors.

    `vision_names` are the parameter names of the Hugging Face vision tower, without the prefix
    `visual.`. Adapters of the vision tower are not sharded.
    """
    rows = []
    for layer in range(num_layers):
        for linear, hf, cut in (entry for target, entries in LANGUAGE_TARGETS.items() if target in targets for entry in entries):
            rows.extend(_lora_rows(f"language.decoder.layers.{layer}.{linear}", f"model.layers.{layer}.{hf}", f"layer:{layer}", cut=cut))
    modules = sorted(name.removesuffix(".weight") for name in vision_names if name.endswith(".weight"))
    for module in modules:
        if is_vision_target(module, targets, vision_lora):
            rows.extend(_lora_rows(f"vision.{module}", f"visual.{module}", "first", cut=None))
    return rows


def _lora_rows(linear: str, hf: str, stage: str, *, cut: int | None) -> list[ParamMapping]:
    """Return the name mappings of A and B for one linear layer.

    With cut=0, tensor parallelism shards the rows of the layer's weight: ranks compute different
    outputs, so B is sharded. With cut=1, tensor parallelism shards the columns: ranks have
    different inputs, so A is sharded. With cut=None, A and B are replicated.
    """
    name = projection_name(hf)
    return [
        ParamMapping(f"{linear}.adapter.lora_a.{name}", (f"{hf}.lora_A.weight",), stage, shard_dim=1 if cut == 1 else None),
        ParamMapping(f"{linear}.adapter.lora_b.{name}", (f"{hf}.lora_B.weight",), stage, shard_dim=0 if cut == 0 else None),
    ]


def _parameters(chunks: nn.ModuleList) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in chunks.named_parameters() if is_adapter(name)}


def init_adapters(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, *, seed: int) -> None:
    """Initialize adapters as PEFT does.

    All elements of B are zero. The elements of A are drawn uniformly between -1 / sqrt(inputs) and
    1 / sqrt(inputs). The values depend on the seed and the layer's name, but not on the parallel
    layout.
    """

    def value(row: ParamMapping, shape: Sequence[int]) -> Tensors:
        whole = torch.zeros(shape)
        if ".lora_a." in row.mcore_name:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {row.hf_names[0]}".encode()))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        return (whole,)

    fill_parameters(_parameters(chunks), rows, placement, value)


def load_peft(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, folder: Path, *, rank: int, alpha: float) -> None:
    """Load the adapters from a PEFT folder.

    Raises ValueError if the folder's rank, alpha or targets differ from the settings, or if the
    adapter uses features beyond plain LoRA.
    """
    config = read_peft_config(folder, key="lora.path")
    if config.get("use_rslora"):
        raise ValueError(f"lora.path={folder}: the adapter's scale is alpha / sqrt(rank) (use_rslora); only alpha / rank is supported")
    for setting, stated, theirs in (("lora.rank", rank, config["r"]), ("lora.alpha", alpha, config["lora_alpha"])):
        if theirs != stated:
            raise ValueError(f"{setting}={stated}: the adapter in lora.path={folder} has {theirs}; use the same value")
    source = HfTensors(folder, key="lora.path")
    wanted = {name for row in rows for name in row.hf_names}
    missing, unknown = sorted(wanted - source.specs.keys()), sorted(source.specs.keys() - wanted)
    if missing or unknown:
        raise ValueError(
            f"lora.path={folder}: the adapter and lora.targets differ. Missing in the adapter: {missing[:3]} ({len(missing)}); "
            f"not among the targets: {unknown[:3]} ({len(unknown)}). Use the adapter's own targets"
        )
    fill_parameters(_parameters(chunks), rows, placement, lambda row, _shape: tuple(source.read(name) for name in row.hf_names))


def read_peft_config(folder: Path, *, key: str) -> dict:
    """Return the content of a plain LoRA adapter's adapter_config.json.

    In the result, `r` is a positive integer and `lora_alpha` is a finite number. Raises ValueError
    if the file is missing or damaged, or if the adapter uses features beyond plain LoRA. `key` is
    the setting or option that names the folder, used in error messages.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{key}={folder}: {CONFIG} is missing; use a folder in PEFT's format")
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{key}={folder}: its {CONFIG} is damaged ({error}); copy the file again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{key}={folder}: its {CONFIG} contains a {type(config).__name__} instead of a JSON object; copy the file again")
    foreign = [name for name, value in config.items() if value and name not in KNOWN_FIELDS]
    foreign += ["bias"] if config.get("bias", "none") != "none" else []
    foreign += ["peft_type"] if config.get("peft_type") != "LORA" else []
    if foreign:
        told = ", ".join(f"{name}={config.get(name)}" for name in foreign)
        raise ValueError(f"{key}={folder}: {told} in its {CONFIG} is not supported; use plain LoRA, or merge the adapter with PEFT itself")
    start = config.get("init_lora_weights")
    if start not in TARGET_PREFIXES:
        raise ValueError(
            f"{key}={folder}: init_lora_weights={start} in its {CONFIG} may have changed the base model at the start of training; "
            "save the adapter again with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT itself"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{key}={folder}: r={rank} in its {CONFIG} is not a positive integer; copy the file again")
    if type(alpha) not in (int, float) or not math.isfinite(cast("float", alpha)):
        raise ValueError(f"{key}={folder}: lora_alpha={alpha} in its {CONFIG} is not a finite number; copy the file again")
    return config


def make_peft_config(
    *, rank: int, alpha: float, dropout: float, targets: Sequence[str], base: str, vision_lora: Mapping[str, str], digest: str = ""
) -> dict[str, object]:
    """Return the content of adapter_config.json.

    The field `target_modules` is a regular expression for full module names, because a list of
    suffixes such as gate_proj could match modules of both the language model and the vision tower.
    `digest` is the digest of the base model (base_digest.py).
    """
    language = "|".join(re.escape(hf) for target, entries in LANGUAGE_TARGETS.items() if target in targets for _, hf, _ in entries)
    vision = "|".join(pattern for target, pattern in vision_lora.items() if target in targets)
    parts = [rf"model\.language_model\.layers\.\d+\.({language})"] * bool(language) + [rf"model\.visual\.({vision})"] * bool(vision)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({DIGEST: digest} if digest else {}),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": "|".join(parts),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_peft(out: Path, tensors: Iterator[tuple[str, torch.Tensor]], config: dict[str, object]) -> None:
    """Write a PEFT folder at `out` atomically.

    `tensors` yields canonical names and tensors. Raises OSError if writing fails (disk full, no
    permission).
    """
    with atomic_folder(out) as partial:
        copies = {PEFT_PREFIX + nested_name(name): tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        try:
            save_file(copies, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{WEIGHTS}: {error}") from error
        (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
