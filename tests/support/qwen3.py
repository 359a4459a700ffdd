"""The spec of Qwen3-VL-4B from its config.json, without weights: features of three vision layers
are added in the decoder (DeepStack), and patches have 16 pixels.
"""

from megatron_rl.models.hf_config import parse_spec
from megatron_rl.models.model_spec import ModelSpec


def qwen3_4b_spec() -> ModelSpec:
    text = {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "bos_token_id": 151643, "eos_token_id": 151645, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "deepstack_visual_indexes": [5, 11, 17],
        "num_position_embeddings": 2304,
    }  # fmt: skip
    stored = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": True}
    return parse_spec(stored, folder="Qwen3-VL-4B", key="model.path")
