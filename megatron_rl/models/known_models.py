"""Sizes of released models, used for memory plans and for models with random weights."""

from pathlib import Path
from typing import cast

from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.model_spec import ModelSpec

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_TABLE = {
    "qwen2_5_vl": {
        "3B": (2048, 11008, 36, 16, 2), "7B": (3584, 18944, 28, 28, 4), "32B": (5120, 27648, 64, 40, 8), "72B": (8192, 29568, 80, 64, 8),
    },
    "qwen2_vl": {"2B": (1536, 8960, 28, 12, 2), "7B": (3584, 18944, 28, 28, 4), "72B": (8192, 29568, 80, 64, 8)},
    "qwen3_vl": {
        "2B": (2048, 6144, 28, 16, 8), "4B": (2560, 9728, 36, 32, 8), "8B": (4096, 12288, 36, 32, 8), "32B": (5120, 25600, 64, 64, 8),
    },
    "qwen3_vl_moe": {"30B-A3B": (2048, 6144, 48, 32, 4), "235B-A22B": (4096, 12288, 94, 64, 4)},
    "qwen3_5": {"9B": (4096, 12288, 32, 16, 4), "27B": (5120, 17408, 64, 24, 4)},
    "qwen3_5_moe": {"35B-A3B": (2048, 512, 40, 16, 2), "397B-A17B": (4096, 1024, 60, 32, 2)},
}  # fmt: skip
RELEASED_SIZES: dict[str, dict[str, dict[str, int]]] = {
    family: {size: dict(zip(_NAMES, numbers, strict=True)) for size, numbers in sizes.items()} for family, sizes in _TABLE.items()
}  # fmt: skip
"""Sizes of the language models, keyed by model_type and model size. Models of Qwen3.5 with experts
have the intermediate size of their shared expert.
"""
_HUB_NAMES = {
    "qwen2_5_vl": "Qwen2.5-VL-{}-Instruct", "qwen2_vl": "Qwen2-VL-{}-Instruct", "qwen3_vl": "Qwen3-VL-{}-Instruct",
    "qwen3_vl_moe": "Qwen3-VL-{}-Instruct", "qwen3_5": "Qwen3.5-{}", "qwen3_5_moe": "Qwen3.5-{}",
}  # fmt: skip
HUB_IDS = {f"Qwen/{_HUB_NAMES[family].format(size)}": (family, size) for family, sizes in RELEASED_SIZES.items() for size in sizes}
"""Maps a released model's name on the Hugging Face hub to (model_type, model size)."""
_EXPERT_SIZES = {"30B-A3B": 768, "235B-A22B": 1536}
"""Intermediate size of one of the 128 experts of Qwen3-VL, keyed by model size."""
_EXPERTS_OF_QWEN3_5 = {"35B-A3B": (256, 8), "397B-A17B": (512, 10)}
"""Number of experts, and of those that compute a token, keyed by model size."""
_VISION_TOKEN_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656}
_PATCH_SIZES = {"spatial_merge_size": 2, "temporal_patch_size": 2}


def make_released_config(size: str, *, family: str = "qwen2_5_vl") -> dict[str, object]:
    """Return the content of a released model's config.json.

    For Qwen3-VL and Qwen3.5, the content is nested, with the field names of transformers 4.57. For
    the older families, the content is flat, with the field names of transformers 4.41.
    """
    make = {
        "qwen2_5_vl": _qwen2_5_vl, "qwen2_vl": _qwen2_vl, "qwen3_vl": _qwen3_vl, "qwen3_vl_moe": _qwen3_vl_moe, "qwen3_5": _qwen3_5,
        "qwen3_5_moe": _qwen3_5_moe,
    }  # fmt: skip
    return make[family](size, RELEASED_SIZES[family][size])


def _qwen2_5_vl(size: str, sizes: dict[str, int]) -> dict[str, object]:
    vision = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16, "in_chans": 3,
        "intermediate_size": 3420 if size in ("3B", "7B") else 3456, "out_hidden_size": sizes["hidden_size"],
        "patch_size": 14, "spatial_patch_size": 14, "window_size": 112, **_PATCH_SIZES,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    }  # fmt: skip
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **_language_of_qwen2(sizes),
        "vocab_size": 151936 if size == "3B" else 152064, "tie_word_embeddings": size == "3B",
        "max_position_embeddings": 128000, "vision_config": vision,
    }  # fmt: skip


