"""Parsing of config.json in the flat and the nested style.

The resulting tensor shapes are compared with the published sizes.
"""

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig

from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import HUB_IDS, RELEASED_SIZES, load_known_spec, make_released_config
from megatron_rl.models.model_spec import VisionSpec
from megatron_rl.models.name_mapping import canonical_name

PARAMETERS = {"3B": 3.75e9, "7B": 8.29e9, "32B": 33.5e9, "72B": 73.4e9}
"""Number of parameters as published."""
OTHERS = {
    "Qwen2-VL-2B": 2_208_985_600, "Qwen2-VL-7B": 8_291_375_616, "Qwen2-VL-72B": 73_405_560_320,
    "Qwen3-VL-2B": 2_127_532_032, "Qwen3-VL-4B": 4_437_815_808, "Qwen3-VL-8B": 8_767_123_696, "Qwen3-VL-32B": 33_357_390_064,
    "Qwen3-VL-30B-A3B": 31_070_754_032, "Qwen3-VL-235B-A22B": 235_670_022_896,
}  # fmt: skip
"""Number of parameters in the released files, as reported by the Hugging Face Hub. The numbers of
the models with experts are those of transformers' model with the released sizes."""
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize("size", RELEASED_SIZES["qwen2_5_vl"])
@pytest.mark.parametrize("style", ["flat", "nested"])
def test_every_released_size_is_read(size: str, style: str, tmp_path: Path) -> None:
    """Every released size of Qwen2.5-VL is parsed with its published values and parameter count, in
    both styles."""
    stored = make_released_config(size)
    if style == "nested":
        stored = Qwen2_5_VLConfig.from_dict(stored).to_dict()
        assert "hidden_size" not in stored and stored["text_config"]["hidden_size"] == RELEASED_SIZES["qwen2_5_vl"][size]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    spec = read_spec(tmp_path)
    assert spec.tie_word_embeddings is (size == "3B")
    assert (spec.rope_sections, spec.rope_theta, spec.norm_eps, spec.max_positions) == ((16, 24, 24), 1e6, 1e-6, 128000)
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.num_heads, spec.num_kv_heads) == tuple(
        RELEASED_SIZES["qwen2_5_vl"][size][name] for name in NAMES
    )
    assert (spec.head_dim, spec.image_token_id, spec.video_token_id) == (128, 151655, 151656)
    assert (spec.vocab_size, spec.vision_start_id, spec.vision_end_id) == (151936 if size == "3B" else 152064, 151652, 151653)
    assert spec.vision == VisionSpec(
        num_blocks=32, hidden_size=1280, ffn_size=3420 if size in ("3B", "7B") else 3456, num_heads=16, out_hidden_size=spec.hidden_size,
        in_channels=3, patch_size=14, temporal_patch_size=2, spatial_merge_size=2, window_size=112, mlp_saved_factor=3,
    )  # fmt: skip
    assert (spec.vision.head_dim, spec.vision.patch_dim, spec.vision.patches_per_token) == (80, 1176, 4)
    shapes = spec.shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(PARAMETERS[size], rel=2e-3)
    assert sorted(name for row in spec.param_mappings() if row.is_exported for name in row.hf_names) == sorted(shapes)


def test_every_released_model_has_a_name() -> None:
    """The Hub ids are exactly those of the models tested here."""
    names = [f"Qwen/{name}-Instruct" for name in [*OTHERS, *(f"Qwen2.5-VL-{size}" for size in PARAMETERS)]]
    assert {*names, *(f"Qwen/Qwen3.5-{size}" for family in ("qwen3_5", "qwen3_5_moe") for size in RELEASED_SIZES[family])} == set(HUB_IDS)


@pytest.mark.parametrize("name", OTHERS)
def test_every_released_size_of_other_families_is_read(name: str, tmp_path: Path) -> None:
    """The mapping contains each tensor of transformers' model once, and the parameter count equals
    that of the released files."""
    spec = load_known_spec(f"Qwen/{name}-Instruct")
    shapes = spec.shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == OTHERS[name]
    assert sorted(tensor for row in spec.param_mappings() if row.is_exported for tensor in row.hf_names) == sorted(shapes)
    is_third, is_small = name.startswith("Qwen3"), name.endswith(("-2B", "-4B"))
    sections, most, base = ((24, 20, 20), 262144, 5e6) if is_third else ((16, 24, 24), 32768, 1e6)
    assert (spec.rope_sections, spec.max_positions, spec.rope_theta, spec.norm_eps) == (sections, most, base, 1e-6)
    assert (spec.head_dim, spec.tie_word_embeddings, spec.image_token_id, spec.video_token_id) == (128, is_small, 151655, 151656)
    if not is_third:
        tower = VisionSpec(
            num_blocks=32, hidden_size=1280, ffn_size=5120, num_heads=16, out_hidden_size=spec.hidden_size,
            in_channels=3, patch_size=14, temporal_patch_size=2, spatial_merge_size=2, mlp_saved_factor=3,
        )  # fmt: skip
    else:
        blocks, hidden, ffn = (24, 1024, 4096) if is_small else (27, 1152, 4304)
        tower = VisionSpec(
            num_blocks=blocks, hidden_size=hidden, ffn_size=ffn, num_heads=16, out_hidden_size=spec.hidden_size,
            in_channels=3, patch_size=16, temporal_patch_size=2, spatial_merge_size=2, mlp_saved_factor=2, num_deepstack_layers=3,
            num_position_embeddings=48 * 48,
        )  # fmt: skip
    assert spec.vision == tower
    config = make_released_config(name.removeprefix("Qwen2-VL-").removeprefix("Qwen3-VL-"), family=spec.config.model_type)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_known_spec(str(tmp_path)) == spec


