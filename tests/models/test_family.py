"""A model family that a user adds (Qwen3-VL under another name) needs only an entry in FAMILIES.

The last test checks properties of every built-in family.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLVisionModel

from megatron_rl.config import EngineSettings, ParallelSettings, PlanSettings, RunSettings, Settings
from megatron_rl.config.model import PARTS
from megatron_rl.memory_plan.engine_memory import plan_engine
from megatron_rl.models import family
from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.qwen3_vl import QWEN3_VL
from megatron_rl.policy.parallel import check_layout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

STORED = {
    "model_type": "made",
    "text_config": {
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 1,
        "head_dim": 32, "vocab_size": 128, "rope_scaling": {"mrope_section": [6, 5, 5], "rope_type": "default", "mrope_interleaved": True},
    },
    "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 96, "deepstack_visual_indexes": [0]},
}  # fmt: skip
"""Config with five heads of size 32, 160 in total; 5 does not divide the hidden size, 96."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSpec]:
    monkeypatch.setitem(family.FAMILIES, "made", QWEN3_VL)
    return parse_spec(STORED, folder="made", key="model.path")


def test_the_sizes_are_those_of_transformers_model(made: ModelSpec) -> None:
    """Tensor shapes use the stated head size: q_proj has 5 * 32 output rows.

    The vision tower is transformers' Qwen3VLVisionModel.
    """
    shapes = made.shapes()
    assert (made.head_dim, made.vision.patch_size, made.vision.window_size) == (32, 16, 0)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (5 * 32, 96) and shapes["model.layers.0.self_attn.o_proj.weight"] == (
        96,
        160,
    )
    assert type(made.build_tower()) is Qwen3VLVisionModel


def test_the_rows_split_heads_of_that_size(made: ModelSpec) -> None:
    """The QKV mapping with the stated head size restores the original tensors."""
    shapes = made.shapes()
    (row,) = (row for row in made.param_mappings() if row.mcore_name == "language.decoder.layers.2.self_attention.linear_qkv.weight")
    tensors = tuple(torch.randn(shapes[name]) for name in row.hf_names)
    fused = row.to_mcore(tensors, 0, 1)
    assert fused.shape == ((5 + 2) * 32, 96)
    assert all(torch.equal(back, tensor) for back, tensor in zip(row.to_hf([fused]), tensors, strict=True))


def test_the_plan_counts_heads_of_that_size(made: ModelSpec) -> None:
    """The planned KV cache uses the stated head size: 2 * 3 layers * 1 head * 32 * 2 bytes per
    token."""
    given = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.5)
    engine = plan_engine(made, Settings(engine=given, run=RunSettings(dir="there"), plan=PlanSettings(gpu="l4")))
    assert engine.cache_tokens == (12 * 10**9 - engine.weight_bytes - engine.step_bytes) // (2 * 3 * 32 * 2)


def test_an_unknown_model_type_is_told_what_is_known(made: ModelSpec) -> None:
    """An unknown model_type is rejected with the known ones, including the added family."""
    with pytest.raises(
        ValueError, match=r"^--hf=there: .* model_type llama; supported: qwen2_5_vl, qwen2_vl, qwen3_vl, .*, qwen3_5_moe, made$"
    ):
        parse_spec({"model_type": "llama"}, folder="there", key="--hf")


def test_a_row_says_what_must_be_a_positive_integer(made: ModelSpec) -> None:
    """A field that the family requires to be a positive integer is rejected if it is 0."""
    stored = {**STORED, "vision_config": {**STORED["vision_config"], "patch_size": 0}}
    with pytest.raises(ValueError, match=r"vision_config.patch_size is 0, not a positive integer"):
        parse_spec(stored, folder="there", key="--hf")


def test_a_config_that_rotates_otherwise_than_its_family_is_refused(made: ModelSpec) -> None:
    """A config without the family's mrope_interleaved is rejected. transformers ignores that field,
    and vLLM uses it."""
    rope = {"mrope_section": [6, 5, 5], "rope_type": "default"}
    stored = {**STORED, "text_config": {**STORED["text_config"], "rope_scaling": rope}}
    with pytest.raises(ValueError, match=r"mrope_interleaved is not true, which this model family requires"):
        parse_spec(stored, folder="there", key="--hf")


def test_a_first_chunk_with_too_few_layers_for_its_pictures_is_refused(made: ModelSpec) -> None:
    """A pipeline layout is rejected if its first chunk has fewer layers than DeepStack adds
    features to."""
    model = replace(made, num_layers=4, vision=replace(made.vision, num_deepstack_layers=3), num_kv_heads=5)
    check_layout(ParallelSettings(), model, 1)
    with pytest.raises(ValueError, match=r"^parallel.pp\*parallel.vpp=2: leaves 2 layers to the first chunk, .* to 3 layers; use fewer"):
        check_layout(ParallelSettings(pp=2), model, 2)


@pytest.mark.parametrize("model_type", family.FAMILIES)
def test_every_parameter_is_of_one_part_and_every_tower_linear_of_one_target(model_type: str, tmp_path: Path) -> None:
    """Every parameter belongs to one part, and every linear layer of the vision tower to one LoRA
    target. The patch embedding, which is a convolution, and the position table are no linear
    layers."""
    row = family.FAMILIES[model_type]
    assert tuple(row.part_patterns) == PARTS and tuple(row.vision_lora_patterns) == ("vision", "projector")
    make_checkpoint(tmp_path / "model", family=model_type, vision_depth=3)
    spec = read_spec(tmp_path / "model")
    for each in spec.param_mappings():
        parts = [
            part for part, names in row.part_patterns.items() if each.mcore_name.startswith(tuple(name.removesuffix("*") for name in names))
        ]
        assert len(parts) == 1, each.mcore_name
    linears = {name.removeprefix("visual.").removesuffix(".weight") for name, shape in spec.shapes().items() if len(shape) == 2}
    tower = {name for name in linears if name.startswith(("blocks.", "merger.", "deepstack_merger_list."))}
    counts = {"qwen2_5_vl": 3 * 5 + 2, "qwen2_vl": 3 * 4 + 2, "qwen3_vl": 3 * 4 + 4 * 2, "qwen3_5": 3 * 4 + 2}
    assert len(tower) == counts[model_type.removesuffix("_moe")]
    for name in tower:
        targets = [target for target, pattern in row.vision_lora_patterns.items() if re.fullmatch(pattern, name)]
        assert targets == ["vision" if name.startswith("blocks.") else "projector"], name
