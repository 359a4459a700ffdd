"""Supported fields of config.json; any other field is rejected.

An unknown field may change the model's computation (rope scaling, sliding windows, scaled or
skipped layers), but transformers and vLLM accept unknown fields without a warning. Each mapping in
this module maps fields to accepted values, which are either ANY or a tuple of values that leave the
computation unchanged. Fields with the value null are treated as absent. The fields were collected
from the config classes of transformers 5.19 (models/*/configuration_*.py and
configuration_utils.py) and from files written by versions 4.41 to 4.57.
"""

from collections.abc import Iterator, Mapping
from typing import Any

ANY = None
"""Marks a field for which every value is accepted, because the field is read elsewhere
(hf_config.py, transformers' vision tower) or has no effect on the computation.
"""
Fields = Mapping[str, tuple | None]

_BOOKKEEPING: Fields = dict.fromkeys(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation", "_name_or_path",
        "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label", "initializer_range",
        "label2id", "model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "pad_token_id", "prefix",
        "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_last_hidden_states",
        "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_cache", "use_return_dict",
    ),
    ANY,
)  # fmt: skip
"""Names, token ids, dtypes and labels, which have no effect on a forward pass."""
_GENERATION: Fields = dict.fromkeys(
    (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff",
        "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
        "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
    ),
    ANY,
)  # fmt: skip
"""Generation settings in older configs; ignored, because the run's settings determine sampling."""
_NEUTRAL: Fields = {
    "add_cross_attention": (False,), "auto_map": ({},), "chunk_size_feed_forward": (0,), "is_decoder": (False,),
    "is_encoder_decoder": (False,), "per_layer_config": ({},), "pruned_heads": ({},), "quantization_config": (),
    "tie_encoder_decoder": (False,),
}  # fmt: skip
"""Fields common to all transformers configs that can change the computation. Only values that leave
the computation unchanged are accepted.
"""
_COMMON: Fields = {**_BOOKKEEPING, **_GENERATION, **_NEUTRAL}

_SPECIAL_TOKENS: Fields = dict.fromkeys(
    ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"), ANY
)
_TOP: Fields = {**_COMMON, **_SPECIAL_TOKENS, **dict.fromkeys(("text_config", "vision_config", "tie_word_embeddings"), ANY)}

LANGUAGE_SIZE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "head_dim",
)  # fmt: skip
"""Fields of the language model that may occur both at the top level and in text_config. If a config
contains such a field in both places, the two values must be equal.
"""
_LANGUAGE: Fields = {
    **dict.fromkeys((*LANGUAGE_SIZE_FIELDS, "max_position_embeddings", "max_window_layers", "rope_scaling", "rope_parameters",
    "rope_theta"), ANY),
    "hidden_act": ("silu",), "attention_dropout": (0,), "partial_rotary_factor": (1,), "use_sliding_window": (False,),
    "mlp_bias": (False,), "pretraining_tp": (1,),
}  # fmt: skip
QWEN2_TEXT: Fields = {**_LANGUAGE, "sliding_window": ANY, "attention_bias": (True,), "qkv_bias": (True,)}
"""Fields of the language model of Qwen2-VL and Qwen2.5-VL. sliding_window is ignored unless
use_sliding_window is true; q, k and v always have biases.
"""
QWEN3_TEXT: Fields = {**_LANGUAGE, "sliding_window": (), "attention_bias": (False,), "qkv_bias": (False,)}
QWEN3_MOE_TEXT: Fields = {
    **QWEN3_TEXT,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
         "output_router_logits", "router_aux_loss_coef"),
        ANY,
    ),
    "norm_topk_prob": (True,), "shared_expert_intermediate_size": (0,), "num_shared_experts": (0,),
}  # fmt: skip
"""Fields of the language model of Qwen3-VL with experts. transformers always normalizes the weights
of a token's experts; vLLM does so if norm_topk_prob is true. output_router_logits and
router_aux_loss_coef only affect the loss that transformers computes.
"""

