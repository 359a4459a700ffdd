"""config.json in both styles, and the tensors that follow from it, against the published sizes."""

import json
import math
from pathlib import Path

import pytest
from transformers import Qwen2_5_VLConfig

from megatron_rl.weights.hf_config import hf_shapes, read_config, rows_of

RELEASED = {
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "vocab_size": 151936, "tie_word_embeddings": True, "vision_intermediate": 3420},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "vocab_size": 152064, "tie_word_embeddings": False, "vision_intermediate": 3420},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "vocab_size": 152064, "tie_word_embeddings": False, "vision_intermediate": 3456},
    "72B": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 152064, "tie_word_embeddings": False, "vision_intermediate": 3456},
}  # fmt: skip
PARAMETERS = {"3B": 3.75e9, "7B": 8.29e9, "32B": 33.5e9, "72B": 73.4e9}


def released_config(size: str) -> dict[str, object]:
    """A config.json as it was released: flat, with the spellings of transformers 4.41."""
    text = dict(RELEASED[size])
    vision = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": text.pop("vision_intermediate"), "num_heads": 16,
        "in_chans": 3, "out_hidden_size": text["hidden_size"], "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    rope = {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    rest = {"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "max_position_embeddings": 128000, "torch_dtype": "bfloat16"}
    return {**text, **rest, **rope, "vision_config": vision}


@pytest.mark.parametrize("size", RELEASED)
@pytest.mark.parametrize("style", ["flat", "nested"])
def test_every_released_size_is_read(size: str, style: str, tmp_path: Path) -> None:
    stored = released_config(size)
    if style == "nested":
        stored = Qwen2_5_VLConfig.from_dict(stored).to_dict()
        assert "hidden_size" not in stored and stored["text_config"]["hidden_size"] == RELEASED[size]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = read_config(tmp_path)
    assert config.text_config.tie_word_embeddings is RELEASED[size]["tie_word_embeddings"]
    assert config.text_config.rope_parameters["mrope_section"] == [16, 24, 24] and config.text_config.rope_parameters["rope_theta"] == 1e6
    shapes = hf_shapes(config)
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(PARAMETERS[size], rel=2e-3)
    assert sorted(name for row in rows_of(config) if row.exported for name in row.hf) == sorted(shapes)


def test_embeddings_tied_by_the_text_config_alone(tmp_path: Path) -> None:
    """transformers before 5 saved nested configs so."""
    stored = Qwen2_5_VLConfig.from_dict(released_config("3B")).to_dict()
    del stored["tie_word_embeddings"]
    stored["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert read_config(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no config.json"),
        ("{", "config.json is damaged"),
        ('{"model_type": "qwen2_5_vl", "hidden_size": "wide"}', "config.json is damaged"),
        ('{"model_type": "llama"}', "describes model_type llama"),
    ],
)
def test_a_config_that_is_none(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^--hf={tmp_path}: .*{said}"):
        read_config(tmp_path, key="--hf")
