"""Name mappings of tensor-parallel vision towers that other trainers build from Megatron layers.

Towers built from Megatron layers are only read from checkpoints, which are then converted to
Hugging Face folders. This project never builds such a tower. Parameters are named as in Megatron's
TransformerBlock and MultimodalProjector with biases; mbridge and verl use these names for
Qwen2.5-VL, and Pai uses them for Qwen2-VL. For Qwen3-VL, the mergers have the names used by
mbridge. In the fused weights of attention, q, k and v are stored as one block per head. If an MLP
has gate and up projections, the two projections are stored as one block per rank.
"""

from collections.abc import Sequence

import torch

from megatron_rl.models.model_spec import VisionSpec
from megatron_rl.models.name_mapping import AttentionHeads, ParamMapping, Tensors, fuse_halves, fuse_qkv, split_halves, split_qkv

PATCH_EMBED = "patch_embed.proj.weight"


def replicated_mapping(mcore: str, hf: str) -> ParamMapping:
    """Return the mapping of a replicated tensor, given its names without the tower's prefixes."""
    return ParamMapping(f"vision.{mcore}", (f"visual.{hf}",), "first")


def mlp_mappings(mcore: str, *, fc1: Sequence[str], fc2: str) -> list[ParamMapping]:
    """Return the mappings of an MLP with biases.

    `fc1` contains Hugging Face's names of the gate and up layers, or the name of the first layer if
    the MLP has no gate. `fc2` is Hugging Face's name of the last layer. The bias of `fc2` is
    replicated, because it is added after the sum over ranks.
    """
    rows = []
    for kind in ("weight", "bias"):
        first = tuple(f"visual.{name}.{kind}" for name in fc1)
        fused = {"fuse": fuse_halves, "split": split_halves, "fuse_shards": True} if len(first) > 1 else {}
        rows.append(ParamMapping(f"vision.{mcore}.linear_fc1.{kind}", first, "first", shard_dim=0, **fused))
        rows.append(
            ParamMapping(f"vision.{mcore}.linear_fc2.{kind}", (f"visual.{fc2}.{kind}",), "first", shard_dim=1 if kind == "weight" else None)
        )
    return rows


def block_mappings(vision: VisionSpec, *, norm: Sequence[str], fc1: Sequence[str], fc2: str) -> list[ParamMapping]:
    """Return the mappings of all blocks of a vision tower.

    `norm` lists the tensors of a norm, such as "weight". `fc1` and `fc2` are Hugging Face's names
    of the linear layers in a block's MLP.
    """
    heads = AttentionHeads(vision.num_heads, vision.num_heads, vision.head_dim)

    def qkv(tensors: Tensors) -> torch.Tensor:
        return fuse_qkv(tensors[0].chunk(3, 0), heads)

    def unqkv(fused: torch.Tensor) -> Tensors:
        return (torch.cat(split_qkv(fused, heads)),)

    rows = []
    for block in range(vision.num_blocks):
        mcore, hf = f"vision.decoder.layers.{block}.", f"blocks.{block}."
        for name, theirs, linear in (
            ("input_layernorm", "norm1", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "norm2", "mlp.linear_fc1"),
        ):  # fmt: skip
            for kind in norm:
                fused_norm = f"{mcore}{linear}.layer_norm_{kind}"
                rows.append(ParamMapping(f"{mcore}{name}.{kind}", (f"visual.{hf}{theirs}.{kind}",), "first", fused_norm=fused_norm))
        for kind in ("weight", "bias"):
            attention, theirs = f"{mcore}self_attention.", f"visual.{hf}attn."
            rows += [
                ParamMapping(f"{attention}linear_qkv.{kind}", (f"{theirs}qkv.{kind}",), "first", fuse=qkv, split=unqkv, shard_dim=0),
                ParamMapping(
                    f"{attention}linear_proj.{kind}", (f"{theirs}proj.{kind}",), "first", shard_dim=1 if kind == "weight" else None
                ),
            ]
        rows += mlp_mappings(f"decoder.layers.{block}.mlp", fc1=[f"{hf}mlp.{name}" for name in fc1], fc2=f"{hf}mlp.{fc2}")
    return rows


def projector_mappings(*, norm: Sequence[str]) -> list[ParamMapping]:
    """Return the mappings of the merger in Qwen2-VL and Qwen2.5-VL.

    Megatron's tower applies the merger's norm as the final norm of the blocks.
    """
    norms = [replicated_mapping(f"decoder.final_layernorm.{kind}", f"merger.ln_q.{kind}") for kind in norm]
    return [*norms, *mlp_mappings("projection.encoder", fc1=["merger.mlp.0"], fc2="merger.mlp.2")]


def merger_mappings(vision: VisionSpec) -> list[ParamMapping]:
    """Return the mappings of Qwen3-VL's mergers, including those for DeepStack."""
    names = {
        "merger": "merger",
        **{f"decoder.deepstack_merger_list.{n}": f"deepstack_merger_list.{n}" for n in range(vision.num_deepstack_layers)},
    }
    rows = []
    for mcore, hf in names.items():
        rows += [replicated_mapping(f"{mcore}.patch_norm.{kind}", f"{hf}.norm.{kind}") for kind in ("weight", "bias")]
        rows += mlp_mappings(mcore, fc1=[f"{hf}.linear_fc1"], fc2=f"{hf}.linear_fc2")
    return rows


def qwen2_5_vl_tower_mappings(vision: VisionSpec) -> list[ParamMapping]:
    """Return the mappings of Qwen2.5-VL's vision tower."""
    blocks = block_mappings(vision, norm=["weight"], fc1=["gate_proj", "up_proj"], fc2="down_proj")
    return [replicated_mapping(PATCH_EMBED, PATCH_EMBED), *blocks, *projector_mappings(norm=["weight"])]


def qwen2_vl_tower_mappings(vision: VisionSpec) -> list[ParamMapping]:
    """Return the mappings of Qwen2-VL's vision tower."""
    blocks = block_mappings(vision, norm=["weight", "bias"], fc1=["fc1"], fc2="fc2")
    return [replicated_mapping(PATCH_EMBED, PATCH_EMBED), *blocks, *projector_mappings(norm=["weight", "bias"])]


def qwen3_vl_tower_mappings(vision: VisionSpec) -> list[ParamMapping]:
    """Return the mappings of Qwen3-VL's vision tower."""
    blocks = block_mappings(vision, norm=["weight", "bias"], fc1=["linear_fc1"], fc2="linear_fc2")
    whole = [replicated_mapping(name, name) for name in (PATCH_EMBED, "patch_embed.proj.bias", "pos_embed.weight")]
    return [*whole, *blocks, *merger_mappings(vision)]