QWEN3_5_TEXT: Fields = {
    **QWEN3_TEXT,
    **dict.fromkeys(
        ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
         "full_attention_interval", "partial_rotary_factor", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
        ANY,
    ),
    "layer_types": ("linear_attention", "full_attention"), "attn_output_gate": (True,), "output_gate_type": ("silu", "swish"),
    "mlp_only_layers": ([],),
}  # fmt: skip
"""Fields of the language model of Qwen3.5. The layers for multi-token prediction are not trained.
full_attention_interval is only read by transformers, if layer_types is missing. mamba_ssm_dtype is
the dtype of the state in the engine; the trainer always uses float32.
"""
QWEN3_5_MOE_TEXT: Fields = {
    **QWEN3_5_TEXT,
    **dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "output_router_logits",
         "router_aux_loss_coef"),
        ANY,
    ),
    "norm_topk_prob": (True,), "decoder_sparse_step": (1,),
}  # fmt: skip
"""Fields of the language model of Qwen3.5 with experts. transformers always normalizes the weights
of a token's experts; vLLM does so unless norm_topk_prob is false. intermediate_size has no effect.
"""

_TOWER: Fields = {
    **_COMMON,
    **dict.fromkeys(
        ("depth", "hidden_size", "num_heads", "in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size", "hidden_act",
         "tokens_per_second", "rope_parameters"),
        ANY,
    ),
    "attention_dropout": (0,), "rope_theta": (10000,),
}  # fmt: skip
QWEN2_VISION: Fields = {**_TOWER, "embed_dim": ANY, "mlp_ratio": ANY, "hidden_act": ("quick_gelu",)}
"""Fields of Qwen2-VL's vision tower. vLLM 0.32 computes quick_gelu regardless of hidden_act."""
QWEN2_5_VISION: Fields = {
    **_TOWER, **dict.fromkeys(("intermediate_size", "out_hidden_size", "window_size", "fullatt_block_indexes"), ANY),
}  # fmt: skip
QWEN3_VISION: Fields = {
    **_TOWER, **dict.fromkeys(("intermediate_size", "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes"), ANY),
}  # fmt: skip
QWEN3_5_VISION: Fields = {**QWEN3_VISION, "deepstack_visual_indexes": ([],)}
"""Fields of Qwen3.5's vision tower, which is that of Qwen3-VL without DeepStack."""
_VISION_COPIES = {"in_chans": ("in_channels", 3), "spatial_patch_size": ("patch_size", None), "num_attention_heads": ("num_heads", None)}
"""Maps an alternative field name in vision_config to the field that must have the same value, and
to the default value of that field in transformers.
"""
_ROPE: Fields = {
    **dict.fromkeys(("mrope_section", "mrope_interleaved", "rope_theta"), ANY),
    "rope_type": ("default", "mrope"), "type": ("default", "mrope"), "factor": (1,),
}  # fmt: skip
_TOWER_ROPE: Fields = {"rope_type": ("axial", "default"), "type": ("axial", "default"), "rope_theta": (10000,)}


def find_unsupported(stored: Mapping[str, Any], *, text: Fields, vision: Fields, is_flat: bool, architecture: str) -> list[str]:
    """Return one phrase per unsupported field of a config.json, with the field's path and value.

    Args:
        stored: Content of config.json, flat or nested.
        text: Supported fields of the family's language model.
        vision: Supported fields of the family's vision tower.
        is_flat: True if the family's config class reads the language model's fields at the top
            level when there is no text_config.
        architecture: The only supported class name in `architectures`.
    """
    language = {**text, "layer_types": ANY}
    found = [*_find_unaccepted(stored, {**language, **_TOP}, ""), *_find_language_problems(stored, text, "")]
    if stored.get("architectures") not in (None, [], [architecture]):
        found.append(f"architectures is {_short(stored['architectures'])}, not {architecture}")
    text_config, vision_config = stored.get("text_config"), stored.get("vision_config")
    nested = text_config if isinstance(text_config, dict) else {}
    fields = {**language, **_COMMON, **_SPECIAL_TOKENS, "tie_word_embeddings": ANY}
    found += [*_find_unaccepted(nested, fields, "text_config."), *_find_language_problems(nested, text, "text_config.")]
    if isinstance(text_config, dict) or not is_flat:
        found += _find_size_conflicts(stored, nested)
    if isinstance(vision_config, dict):
        originals = {name: value for name, value in vision_config.items() if name not in _VISION_COPIES}
        found += [*_find_unaccepted(originals, vision, "vision_config."), *_find_tower_problems(vision_config)]
    return [*found, *_find_rope_conflicts(stored, nested)]


