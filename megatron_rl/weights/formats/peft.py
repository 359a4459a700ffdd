"""LoRA adapters (arXiv 2106.09685) in and out of PEFT's format, through a table of their own.

PEFT keeps one adapter for each Hugging Face linear layer: lora_A [rank, inputs] and lora_B [outputs, rank]; the layer's output grows by
alpha / rank * B A x. Ours sit beside Megatron's (fused) linears under the same cut: `<linear>.adapter.lora_a.<projection>`.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
"""Fields of adapter_config.json (PEFT 0.21, and lora*_ of ms-swift) that are read, or change nothing in a plain LoRA. Any other one that is
set to something (layers_to_transform, exclude_modules, use_dora, rank_pattern, one of a newer PEFT) changes what an adapter means."""
TARGET_PREFIXES = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base alone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take their start out of the base's weights
(PEFT 0.21, tuners/lora/layer.py), so that what they train is no addition to the released ones."""
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
"""Targets in the language model: Megatron's linear, HF's projection, the dimension of its weight that tensor parallelism cuts."""


def projection_name(module: str) -> str:
    """The last part of an HF module's name, by which an adapter is called: model.layers.0.self_attn.q_proj -> q_proj."""
    return module.rpartition(".")[2]


def is_vision_target(module: str, targets: Sequence[str], vision_lora: Mapping[str, str]) -> bool:
    """Whether one of the targets names this module of the vision tower; `vision_lora` is the model family's (Family.vision_lora)."""
    return any(re.fullmatch(pattern, module) for target, pattern in vision_lora.items() if target in targets)


def adapter_table(
    *, targets: Sequence[str], num_layers: int, vision_names: Sequence[str], vision_lora: Mapping[str, str]
) -> list[ParamMapping]:
    """Every adapter tensor once; `vision_names` are the HF vision tower's parameters (without the `visual.` prefix), which are not cut."""
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
    """The rows of one linear's A and B. Where tensor parallelism cuts the rows of its weight (0), ranks have outputs of their own, hence a
    part of B; where it cuts the columns (1), inputs of their own, hence a part of A."""
    name = projection_name(hf)
    return [
        ParamMapping(f"{linear}.adapter.lora_a.{name}", (f"{hf}.lora_A.weight",), stage, shard_dim=1 if cut == 1 else None),
        ParamMapping(f"{linear}.adapter.lora_b.{name}", (f"{hf}.lora_B.weight",), stage, shard_dim=0 if cut == 0 else None),
    ]


def _parameters(chunks: nn.ModuleList) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in chunks.named_parameters() if is_adapter(name)}


def init_adapters(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, *, seed: int) -> None:
    """PEFT's start: B zero, A uniform in +-1 / sqrt(inputs). The numbers depend on the seed and the layer's name, not on the layout."""

    def value(row: ParamMapping, shape: Sequence[int]) -> Tensors:
        whole = torch.zeros(shape)
        if ".lora_a." in row.mcore_name:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {row.hf_names[0]}".encode()))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        return (whole,)

    fill_parameters(_parameters(chunks), rows, placement, value)


def load_peft(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, folder: Path, *, rank: int, alpha: float) -> None:
    """Fill the adapters from a PEFT folder. Raises ValueError where rank, alpha, targets or kind differ from what is asked for."""
    config = read_peft_config(folder, key="lora.path")
    if config.get("use_rslora"):
        raise ValueError(f"lora.path={folder}: its scale is alpha / sqrt(rank) (use_rslora); only alpha / rank can be trained on")
    for setting, stated, theirs in (("lora.rank", rank, config["r"]), ("lora.alpha", alpha, config["lora_alpha"])):
        if theirs != stated:
            raise ValueError(f"{setting}={stated}: the adapter in lora.path={folder} has {theirs}; state the same")
    source = HfTensors(folder, key="lora.path")
    wanted = {name for row in rows for name in row.hf_names}
    missing, unknown = sorted(wanted - source.specs.keys()), sorted(source.specs.keys() - wanted)
    if missing or unknown:
        raise ValueError(
            f"lora.path={folder}: the adapter and lora.targets differ. Missing in the adapter: {missing[:3]} ({len(missing)}); "
            f"not among the targets: {unknown[:3]} ({len(unknown)}). State the adapter's own targets"
        )
    fill_parameters(_parameters(chunks), rows, placement, lambda row, _shape: tuple(source.read(name) for name in row.hf_names))


def read_peft_config(folder: Path, *, key: str) -> dict:
    """The content of adapter_config.json, of a plain LoRA: `r` a positive integer, `lora_alpha` a number, nothing more than that.

    Raises ValueError under the setting's or option's name `key`, naming what is wrong.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{key}={folder}: there is no {CONFIG}; give a folder in PEFT's format")
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{key}={folder}: its {CONFIG} is damaged ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{key}={folder}: its {CONFIG} holds a {type(config).__name__}, no settings; copy it again")
    foreign = [name for name, value in config.items() if value and name not in KNOWN_FIELDS]
    foreign += ["bias"] if config.get("bias", "none") != "none" else []
    foreign += ["peft_type"] if config.get("peft_type") != "LORA" else []
    if foreign:
        told = ", ".join(f"{name}={config.get(name)}" for name in foreign)
        raise ValueError(f"{key}={folder}: {told} in its {CONFIG} is more than plain LoRA; merge the adapter with PEFT itself")
    start = config.get("init_lora_weights")
    if start not in TARGET_PREFIXES:
        raise ValueError(
            f"{key}={folder}: init_lora_weights={start} in its {CONFIG} may have changed the base when training started; "
            "save it anew with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT itself"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{key}={folder}: r={rank} in its {CONFIG} is no rank (a positive integer); copy it again")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"{key}={folder}: lora_alpha={alpha} in its {CONFIG} is no number; copy it again")
    return config


def make_peft_config(
    *, rank: int, alpha: float, dropout: float, targets: Sequence[str], base: str, vision_lora: Mapping[str, str], digest: str = ""
) -> dict[str, object]:
    """The content of adapter_config.json. `target_modules` is a pattern over whole module names: a list of endings would meet the gate_proj
    of both towers. `digest`: the base's (base_digest.py)."""
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
    """Write a PEFT folder at `out`, whole or not at all; tensors by canonical name. Raises OSError as write_hf_folder does."""
    with atomic_folder(out) as partial:
        copies = {PEFT_PREFIX + nested_name(name): tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        try:
            save_file(copies, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{WEIGHTS}: {error}") from error
        (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