def _qwen2_vl(size: str, sizes: dict[str, int]) -> dict[str, object]:
    vision = {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": sizes["hidden_size"],
        "patch_size": 14, "spatial_patch_size": 14, **_PATCH_SIZES,
    }  # fmt: skip
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", **_language_of_qwen2(sizes),
        "vocab_size": 151936 if size == "2B" else 152064, "tie_word_embeddings": size == "2B",
        "max_position_embeddings": 32768, "vision_config": vision,
    }  # fmt: skip


def _language_of_qwen2(sizes: dict[str, int]) -> dict[str, object]:
    pairs = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    spatial = 3 * pairs // 8
    return {
        **sizes, **_VISION_TOKEN_IDS, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [pairs - 2 * spatial, spatial, spatial]}, "use_sliding_window": False,
    }  # fmt: skip


def _qwen3_vl(size: str, sizes: dict[str, int]) -> dict[str, object]:
    is_small = size in ("2B", "4B")
    tower = (24, 1024, 4096, [5, 11, 17]) if is_small else (27, 1152, 4304, [8, 16, 24])
    vision = {
        **dict(zip(("depth", "hidden_size", "intermediate_size", "deepstack_visual_indexes"), tower, strict=True)), **_PATCH_SIZES,
        "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "num_heads": 16, "num_position_embeddings": 2304,
        "out_hidden_size": sizes["hidden_size"], "patch_size": 16,
    }  # fmt: skip
    text = {
        **sizes, "model_type": "qwen3_vl_text", "head_dim": 128, "attention_bias": False, "dtype": "bfloat16", "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "vocab_size": 151936,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": is_small,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", **_VISION_TOKEN_IDS,
        "tie_word_embeddings": is_small,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


def _qwen3_vl_moe(size: str, sizes: dict[str, int]) -> dict[str, object]:
    """Return the config of a dense model of these sizes, with fields for experts in every layer."""
    config = _qwen3_vl(size, sizes)
    text, vision = cast("dict[str, object]", config["text_config"]), cast("dict[str, object]", config["vision_config"])
    experts = {
        "model_type": "qwen3_vl_moe_text", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": _EXPERT_SIZES[size],
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {
        **config, "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text | experts,
        "vision_config": vision | {"model_type": "qwen3_vl_moe"},
    }  # fmt: skip


def _qwen3_5(size: str, sizes: dict[str, int]) -> dict[str, object]:
    """Return the config of a model with attention in every fourth layer.

    The sizes of the 9B model are the defaults of transformers 5.19 (Qwen3_5TextConfig).
    """
    config = _qwen3_vl(size, sizes)
    vision = cast("dict[str, object]", config["vision_config"])
    text = {
        **sizes, "model_type": "qwen3_5_text", "head_dim": 256, "attention_bias": False, "dtype": "bfloat16", "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "vocab_size": 248320, "attn_output_gate": True,
        "layer_types": [("linear_attention", "full_attention")[layer % 4 == 3] for layer in range(sizes["num_hidden_layers"])],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 2 * sizes["num_attention_heads"], "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    return {
        **config, "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "vision_config": vision | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
        "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    }  # fmt: skip


def _qwen3_5_moe(size: str, sizes: dict[str, int]) -> dict[str, object]:
    """Return the config of a dense model of these sizes, with experts of the MLP's size.

    The sizes of the 35B model are the defaults of transformers 5.19 (Qwen3_5MoeTextConfig).
    """
    config = _qwen3_5(size, sizes)
    text, vision = cast("dict[str, object]", config["text_config"]), cast("dict[str, object]", config["vision_config"])
    num_experts, top_k = _EXPERTS_OF_QWEN3_5[size]
    ffn = text.pop("intermediate_size")
    text |= {
        "model_type": "qwen3_5_moe_text", "num_experts": num_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn, "router_aux_loss_coef": 0.001, "mlp_only_layers": [],
    }  # fmt: skip
    return {
        **config, "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
        "vision_config": vision | {"model_type": "qwen3_5_moe"},
    }  # fmt: skip


def load_known_spec(path: str, *, key: str = "model.path") -> ModelSpec:
    """Return the spec of a model folder, or of a released model given by its name on the hub.

    A released model need not be downloaded. Raises ValueError if `path` is neither a supported
    model folder nor a released model. The message names `key`, the setting that contains `path`.
    """
    if path in HUB_IDS and not Path(path).exists():
        family, size = HUB_IDS[path]
        return parse_spec(make_released_config(size, family=family), folder=path, key=key)
    return read_spec(path, key=key)
