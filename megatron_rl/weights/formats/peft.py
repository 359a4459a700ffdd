"""LoRA adapters (arXiv 2106.09685) in PEFT's format: initialization, load and save.

An adapter adds alpha / rank * B A x to the output of its layer. models/adapter_mapping.py contains
the names and layouts of A and B.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.adapter_mapping import EXPERT_PARAMETERS, adapted_modules, adapted_parameters
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import PEFT_PREFIX, ParamMapping, Tensors, nested_name
from megatron_rl.weights.formats.base_digest import DIGEST
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl.weights.formats.tensor_files import atomic_folder
from megatron_rl.weights.stream import ShardLocation, fill_parameters, is_adapter

KNOWN_FIELDS = (
    DIGEST, "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "inference_mode", "init_lora_weights",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_dtype", "lora_ga_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "target_parameters", "task_type",
    "use_rslora",
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


def _parameters(chunks: nn.ModuleList) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in chunks.named_parameters() if is_adapter(name)}


def init_adapters(chunks: nn.ModuleList, rows: list[ParamMapping], placement: ShardLocation, *, seed: int) -> None:
    """Initialize adapters as PEFT does.

    All elements of B are zero. The elements of A are drawn uniformly between -1 / sqrt(inputs) and
    1 / sqrt(inputs). The values depend on the seed and the layer's name, but not on the parallel
    layout.
    """

    def value(row: ParamMapping, shape: Sequence[int]) -> Tensors:
        (whole,) = row.split(torch.zeros(shape)) if row.split else (torch.zeros(shape),)
        if ".lora_a" in row.mcore_name:
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
    parameters = config.get("target_parameters")
    if parameters and sorted(parameters) != sorted(EXPERT_PARAMETERS):
        raise ValueError(
            f"{key}={folder}: target_parameters={parameters} in its {CONFIG} is not supported; "
            f"adapt both of {' and '.join(EXPERT_PARAMETERS)}, or merge the adapter with PEFT itself"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{key}={folder}: r={rank} in its {CONFIG} is not a positive integer; copy the file again")
    if type(alpha) not in (int, float) or not math.isfinite(cast("float", alpha)):
        raise ValueError(f"{key}={folder}: lora_alpha={alpha} in its {CONFIG} is not a finite number; copy the file again")
    return config


def make_peft_config(
    model: ModelSpec, *, rank: int, alpha: float, dropout: float, targets: Sequence[str], base: str, digest: str = ""
) -> dict[str, object]:
    """Return the content of adapter_config.json.

    `digest` is the digest of the base model (base_digest.py).
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({DIGEST: digest} if digest else {}),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": adapted_modules(model, targets) or [],
        **({"target_parameters": parameters} if (parameters := adapted_parameters(model, targets)) else {}),
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
