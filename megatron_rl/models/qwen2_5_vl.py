"""Qwen2.5-VL: Qwen2's language model with biases on q, k and v, and a windowed vision tower with a gated MLP (arXiv 2502.13923)."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLRMSNorm

from megatron_rl.models.mapping import Heads, Row, fuse_halves, fuse_qkv, split_halves, split_qkv
from megatron_rl.models.spec import Family, VisionSpec
from megatron_rl.types import Image


def vision_spec(config: Qwen2_5_VLVisionConfig) -> VisionSpec:
    return VisionSpec(
        num_blocks=config.depth,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_heads=config.num_heads,
        out_hidden_size=config.out_hidden_size,
        channels=config.in_channels,
        patch=config.patch_size,
        temporal_patch=config.temporal_patch_size,
        merge=config.spatial_merge_size,
        window=config.window_size,
    )


def layer_rows(layer: int, heads: Heads) -> list[Row]:
    mcore, hf, stage = f"language.decoder.layers.{layer}.", f"model.layers.{layer}.", f"layer:{layer}"

    def qkv(kind: str) -> Row:
        names = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
        return Row(
            f"{mcore}self_attention.linear_qkv.{kind}", names, stage,
            fuse=lambda tensors: fuse_qkv(tensors, heads), split=lambda fused: split_qkv(fused, heads), shard_dim=0,
        )  # fmt: skip

    gate_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    return [
        Row(
            f"{mcore}input_layernorm.weight", (f"{hf}input_layernorm.weight",), stage,
            fused_norm=f"{mcore}self_attention.linear_qkv.layer_norm_weight",
        ),
        qkv("weight"),
        qkv("bias"),
        Row(f"{mcore}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), stage, shard_dim=1),
        Row(
            f"{mcore}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",), stage,
            fused_norm=f"{mcore}mlp.linear_fc1.layer_norm_weight",
        ),
        Row(f"{mcore}mlp.linear_fc1.weight", gate_up, stage, fuse=fuse_halves, split=split_halves, shard_dim=0, fuse_shards=True),
        Row(f"{mcore}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), stage, shard_dim=1),
    ]  # fmt: skip


def mrope_positions(token_ids: Sequence[int], images: Iterable[Image], image_token_id: int) -> torch.Tensor:
    """Rotary positions [3, L] (frame, row, column), as transformers 5.19 Qwen2_5_VLModel.get_rope_index gives them for still images.

    Text counts on by one on all three axes; an image occupies a grid from its start, and text goes on after its longer side.
    Raises ValueError where placeholders and grids do not match.
    """
    grids = [(image.grid[0], image.grid[1] // image.merge, image.grid[2] // image.merge) for image in images]
    parts, start, used = [], 0, 0
    for is_image, run in groupby(token_ids, key=lambda token: token == image_token_id):
        length = len(list(run))
        if not is_image:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
            continue
        while length > 0:
            if used == len(grids) or grids[used][0] * grids[used][1] * grids[used][2] > length:
                raise ValueError(f"a run of {length} image placeholders does not match the images' grids {grids[used:]}")
            frames, rows, columns = grids[used]
            axes = (torch.arange(frames), torch.arange(rows), torch.arange(columns))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + start)
            start += max(rows, columns)
            length -= frames * rows * columns
            used += 1
    if used != len(grids):
        raise ValueError(f"{len(grids)} images, but placeholders for {used}")
    return torch.cat(parts, 1)


QWEN2_5_VL = Family(
    config=Qwen2_5_VLConfig,
    model=Qwen2_5_VLForConditionalGeneration,
    tower=Qwen2_5_VisionTransformerPretrainedModel,
    tower_norm=Qwen2_5_VLRMSNorm,
    has_head_dim=False,
    vision_sizes=(
        "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "out_hidden_size", "patch_size", "spatial_merge_size",
        "temporal_patch_size", "window_size",
    ),
    vision=vision_spec,
    layer_rows=layer_rows,
    megatron={"add_qkv_bias": True},
    positions=mrope_positions,
    parts={"vision": ("vision.patch_embed.*", "vision.blocks.*"), "merger": ("vision.merger.*",), "language": ("language.*",)},
    vision_lora={
        "vision": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate_proj|up_proj|down_proj))",
        "projector": r"merger\.mlp\.[02]",
    },
)  # fmt: skip