def _find_unaccepted(stored: Mapping[str, Any], fields: Fields, path: str) -> Iterator[str]:
    for name, value in stored.items():
        if value is None:
            continue
        if name not in fields:
            yield f"{path}{name} is {_short(value)}, an unknown field"
        elif (accepted := fields[name]) is not None and not any(_equal(value, each) for each in accepted):
            known = " or ".join(map(str, accepted)) or "none"
            yield f"{path}{name} is {_short(value)}, supported: {known}"


def _equal(value: object, known: object) -> bool:
    """Return True if two JSON values are equal: 0 equals 0.0, and false does not equal 0."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _find_language_problems(stored: Mapping[str, Any], text: Fields, path: str) -> Iterator[str]:
    """Yield a phrase for unsupported layer types, experts and rotary settings."""
    layers = stored.get("layer_types")
    known = text.get("layer_types") or ("full_attention",)
    if layers is not None and (not isinstance(layers, list) or any(layer not in known for layer in layers)):
        other = layers if not isinstance(layers, list) else next(layer for layer in layers if layer not in known)
        yield f"{path}layer_types contains {_short(other)}, supported: {' or '.join(known)}"
    experts, local = stored.get("num_experts"), stored.get("num_local_experts")
    if None not in (experts, local) and experts != local:
        yield f"{path}num_experts is {_short(experts)}, but num_local_experts, another name of this field, is {_short(local)}"
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(stored.get(name), dict):
            fields = {**_ROPE, "partial_rotary_factor": text["partial_rotary_factor"]}
            yield from _find_unaccepted(stored[name], fields, f"{path}{name}.")


def _find_tower_problems(vision: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(vision.get("rope_parameters"), dict):
        yield from _find_unaccepted(vision["rope_parameters"], _TOWER_ROPE, "vision_config.rope_parameters.")
    for name, (original, default) in _VISION_COPIES.items():
        stated = vision.get(original, default)
        if vision.get(name) is not None and stated is not None and vision[name] != stated:
            yield f"vision_config.{name} is {_short(vision[name])}, but {original}, which is used, is {_short(stated)}"


def _find_size_conflicts(stored: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each size at the top level that differs from the size in text_config.

    Only the size in text_config is read by transformers.
    """
    for name in LANGUAGE_SIZE_FIELDS:
        if stored.get(name) is not None and stored[name] != text.get(name):
            yield f"{name} is {_short(stored[name])}, but text_config.{name}, which is used, is {_short(text.get(name))}"


def _find_rope_conflicts(stored: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each rotary setting that has conflicting values in a config.

    Such a config is ambiguous, because libraries read the setting from different places.
    """
    places: dict[str, object] = {}
    for path, part in (("", stored), ("text_config.", text)):
        places |= {f"{path}{name}": part[name] for name in ("rope_theta", "partial_rotary_factor") if part.get(name) is not None}
        for group in ("rope_scaling", "rope_parameters"):
            if isinstance(part.get(group), dict):
                places |= {f"{path}{group}.{name}": value for name, value in part[group].items() if value is not None}
    for name in ("rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor"):
        same = [(path, value) for path, value in places.items() if path.rpartition(".")[2] == name]
        other = next((pair for pair in same if pair[1] != same[0][1]), None)
        if other is not None:
            yield f"{other[0]} is {_short(other[1])}, but {same[0][0]} is {_short(same[0][1])}"
