"""A second family, made here of transformers' Qwen3-VL: a row of the table is all it takes, and the size of its heads is its own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLVisionModel

from megatron_rl.config import EngineSettings, RunSettings, Settings
from megatron_rl.models import family
from megatron_rl.models.hf_config import parse_spec
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL
from megatron_rl.models.spec import ModelSpec, VisionSpec
from megatron_rl.plan.engine import plan_engine

MADE = replace(
    QWEN2_5_VL, config=Qwen3VLConfig, model=Qwen3VLForConditionalGeneration, tower=Qwen3VLVisionModel, has_head_dim=True,
    vision_sizes=("depth", "hidden_size", "num_heads", "patch_size"),
    vision=lambda config: VisionSpec(
        num_blocks=config.depth, hidden_size=config.hidden_size, ffn_size=config.intermediate_size, num_heads=config.num_heads,
        out_hidden_size=config.out_hidden_size, channels=config.in_channels, patch=config.patch_size,
        temporal_patch=config.temporal_patch_size, merge=config.spatial_merge_size,
    ),
)  # fmt: skip
STORED = {
    "model_type": "made",
    "text_config": {
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": 128, "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default"},
    },
    "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 96, "deepstack_visual_indexes": [0]},
}  # fmt: skip
"""Its five heads of 32 are 160 numbers, of a hidden size of 96, which five does not divide."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSpec]:
    monkeypatch.setitem(family.FAMILIES, "made", MADE)
    return parse_spec(STORED, folder="made", key="model.path")


def test_the_sizes_are_those_of_transformers_model(made: ModelSpec) -> None:
    """Its own q_proj has a row for each number of the heads."""
    shapes = made.shapes()
    assert (made.head_dim, made.vision.patch, made.vision.window) == (32, 16, 0)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (5 * 32, 96) and shapes["model.layers.0.self_attn.o_proj.weight"] == (
        96,
        160,
    )
    assert type(made.tower()) is Qwen3VLVisionModel


def test_the_rows_split_heads_of_that_size(made: ModelSpec) -> None:
    shapes = made.shapes()
    (row,) = (row for row in made.rows() if row.mcore == "language.decoder.layers.2.self_attention.linear_qkv.weight")
    tensors = tuple(torch.randn(shapes[name]) for name in row.hf)
    fused = row.to_mcore(tensors, 0, 1)
    assert fused.shape == ((5 + 2) * 32, 96)
    assert all(torch.equal(back, tensor) for back, tensor in zip(row.to_hf([fused]), tensors, strict=True))


def test_the_plan_counts_heads_of_that_size(made: ModelSpec) -> None:
    """A token of keys and values is 2 * 3 layers * 1 head * 32 * 2 bytes."""
    given = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.5)
    engine = plan_engine(made, Settings(engine=given, run=RunSettings(dir="there", gpu="l4")))
    assert engine.cache_tokens == (12 * 10**9 - engine.weights - engine.working) // (2 * 3 * 32 * 2)


def test_an_unknown_model_type_is_told_what_is_known(made: ModelSpec) -> None:
    with pytest.raises(ValueError, match=r"^--hf=there: config.json describes model_type llama; known: qwen2_5_vl, made$"):
        parse_spec({"model_type": "llama"}, folder="there", key="--hf")


def test_a_row_says_what_must_be_a_positive_integer(made: ModelSpec) -> None:
    stored = {**STORED, "vision_config": {**STORED["vision_config"], "patch_size": 0}}
    with pytest.raises(ValueError, match=r"vision_config.patch_size is 0, not a positive integer"):
        parse_spec(stored, folder="there", key="--hf")
