"""Qwen3-VL with a mixture of experts, such as Qwen3-VL-30B-A3B (arXiv 2511.21631).

The vision tower, attention and DeepStack are those of the dense models. In a sparse layer, the MLP
is replaced by a router and experts. The router computes a logit for each expert. The top_k experts
with the largest logits compute the token, and their outputs are weighted by the softmax of these
top_k logits.

In released checkpoints, gate_up_proj is [E, H, 2F] and down_proj is [E, F, H] for E experts with
the intermediate size F. transformers (5.19) swaps the last two dimensions in memory and saves them
swapped; weights/formats/checkpoint_source.py reads both. vLLM reads only the released form.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeVisionModel

from megatron_rl.models.config_fields import QWEN3_MOE_TEXT
from megatron_rl.models.model_spec import EXPERT_MULTIPLE, ExpertSpec
from megatron_rl.models.qwen3_vl import QWEN3_VL


def expert_spec(text: Mapping[str, Any]) -> ExpertSpec:
    """Build an ExpertSpec from the fields of text_config.

    The layers with experts are chosen as in transformers 5.19 (Qwen3VLMoeTextDecoderLayer). Raises
    ValueError if a field is invalid or the orientation of the experts' tensors is ambiguous.
    """
    num_experts, top_k, step = text["num_local_experts"], text["num_experts_per_tok"], text["decoder_sparse_step"]
    layers, size, hidden, dense = text["num_hidden_layers"], text["moe_intermediate_size"], text["hidden_size"], text["mlp_only_layers"]
    for name, value in (("num_experts", num_experts), ("moe_intermediate_size", size), ("decoder_sparse_step", step)):
        if value < 1:
            raise ValueError(f"{name} is {value}, not a positive integer")
    if not 2 <= top_k <= num_experts:
        raise ValueError(f"num_experts_per_tok is {top_k}, not between 2 and num_experts, {num_experts}")
    if text.get("norm_topk_prob") is not True:
        raise ValueError("norm_topk_prob is missing; vLLM requires it, so add norm_topk_prob: true to text_config")
    for name, value in (("hidden_size", hidden), ("moe_intermediate_size", size)):
        if value % EXPERT_MULTIPLE:
            raise ValueError(f"{name} is {value}, not a multiple of {EXPERT_MULTIPLE}, as the matrix product of experts requires")
    if hidden in (size, 2 * size):
        raise ValueError(
            f"moe_intermediate_size is {size} and hidden_size {hidden}, so that the experts' tensors have no clear orientation"
        )
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(sparse):
        raise ValueError("no layer has experts (decoder_sparse_step, mlp_only_layers); vLLM requires one")
    return ExpertSpec(num_experts=num_experts, top_k=top_k, ffn_size=size, sparse_layers=sparse)


QWEN3_VL_MOE = replace(
    QWEN3_VL,
    config_class=Qwen3VLMoeConfig,
    model_class=Qwen3VLMoeForConditionalGeneration,
    text_fields=QWEN3_MOE_TEXT,
    tower_class=Qwen3VLMoeVisionModel,
    read_expert_spec=expert_spec,
    has_swapped_experts=True,
)
