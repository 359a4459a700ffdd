"""Qwen2.5-VL (arXiv 2502.13923).

The model consists of Qwen2's language model, with biases on q, k and v, and a vision tower with
window attention and gated MLPs.
"""

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLMLP, Qwen2_5_VLRMSNorm

from megatron_rl.models.config_fields import QWEN2_5_VISION, QWEN2_TEXT
from megatron_rl.models.decoder import qwen2_layer_mappings
from megatron_rl.models.megatron_tower import qwen2_5_vl_tower_mappings
from megatron_rl.models.model_spec import SHARED_SIZES, ModelFamily, VisionSpec
from megatron_rl.models.mrope import mrope_positions


def vision_spec(config: Qwen2_5_VLVisionConfig) -> VisionSpec:
    """Build a VisionSpec from a vision_config."""
    return VisionSpec.from_config(
        config, hidden_size=config.hidden_size, ffn_size=config.intermediate_size, out_hidden_size=config.out_hidden_size,
        window_size=config.window_size, mlp_saved_factor=3,
    )  # fmt: skip


QWEN2_5_VL = ModelFamily(
    config_class=Qwen2_5_VLConfig,
    model_class=Qwen2_5_VLForConditionalGeneration,
    text_fields=QWEN2_TEXT,
    vision_fields=QWEN2_5_VISION,
    has_flat_config=True,
    tower_class=Qwen2_5_VisionTransformerPretrainedModel,
    tower_norm_class=Qwen2_5_VLRMSNorm,
    tower_mlp_class=Qwen2_5_VLMLP,
    has_qk_norm=False,
    has_head_dim=False,
    vision_sizes=(*SHARED_SIZES, "hidden_size", "intermediate_size", "out_hidden_size", "window_size"),
    read_vision_spec=vision_spec,
    layer_mappings=qwen2_layer_mappings,
    megatron_tower_mappings=qwen2_5_vl_tower_mappings,
    megatron_config={"add_qkv_bias": True},
    uses_nested_names=False,
    has_interleaved_mrope=False,
    rope_positions=mrope_positions,
    part_patterns={"vision": ("vision.patch_embed.*", "vision.blocks.*"), "merger": ("vision.merger.*",), "language": ("language.*",)},
    vision_lora_patterns={
        "vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate_proj|up_proj|down_proj))",
        "projector": r"merger\.mlp\.[02]",
    },
)
