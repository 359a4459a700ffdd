"""Name mappings of LoRA adapters between PEFT's and Megatron's names and layouts.

PEFT has one adapter for each Hugging Face linear layer: lora_A [rank, inputs] and lora_B [outputs,
rank]. In this trainer, adapters belong to Megatron's (fused) linear layers, are sharded like these
layers, and are named `<linear>.adapter.lora_a.<projection>` and `.lora_b.<projection>`.

For a parameter that stacks the matrices of E experts, PEFT (0.21, tuners/lora/layer.py,
ParamWrapper) has one lora_A [E * rank, inputs], in which the rows of an expert are contiguous, and
one lora_B [outputs, rank * E], in which the columns of an expert are E apart. In this trainer, A is
[E, rank, inputs] and B is [E, rank, outputs], `experts.adapters.<weight>.lora_a` and `.lora_b`
(policy/expert_lora.py).
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_rl.models.delta_net_layout import DeltaNetSpec, fuse_by_key_head, split_convolution
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import ParamMapping, Tensors

LINEARS = {
    "attention": (
        ("self_attention.linear_qkv", "self_attn.q_proj", 0),
        ("self_attention.linear_qkv", "self_attn.k_proj", 0),
        ("self_attention.linear_qkv", "self_attn.v_proj", 0),
        ("self_attention.linear_proj", "self_attn.o_proj", 1),
    ),
    "delta_net": (
        ("self_attention.in_proj_by_head", "linear_attn.in_proj_qkv", 0),
        ("self_attention.in_proj_by_head", "linear_attn.in_proj_z", 0),
        ("self_attention.in_proj_by_head", "linear_attn.in_proj_b", 0),
        ("self_attention.in_proj_by_head", "linear_attn.in_proj_a", 0),
        ("self_attention.out_proj", "linear_attn.out_proj", 1),
    ),
    "mlp": (
        ("mlp.linear_fc1", "mlp.gate_proj", 0),
        ("mlp.linear_fc1", "mlp.up_proj", 0),
        ("mlp.linear_fc2", "mlp.down_proj", 1),
    ),
    "shared_expert": (
        ("mlp.shared_experts.linear_fc1", "mlp.shared_expert.gate_proj", 0),
        ("mlp.shared_experts.linear_fc1", "mlp.shared_expert.up_proj", 0),
        ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj", 1),
    ),
}
"""Adapted linear layers of a decoder layer, keyed by part of the layer (layer_parts). Each entry
consists of Megatron's linear layer, Hugging Face's projection, and the weight dimension that tensor
parallelism shards.
"""


def layer_parts(model: ModelSpec, layer: int, targets: Sequence[str]) -> list[str]:
    """Return the parts of the decoder layer with this global number that the targets select.

    The target attention selects the gated delta net in the layers that have one, and the target mlp
    the experts, with the shared expert if there is one.
    """
    attention, mlp = "delta_net" if model.is_linear(layer) else "attention", ["mlp"]
    if model.is_sparse(layer):
        mlp = ["experts", "shared_expert"] if model.experts and model.experts.shared_ffn_size else ["experts"]
    parts = {"attention": [attention], "mlp": mlp}
    return [part for target, found in parts.items() if target in targets for part in found]


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


def adapter_table(model: ModelSpec, *, targets: Sequence[str], vision_names: Sequence[str]) -> list[ParamMapping]:
    """Return the name mappings of all adapter tensors.

    `vision_names` are the parameter names of the Hugging Face vision tower, without the prefix
    `visual.`. Adapters of the vision tower are not sharded.
    """
    rows = []
    for layer in range(model.num_layers):
        mcore, hf, stage = f"language.decoder.layers.{layer}.", f"model.layers.{layer}.", f"layer:{layer}"
        for part in layer_parts(model, layer, targets):
            if part == "experts":
                assert model.experts is not None
                rows.extend(_expert_rows(mcore, hf, stage, model.experts.num_experts))
            for linear, projection, cut in LINEARS.get(part, ()):
                rows.extend(_lora_rows(mcore + linear, hf + projection, stage, cut=cut, delta_net=model.delta_net))
    modules = sorted(name.removesuffix(".weight") for name in vision_names if name.endswith(".weight"))
    for module in modules:
        if is_vision_target(module, targets, model.family.vision_lora_patterns):
            rows.extend(_lora_rows(f"vision.{module}", f"visual.{module}", "first", cut=None))
    return rows


def _lora_rows(linear: str, hf: str, stage: str, *, cut: int | None, delta_net: DeltaNetSpec | None = None) -> list[ParamMapping]:
    """Return the name mappings of A and B for one linear layer.

    With cut=0, tensor parallelism shards the rows of the layer's weight: ranks compute different
    outputs, so B is sharded. With cut=1, tensor parallelism shards the columns: ranks have
    different inputs, so A is sharded. With cut=None, A and B are replicated.

    Hugging Face's rows of in_proj_qkv are those of all queries, all keys and all values. In the
    adapter they are sorted by key head, as in the layer's weight (models/delta_net_layout.py).
    """
    name, order = projection_name(hf), {}
    if name == "in_proj_qkv":
        assert delta_net is not None
        order = {"fuse": partial(fuse_by_key_head, spec=delta_net), "split": partial(split_convolution, spec=delta_net)}
    return [
        ParamMapping(f"{linear}.adapter.lora_a.{name}", (f"{hf}.lora_A.weight",), stage, shard_dim=1 if cut == 1 else None),
        ParamMapping(f"{linear}.adapter.lora_b.{name}", (f"{hf}.lora_B.weight",), stage, shard_dim=0 if cut == 0 else None, **order),
    ]


def _expert_rows(mcore: str, hf: str, stage: str, num_experts: int) -> list[ParamMapping]:
    """Return the name mappings of A and B for the experts of a layer.

    PEFT wraps the module twice. The inner wrapper, `base_layer` of the outer one, adapts
    gate_up_proj, the module's first parameter.
    """
    mcore, hf = f"{mcore}mlp.experts.adapters.", f"{hf}mlp.experts."
    a: dict[str, Any] = {"fuse": lambda tensors: stack_a(tensors[0], num_experts), "split": unstack_a, "expert_dim": 0}
    b: dict[str, Any] = {"fuse": lambda tensors: stack_b(tensors[0], num_experts), "split": unstack_b, "expert_dim": 0}
    gate_up = {**b, "fuse": lambda tensors: stack_b(tensors[0], num_experts).unflatten(2, (2, -1))}
    return [
        ParamMapping(f"{mcore}linear_fc1.lora_a", (f"{hf}base_layer.lora_A.weight",), stage, **a),
        ParamMapping(f"{mcore}linear_fc1.lora_b", (f"{hf}base_layer.lora_B.weight",), stage, shard_dim=3, **gate_up),
        ParamMapping(f"{mcore}linear_fc2.lora_a", (f"{hf}lora_A.weight",), stage, shard_dim=2, **a),
        ParamMapping(f"{mcore}linear_fc2.lora_b", (f"{hf}lora_B.weight",), stage, **b),
    ]


def stack_a(a: torch.Tensor, num_experts: int) -> torch.Tensor:
    """View PEFT's lora_A [E * R, I] of E experts as [E, R, I]."""
    return a.unflatten(0, (num_experts, -1))


