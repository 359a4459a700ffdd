"""Name mappings of the decoder layers of Qwen2, Qwen3 and Qwen3.5.

Qwen2's layers have biases on q, k and v, and Qwen3's layers have norms on q and k. Otherwise, the
layers of the two models have the same structure. In a mixture-of-experts model, a layer has either
such an MLP or a router with experts (policy/experts.py), in Qwen3.5 with a shared expert. In
Qwen3.5, a layer has either attention with an output gate or a gated delta net
(policy/gated_delta_net.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_rl.models.delta_net_layout import DeltaNetSpec, delta_net_mappings
from megatron_rl.models.name_mapping import (
    AttentionHeads,
    ParamMapping,
    fold_gate_up,
    fuse_halves,
    fuse_qkv,
    split_halves,
    split_qkv,
    swap_folded,
    swap_matrices,
    unfold_gate_up,
    unfold_swapped,
)


def _mlp_mappings(mcore: str, hf: str, stage: str) -> list[ParamMapping]:
    gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return [
        ParamMapping(f"{mcore}linear_fc1.weight", gate_up, stage, fuse=fuse_halves, split=split_halves, shard_dim=0, fuse_shards=True),
        ParamMapping(f"{mcore}linear_fc2.weight", (f"{hf}down_proj.weight",), stage, shard_dim=1),
    ]


def _expert_mappings(mcore: str, hf: str, stage: str) -> list[ParamMapping]:
    """Return the mappings of a router [E, H] and of experts, [E, H, 2, F] and [E, F, H].

    E experts have the intermediate size F. Tensor parallelism shards F, expert parallelism E.
    """
    gate_up = (f"{hf}experts.gate_up_proj",)
    return [
        ParamMapping(f"{mcore}router.weight", (f"{hf}gate.weight",), stage),
        ParamMapping(f"{mcore}experts.linear_fc1", gate_up, stage, fuse=unfold_gate_up, split=fold_gate_up, shard_dim=3, expert_dim=0),
        ParamMapping(f"{mcore}experts.linear_fc2", (f"{hf}experts.down_proj",), stage, shard_dim=1, expert_dim=0),
    ]


def _shared_expert_mappings(mcore: str, hf: str, stage: str) -> list[ParamMapping]:
    """Return the mappings of a router, of experts, and of a shared expert with its gate [1, H].

    The experts' tensors are those of `_expert_mappings` with the last two dimensions swapped.
    """
    router, fc1, fc2 = _expert_mappings(mcore, hf, stage)
    return [
        router,
        replace(fc1, fuse=unfold_swapped, split=swap_folded),
        replace(fc2, fuse=swap_matrices, split=lambda fused: (swap_matrices((fused,)),)),
        *_mlp_mappings(f"{mcore}shared_experts.", f"{hf}shared_expert.", stage),
        ParamMapping(f"{mcore}shared_experts.gate_weight", (f"{hf}shared_expert_gate.weight",), stage),
    ]


def decoder_layer_mappings(
    layer: int, heads: AttentionHeads, *,
    qkv_bias: bool, qk_norm: bool, has_gate: bool = False, is_sparse: bool = False, delta_net: DeltaNetSpec | None = None,
    sparse_mappings: Callable[[str, str, str], list[ParamMapping]] = _expert_mappings,
) -> list[ParamMapping]:  # fmt: skip
    """Return the name mappings of the decoder layer with global layer number `layer`.

    If `is_sparse` is True, the layer has a router and experts instead of an MLP, with the mappings
    that `sparse_mappings` returns. If `delta_net` is given, the layer has a gated delta net instead
    of attention.
    """
    mcore, hf, stage = f"language.decoder.layers.{layer}.", f"model.layers.{layer}.", f"layer:{layer}"

    def qkv(kind: str) -> ParamMapping:
        names = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
        return ParamMapping(
            f"{mcore}self_attention.linear_qkv.{kind}", names, stage, shard_dim=0,
            fuse=lambda tensors: fuse_qkv(tensors, heads, has_gate=has_gate),
            split=lambda fused: split_qkv(fused, heads, has_gate=has_gate),
        )  # fmt: skip

    norms = [ParamMapping(f"{mcore}self_attention.{x}_layernorm.weight", (f"{hf}self_attn.{x}_norm.weight",), stage) for x in "qk"]
    attention = [
        qkv("weight"),
        *([qkv("bias")] if qkv_bias else []),
        *(norms if qk_norm else []),
        ParamMapping(f"{mcore}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), stage, shard_dim=1),
    ]
    return [
        ParamMapping(
            f"{mcore}input_layernorm.weight", (f"{hf}input_layernorm.weight",), stage,
            fused_norm="" if delta_net else f"{mcore}self_attention.linear_qkv.layer_norm_weight",
        ),
        *(delta_net_mappings(f"{mcore}self_attention.", f"{hf}linear_attn.", stage, delta_net) if delta_net else attention),
        ParamMapping(
            f"{mcore}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",), stage,
            fused_norm="" if is_sparse else f"{mcore}mlp.linear_fc1.layer_norm_weight",
        ),
        *(sparse_mappings if is_sparse else _mlp_mappings)(f"{mcore}mlp.", f"{hf}mlp.", stage),
    ]  # fmt: skip


qwen2_layer_mappings = partial(decoder_layer_mappings, qkv_bias=True, qk_norm=False)
qwen3_layer_mappings = partial(decoder_layer_mappings, qkv_bias=False, qk_norm=True)
qwen3_5_layer_mappings = partial(decoder_layer_mappings, qkv_bias=False, qk_norm=True, has_gate=True)
qwen3_5_moe_layer_mappings = partial(qwen3_5_layer_mappings, sparse_mappings=_shared_expert_mappings)
