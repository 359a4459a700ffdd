"""Reads a Hugging Face config.json into a ModelSpec.

The language model's fields may be at the top level of the file (flat, transformers 4) or in
`text_config` (nested, transformers 5).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from megatron_rl.io.jsonl import read_json
from megatron_rl.models.config_fields import find_unsupported
from megatron_rl.models.delta_net_layout import DeltaNetSpec
from megatron_rl.models.family import FAMILIES
from megatron_rl.models.model_folder import find_config_file
from megatron_rl.models.model_spec import ExpertSpec, ModelFamily, ModelSpec, VisionSpec

TEXT_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip

MAX_FIELDS = 4
"""Maximum number of fields named in an error message."""


def read_spec(folder: str | Path, *, key: str = "model.path") -> ModelSpec:
    """Return the spec of the model in a Hugging Face folder.

    Raises ValueError if the model is not supported, or if its config.json is missing or damaged.
    The message names `key`, the setting or option that contains the folder.
    """
    path = find_config_file(folder, key=key)
    try:
        stored = read_json(path)
    except ValueError as error:
        raise _damaged_config_error(error, folder=folder, key=key) from error
    return parse_spec(stored, folder=folder, key=key)


def parse_spec(stored: object, *, folder: str | Path, key: str) -> ModelSpec:
    """Return the spec described by the content of a config.json.

    `folder` and `key` are only used in error messages. Raises ValueError if the model is not
    supported or the content is damaged.
    """
    if not isinstance(stored, dict):
        raise _damaged_config_error(f"the file contains a {type(stored).__name__} instead of a JSON object", folder=folder, key=key)
    model_type = stored.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{key}={folder}: config.json has model_type {model_type}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    unsupported = find_unsupported(
        stored,
        text=family.text_fields,
        vision=family.vision_fields,
        is_flat=family.has_flat_config,
        architecture=family.model_class.__name__,
    )
    if unsupported:
        raise ValueError(
            f"{key}={folder}: config.json has unsupported settings: {'; '.join(unsupported[:MAX_FIELDS])}; "
            "use a checkpoint without them, or remove the fields if the model does not use them"
        )
    try:
        config = family.config_class(**stored)  # from_dict also formats the whole config for a log line
    except (ValueError, TypeError, AttributeError, IndexError, StrictDataclassError) as error:
        raise _damaged_config_error(error, folder=folder, key=key) from error
    wrong = _find_config_error(config, family)
    if wrong:
        raise _damaged_config_error(wrong, folder=folder, key=key)
    try:
        text = config.text_config.to_dict()
        experts = family.read_expert_spec(text) if family.read_expert_spec else None
        delta_net = family.read_delta_net_spec(text) if family.read_delta_net_spec else None
    except ValueError as error:
        raise ValueError(f"{key}={folder}: config.json: {error}") from error
    return _build_spec(config, family, experts, delta_net)


def _damaged_config_error(reason: object, *, folder: str | Path, key: str) -> ValueError:
    return ValueError(f"{key}={folder}: config.json is damaged ({' '.join(str(reason).split())}); copy it again")


def _find_config_error(config: PreTrainedConfig, family: ModelFamily) -> str:
    """Describe the first invalid value in a config; return '' if all values are valid.

    The types of most values have already been checked by transformers.
    """
    for part, each in (("", config), ("text_config.", config.text_config), ("vision_config.", config.vision_config)):
        if each.dtype is not None and not (isinstance(each.dtype, torch.dtype) and each.dtype.is_floating_point):
            return f"{part}dtype is {each.dtype}, not a floating-point type of torch"
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    sizes = [("", name, text[name]) for name in (*TEXT_SIZES, family.ffn_size_field)]
    sizes += [("vision_config.", name, vision[name]) for name in family.vision_sizes]
    sizes += [("", "head_dim", text["head_dim"])] if text.get("head_dim") is not None else []
    for part, name, size in sizes:
        if not isinstance(size, int) or size < 1:
            return f"{part}{name} is {size}, not a positive integer"
    wrong = _find_head_mismatch(text, family.read_vision_spec(config.vision_config), family)
    if wrong:
        return wrong
    if vision["hidden_act"] not in ACT2FN:
        return f"vision_config.hidden_act is {vision['hidden_act']}, which transformers does not support"
    rope = text["rope_parameters"]
    numbers = (
        ("rope_theta", rope.get("rope_theta")), ("rms_norm_eps", text["rms_norm_eps"]),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1)),
    )  # fmt: skip
    for name, number in numbers:
        if type(number) not in (int, float) or not 0 < number < math.inf:
            return f"{name} is {number}, not a positive number"
    sections, rotary_dim = rope.get("mrope_section"), _rotary_dim(text)
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(each) is int and each > 0 for each in sections)):
        return f"rope_scaling.mrope_section is {sections}, not three positive integers"
    if 2 * sum(sections) != rotary_dim or rotary_dim > _head_dim(text):
        part = "head size" if rotary_dim == _head_dim(text) else "rotated part of a head"
        return f"rope_scaling.mrope_section is {sections}, with sum {sum(sections)}, not half of the {part}, {rotary_dim}"
    if bool(rope.get("mrope_interleaved")) != family.has_interleaved_mrope:
        return f"rope_scaling.mrope_interleaved is not {str(family.has_interleaved_mrope).lower()}, which this model family requires"
    return ""


def _find_head_mismatch(text: Mapping[str, Any], vision: VisionSpec, family: ModelFamily) -> str:
    """Describe the first contradiction between sizes in a config; return '' if there is none."""
    hidden, heads, key_heads = (text[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = text.get("head_dim")
    if (head_dim is None or not family.has_head_dim) and hidden % heads:
        return f"num_attention_heads is {heads}, which does not divide hidden_size, {hidden}"
    if head_dim is not None and not family.has_head_dim and head_dim * heads != hidden:
        return f"head_dim is {head_dim}, but this model family requires hidden_size / num_attention_heads, {hidden // heads}"
    if heads % key_heads:
        return f"num_key_value_heads is {key_heads}, which does not divide num_attention_heads, {heads}"
    if vision.hidden_size % vision.num_heads:
        return f"vision_config.num_heads is {vision.num_heads}, which does not divide hidden_size, {vision.hidden_size}"
    token_side = vision.patch_size * vision.spatial_merge_size
    if vision.window_size % token_side:
        return f"vision_config.window_size is {vision.window_size}, not a multiple of a vision token's side, {token_side}"
    if vision.out_hidden_size != hidden:
        return f"vision_config.out_hidden_size is {vision.out_hidden_size}, but hidden_size is {hidden}"
    return ""


def _head_dim(text: Mapping[str, Any]) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _rotary_dim(text: Mapping[str, Any]) -> int:
    return int(_head_dim(text) * text["rope_parameters"].get("partial_rotary_factor", 1))


def _build_spec(config: PreTrainedConfig, family: ModelFamily, experts: ExpertSpec | None, delta_net: DeltaNetSpec | None) -> ModelSpec:
    text = config.text_config.to_dict()
    return ModelSpec(
        family=family,
        config=config,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        ffn_size=text[family.ffn_size_field],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=_head_dim(text),
        vocab_size=text["vocab_size"],
        tie_word_embeddings=config.tie_word_embeddings,
        norm_eps=text["rms_norm_eps"],
        max_positions=text["max_position_embeddings"],
        rope_theta=text["rope_parameters"]["rope_theta"],
        rope_sections=tuple(text["rope_parameters"]["mrope_section"]),
        vision=family.read_vision_spec(config.vision_config),
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_id=config.vision_start_token_id,
        vision_end_id=config.vision_end_token_id,
        experts=experts,
        delta_net=delta_net,
        rotary_dim=_rotary_dim(text),
    )