def stack_b(b: torch.Tensor, num_experts: int) -> torch.Tensor:
    """View PEFT's lora_B [O, R * E] of E experts as [E, R, O]."""
    return b.unflatten(1, (-1, num_experts)).permute(2, 1, 0)


def unstack_a(a: torch.Tensor) -> Tensors:
    """Return lora_A in PEFT's form; inverse of `stack_a`."""
    return (a.flatten(0, 1),)


def unstack_b(b: torch.Tensor) -> Tensors:
    """Return lora_B in PEFT's form, given [E, R, O] or [E, R, 2, F]; inverse of `stack_b`."""
    return (b.flatten(2).permute(2, 1, 0).flatten(1),)


def adapted_weight_name(adapter: str) -> str:
    """Return the name of the parameter that an adapter module adapts, given the module's name."""
    return adapter.replace(".adapters.", ".") if ".adapters." in adapter else adapter.removesuffix(".adapter") + ".weight"


def adapted_tensor(module: str) -> str:
    """Return the base model's tensor that lora_A and lora_B of this module of PEFT's model change.

    Names are canonical.
    """
    if module.endswith(".mlp.experts"):
        return f"{module}.down_proj"
    return f"{module.removesuffix('base_layer')}gate_up_proj" if module.endswith(".mlp.experts.base_layer") else f"{module}.weight"


EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Parameters of PEFT's target_parameters for adapters on experts."""


def adapted_parameters(model: ModelSpec, targets: Sequence[str]) -> list[str]:
    """Return PEFT's target_parameters for the targets; empty if no experts are adapted."""
    has_experts = any("experts" in layer_parts(model, layer, targets) for layer in range(model.num_layers))
    return list(EXPERT_PARAMETERS) if has_experts else []


def adapted_modules(model: ModelSpec, targets: Sequence[str]) -> str:
    """Return a regular expression for the full names of the adapted modules in PEFT's model.

    A list of suffixes such as gate_proj could match modules of both the language model and the
    vision tower.
    """
    parts = dict.fromkeys(part for layer in range(model.num_layers) for part in layer_parts(model, layer, targets))
    language = "|".join(re.escape(hf) for part in parts for _, hf, _ in LINEARS.get(part, ()))
    vision = "|".join(pattern for target, pattern in model.family.vision_lora_patterns.items() if target in targets)
    patterns = [rf"model\.language_model\.layers\.\d+\.({language})"] * bool(language) + [rf"model\.visual\.({vision})"] * bool(vision)
    return "|".join(patterns)
