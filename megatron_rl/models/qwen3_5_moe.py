"""Qwen3.5 with a mixture of experts, such as Qwen3.5-35B-A3B.

Gated delta nets, attention and the vision tower are those of the dense models. Every layer has
experts. The router is that of Qwen3-VL with experts. In addition, a shared expert computes every
token; its output is multiplied by the sigmoid of a logit and added to that of the other experts.

In released checkpoints, gate_up_proj is [E, 2F, H] and down_proj is [E, H, F] for E experts with
the intermediate size F, as transformers (5.19) and vLLM (0.32) store them. Qwen3-VL's have the last
two dimensions swapped.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeVisionModel

from megatron_rl.models import qwen3_vl_moe
from megatron_rl.models.config_fields import QWEN3_5_MOE_TEXT
from megatron_rl.models.decoder import qwen3_5_moe_layer_mappings
from megatron_rl.models.model_spec import ExpertSpec
from megatron_rl.models.qwen3_5 import QWEN3_5


def expert_spec(text: Mapping[str, Any]) -> ExpertSpec:
    """Build an ExpertSpec from the fields of text_config.

    transformers and vLLM have experts in all layers and normalize the weights of a token's experts,
    without fields for these choices. Raises ValueError if a field is invalid.
    """
    fixed = {"num_local_experts": text["num_experts"], "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return replace(qwen3_vl_moe.expert_spec({**text, **fixed}), shared_ffn_size=text["shared_expert_intermediate_size"])


QWEN3_5_MOE = replace(
    QWEN3_5,
    config_class=Qwen3_5MoeConfig,
    model_class=Qwen3_5MoeForConditionalGeneration,
    text_fields=QWEN3_5_MOE_TEXT,
    tower_class=Qwen3_5MoeVisionModel,
    layer_mappings=qwen3_5_moe_layer_mappings,
    read_expert_spec=expert_spec,
    ffn_size_field="shared_expert_intermediate_size",
)
