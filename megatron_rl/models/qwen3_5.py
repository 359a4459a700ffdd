"""Qwen3.5, dense models: gated delta nets and gated attention.

Most layers have a gated delta net (arXiv 2412.06464), a recurrent layer, the cost of which is
linear in the length of a sequence. The other layers have attention, the output of which is
multiplied by the sigmoid of a gate. Attention rotates only some of the channels of a head. All
norms but that of the delta net's output multiply by 1 plus their weight. The vision tower is that
of Qwen3-VL without DeepStack.

Released checkpoints also contain a layer for multi-token prediction (mtp.*). transformers and this
project do not read it, and it is not written.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5VisionModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

from megatron_rl.models.config_fields import QWEN3_5_TEXT, QWEN3_5_VISION
from megatron_rl.models.decoder import qwen3_5_layer_mappings
from megatron_rl.models.delta_net_layout import DeltaNetSpec
from megatron_rl.models.model_spec import VisionSpec
from megatron_rl.models.qwen3_vl import QWEN3_VL

LAYER_TYPES = ("linear_attention", "full_attention")


def vision_spec(config: Qwen3_5VisionConfig) -> VisionSpec:
    """Build a VisionSpec from a vision_config."""
    return VisionSpec.from_config(
        config, hidden_size=config.hidden_size, ffn_size=config.intermediate_size, out_hidden_size=config.out_hidden_size,
        num_position_embeddings=config.num_position_embeddings, mlp_saved_factor=2,
    )  # fmt: skip


def delta_net_spec(text: Mapping[str, Any]) -> DeltaNetSpec:
    """Build a DeltaNetSpec from the fields of text_config.

    Raises ValueError if a field is invalid, or if there is no layer of one of the two types. vLLM
    requires both.
    """
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"):
        if text[name] < 1:
            raise ValueError(f"{name} is {text[name]}, not a positive integer")
    key_heads, value_heads, kernel, layers = (
        text[name] for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim", "layer_types")
    )
    if value_heads % key_heads:
        raise ValueError(f"linear_num_value_heads is {value_heads}, not a multiple of linear_num_key_heads, {key_heads}")
    if kernel < 2:
        raise ValueError(f"linear_conv_kernel_dim is {kernel}, not at least 2")
    if len(layers) != text["num_hidden_layers"] or set(layers) != set(LAYER_TYPES):
        raise ValueError(f"layer_types does not name {text['num_hidden_layers']} layers of the two types {' and '.join(LAYER_TYPES)}")
    return DeltaNetSpec(
        num_key_heads=key_heads, num_value_heads=value_heads, key_head_dim=text["linear_key_head_dim"],
        value_head_dim=text["linear_value_head_dim"], kernel_size=kernel,
        linear_layers=tuple(layer == "linear_attention" for layer in layers),
    )  # fmt: skip


QWEN3_5 = replace(
    QWEN3_VL,
    config_class=Qwen3_5Config,
    model_class=Qwen3_5ForConditionalGeneration,
    text_fields=QWEN3_5_TEXT,
    vision_fields=QWEN3_5_VISION,
    tower_class=Qwen3_5VisionModel,
    read_vision_spec=vision_spec,
    layer_mappings=qwen3_5_layer_mappings,
    megatron_config={"attention_output_gate": True, "layernorm_zero_centered_gamma": True},
    part_patterns={
        "vision": ("vision.patch_embed.*", "vision.pos_embed.*", "vision.blocks.*"),
        "merger": ("vision.merger.*",),
        "language": ("language.*",),
    },
    vision_lora_patterns={
        "vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])",
        "projector": r"merger\.linear_fc[12]",
    },
    read_delta_net_spec=delta_net_spec,
)
