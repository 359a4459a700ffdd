"""Qwen3-VL, dense models (arXiv 2511.21631).

The model consists of Qwen3's language model, with norms on queries and keys, and a vision tower
with learned position embeddings. Three intermediate blocks of the tower have separate mergers. The
merged outputs are added to the image tokens after the first three decoder layers (DeepStack).
"""

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from megatron_rl.models.config_fields import QWEN3_TEXT, QWEN3_VISION
from megatron_rl.models.decoder import qwen3_layer_mappings
from megatron_rl.models.megatron_tower import qwen3_vl_tower_mappings
from megatron_rl.models.model_spec import SHARED_SIZES, ModelFamily, VisionSpec
from megatron_rl.models.mrope import mrope_positions


def vision_spec(config: Qwen3VLVisionConfig) -> VisionSpec:
    """Build a VisionSpec from a vision_config."""
    return VisionSpec.from_config(
        config, hidden_size=config.hidden_size, ffn_size=config.intermediate_size, out_hidden_size=config.out_hidden_size,
        num_deepstack_layers=len(config.deepstack_visual_indexes), num_position_embeddings=config.num_position_embeddings,
        mlp_saved_factor=2,
    )  # fmt: skip


QWEN3_VL = ModelFamily(
    config_class=Qwen3VLConfig,
    model_class=Qwen3VLForConditionalGeneration,
    text_fields=QWEN3_TEXT,
    vision_fields=QWEN3_VISION,
    has_flat_config=False,
    tower_class=Qwen3VLVisionModel,
    tower_norm_class=None,
    tower_mlp_class=None,
    has_qk_norm=True,
    has_head_dim=True,
    vision_sizes=(*SHARED_SIZES, "hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings"),
    read_vision_spec=vision_spec,
    layer_mappings=qwen3_layer_mappings,
    megatron_tower_mappings=qwen3_vl_tower_mappings,
    megatron_config={},
    uses_nested_names=True,
    has_interleaved_mrope=True,
    rope_positions=mrope_positions,
    part_patterns={
        "vision": ("vision.patch_embed.*", "vision.pos_embed.*", "vision.blocks.*"),
        "merger": ("vision.merger.*", "vision.deepstack_merger_list.*"),
        "language": ("language.*",),
    },
    vision_lora_patterns={
        "vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])",
        "projector": r"(merger|deepstack_merger_list\.\d+)\.linear_fc[12]",
    },
)  # fmt: skip
