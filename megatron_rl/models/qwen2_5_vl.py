"""Qwen2.5-VL: Qwen2's language model with biases on q, k and v, and a windowed vision tower with a gated MLP (arXiv 2502.13923)."""

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLRMSNorm

from megatron_rl.models.config_fields import QWEN2_5_VISION, QWEN2_TEXT
from megatron_rl.models.decoder import qwen2_rows
from megatron_rl.models.megatron_tower import qwen2_5_vl_tower
from megatron_rl.models.model_spec import SHARED_SIZES, Family, VisionSpec
from megatron_rl.models.mrope import mrope_positions


def vision_spec(config: Qwen2_5_VLVisionConfig) -> VisionSpec:
    return VisionSpec.of(
        config, hidden_size=config.hidden_size, ffn_size=config.intermediate_size, out_hidden_size=config.out_hidden_size,
        window=config.window_size, mlp_keeps=4,
    )  # fmt: skip


QWEN2_5_VL = Family(
    config=Qwen2_5_VLConfig,
    model=Qwen2_5_VLForConditionalGeneration,
    text_fields=QWEN2_TEXT,
    vision_fields=QWEN2_5_VISION,
    has_flat_config=True,
    tower=Qwen2_5_VisionTransformerPretrainedModel,
    tower_norm=Qwen2_5_VLRMSNorm,
    norms_heads=False,
    has_head_dim=False,
    vision_sizes=(*SHARED_SIZES, "hidden_size", "intermediate_size", "out_hidden_size", "window_size"),
    vision=vision_spec,
    layer_rows=qwen2_rows,
    megatron_tower=qwen2_5_vl_tower,
    megatron={"add_qkv_bias": True},
    is_nested=False,
    is_interleaved=False,
    positions=mrope_positions,
    parts={"vision": ("vision.patch_embed.*", "vision.blocks.*"), "merger": ("vision.merger.*",), "language": ("language.*",)},
    vision_lora={
        "vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate_proj|up_proj|down_proj))",
        "projector": r"merger\.mlp\.[02]",
    },
)