def test_embeddings_tied_by_the_text_config_alone(tmp_path: Path) -> None:
    """tie_word_embeddings is read from text_config too, where transformers before version 5 saved
    it."""
    stored = Qwen2_5_VLConfig.from_dict(make_released_config("3B")).to_dict()
    del stored["tie_word_embeddings"]
    stored["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert read_spec(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is damaged"),
        ('{"model_type": "qwen2_5_vl", "hidden_size": "wide"}', "config.json is damaged"),
        ('{"model_type": "llama"}', "has model_type llama; supported: qwen2_5_vl, qwen2_vl, .*, qwen3_5, qwen3_5_moe$"),
        ('{"model_type": ["qwen2_5_vl"]}', "has model_type .*; supported: qwen2_5_vl, qwen2_vl, .*, qwen3_5, qwen3_5_moe$"),
        ("{}", "has model_type None; supported: qwen2_5_vl, qwen2_vl, .*, qwen3_5, qwen3_5_moe$"),
        ("[]", "config.json is damaged .the file contains a list"),
    ],
)
def test_a_config_that_is_none(text: str | None, said: str, tmp_path: Path) -> None:
    """A missing, damaged or foreign config.json is rejected with a precise error."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^--hf={tmp_path}: .*{said}"):
        read_spec(tmp_path, key="--hf")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("torch_dtype", "nonsense", "nonsense"),
        ("torch_dtype", "int64", "dtype is torch.int64, not a floating-point type"),
        ("torch_dtype", 5, "dtype is 5, not a floating-point type"),
        ("dtype", [], r"dtype is \[\], not a floating-point type"),
        ("vision_config.torch_dtype", "nonsense", "nonsense"),
        ("vision_config.dtype", 5, "vision_config.dtype is 5, not a floating-point type"),
        ("id2label", 5, "'int' object"),
        ("hidden_size", 0, "hidden_size is 0, not a positive integer"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0, not a positive integer"),
        ("num_hidden_layers", -1, "num_hidden_layers"),
        ("vocab_size", -1, "vocab_size is -1, not a positive integer"),
        ("num_attention_heads", 3, "num_attention_heads is 3, which does not divide hidden_size, 3584"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3, which does not divide num_attention_heads, 28"),
        ("text_config.head_dim", 0, "head_dim is 0, not a positive integer"),
        ("text_config.head_dim", 64, "head_dim is 64, but this model family requires hidden_size / num_attention_heads, 128"),
        ("rope_theta", None, "rope_theta is None, not a positive number"),
        ("rope_theta", float("inf"), "rope_theta is inf, not a positive number"),
        ("rope_theta", True, "rope_theta is True, not a positive number"),
        ("rms_norm_eps", 0.0, "rms_norm_eps is 0.0, not a positive number"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0, not a positive integer"),
        ("vision_config.window_size", 13, "vision_config.window_size is 13, not a multiple of a vision token's side, 28"),
        ("rope_scaling", None, "mrope_section is None, not three positive integers"),
        ("rope_scaling.mrope_section", [16, 48], r"mrope_section is \[16, 48\], not three positive integers"),
        ("rope_scaling.mrope_section", [64, 0, 0], r"mrope_section is \[64, 0, 0\], not three positive integers"),
        ("rope_scaling.mrope_section", [16.0, 24, 24], r"mrope_section is \[16.0, 24, 24\], not three positive integers"),
        (
            "rope_scaling.mrope_section",
            [16, 24, 25],
            r"mrope_section is \[16, 24, 25\], with sum 65, not half of the head size, 128",
        ),
        ("vision_config.depth", 0, "vision_config.depth is 0, not a positive integer"),
        ("vision_config.num_heads", 3, "vision_config.num_heads is 3, which does not divide hidden_size, 1280"),
        ("vision_config.hidden_act", "loud", "vision_config.hidden_act is loud"),
        ("vision_config.out_hidden_size", 7, "vision_config.out_hidden_size is 7, but hidden_size is 3584"),
    ],
)
def test_values_that_no_model_has(key: str, value: object, said: str, tmp_path: Path) -> None:
    """Invalid values in config.json are rejected with an error that names field and value."""
    part, _, name = key.rpartition(".")
    stored = make_released_config("7B")
    if part == "text_config":
        stored = Qwen2_5_VLConfig.from_dict(stored).to_dict()
    (stored[part] if part else stored)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"^--hf={tmp_path}: config.json is damaged .*{said}.*; copy it again$"):
        read_spec(tmp_path, key="--hf")


def test_the_expected_tensors_are_those_that_transformers_saves(random_model: Path) -> None:
    """Names and shapes of the expected tensors equal those in a file saved by transformers."""
    saved = load_file(random_model / "model.safetensors")
    assert read_spec(random_model).shapes() == {canonical_name(name): tensor.shape for name, tensor in saved.items()}
