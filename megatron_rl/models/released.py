"""The four released sizes of Qwen2.5-VL, for what needs no weights: plans of memory, folders of random weights."""

from pathlib import Path

from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.spec import ModelSpec

SIZES = {
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8},
    "72B": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
}
HUB_IDS = {f"Qwen/Qwen2.5-VL-{size}-Instruct": size for size in SIZES}


def released_config(size: str) -> dict[str, object]:
    """A config.json as it was released: flat, with the spellings of transformers 4.41."""
    vision = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16, "in_chans": 3,
        "intermediate_size": 3420 if size in ("3B", "7B") else 3456, "out_hidden_size": SIZES[size]["hidden_size"],
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16", **SIZES[size],
        "vocab_size": 151936 if size == "3B" else 152064, "tie_word_embeddings": size == "3B", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128000, "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656,
        "use_sliding_window": False, "vision_config": vision,
    }  # fmt: skip


def known_spec(path: str, *, key: str = "model.path") -> ModelSpec:
    """Of a model folder, or of a released model by its name on the hub, which need not be here. ValueError under the setting's name."""
    if path in HUB_IDS and not Path(path).exists():
        return parse_spec(released_config(HUB_IDS[path]), folder=path, key=key)
    return read_spec(path, key=key)
