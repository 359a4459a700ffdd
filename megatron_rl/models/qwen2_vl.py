"""Qwen2-VL (arXiv 2409.12191).

The model consists of the language model of Qwen2.5-VL and a vision tower with LayerNorm, MLPs
without gates, and attention without windows.
"""

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from megatron_rl.models.config_fields import QWEN2_TEXT, QWEN2_VISION
from megatron_rl.models.decoder import qwen2_layer_mappings
from megatron_rl.models.megatron_tower import qwen2_vl_tower_mappings
from megatron_rl.models.model_spec import SHARED_SIZES, ModelFamily, VisionSpec
from megatron_rl.models.mrope import mrope_positions


def vision_spec(config: Qwen2VLVisionConfig) -> VisionSpec:
    """Build a VisionSpec from a vision_config.

    In this vision_config, embed_dim is the width of the tower, and hidden_size is the width of the
    language model.
    """
    return VisionSpec.from_config(
        config,
        hidden_size=config.embed_dim,
        ffn_size=config.embed_dim * config.mlp_ratio,
        out_hidden_size=config.hidden_size,
        mlp_saved_factor=3,
    )


QWEN2_VL = ModelFamily(
    config_class=Qwen2VLConfig,
    model_class=Qwen2VLForConditionalGeneration,
    text_fields=QWEN2_TEXT,
    vision_fields=QWEN2_VISION,
    has_flat_config=True,
    tower_class=Qwen2VisionTransformerPretrainedModel,
    tower_norm_class=None,
    tower_mlp_class=None,
    has_qk_norm=False,
    has_head_dim=False,
    vision_sizes=(*SHARED_SIZES, "embed_dim", "hidden_size", "mlp_ratio"),
    read_vision_spec=vision_spec,
    layer_mappings=qwen2_layer_mappings,
    megatron_tower_mappings=qwen2_vl_tower_mappings,
    megatron_config={"add_qkv_bias": True},
    uses_nested_names=False,
    has_interleaved_mrope=False,
    rope_positions=mrope_positions,
    part_patterns={"vision": ("vision.patch_embed.*", "vision.blocks.*"), "merger": ("vision.merger.*",), "language": ("language.*",)},
    vision_lora_patterns={"vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(fc1|fc2))", "projector": r"merger\.mlp\.[02]"},
)
