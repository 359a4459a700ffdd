"""Unsupported config.json fields are rejected; fields written by past transformers versions are
accepted.

The oracle of the lists of known fields is transformers: every field of its config classes must be
listed, so a newer transformers with new fields fails here.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_rl.models import config_fields
from megatron_rl.models.family import FAMILIES
from megatron_rl.models.hf_config import parse_spec, read_spec
from megatron_rl.models.known_models import RELEASED_SIZES, make_released_config

STATED_TWICE = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "rope_theta": 1000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vision_token_id": 151654,
    "vocab_size": 152064,
}  # fmt: skip
"""Text settings of Qwen2.5-VL-7B, which transformers 4.54 writes at the top level and again in
text_config."""


def released(family: str) -> dict:
    return make_released_config(list(RELEASED_SIZES[family])[1], family=family)


def nested(family: str) -> dict:
    """Return the released config as transformers 5.19 writes it."""
    return FAMILIES[family].config_class.from_dict(released(family)).to_dict()


def put(stored: dict, path: str, value: object) -> dict:
    """Set the value at a dotted path and return the config."""
    *groups, name = path.split(".")
    place = stored
    for group in groups:
        place = place.setdefault(group, {})
    place[name] = value
    return stored


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_classes_is_listed(family: str) -> None:
    """Every field of transformers' config classes is in the lists of known fields.

    If a newer transformers adds a field, its effect must be examined and the list extended.
    """
    classes = FAMILIES[family].config_class.sub_configs
    text = {*FAMILIES[family].text_fields, *config_fields._COMMON, "layer_types", "tie_word_embeddings"}
    lists = {"text_config": text, "vision_config": {*FAMILIES[family].vision_fields}}
    assert {field.name for field in fields(FAMILIES[family].config_class)} <= config_fields._TOP.keys()
    for part, listed in lists.items():
        assert {field.name for field in fields(classes[part])} <= listed


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    """Configs that transformers saves, and extra fields of its past versions, are parsed to the
    same spec."""
    config = FAMILIES[family].config_class.from_dict(released(family))
    config.save_pretrained(tmp_path)
    want = parse_spec(released(family), folder="released", key="model.path")
    assert read_spec(tmp_path) == want
    full = nested(family)
    full |= {"pruned_heads": {}, "is_decoder": False, "top_k": 50, "cross_attention_hidden_size": None, "unsloth_version": "2025.9"}
    full["text_config"] |= {"_attn_implementation_autoset": True, "torch_dtype": "bfloat16", "image_token_id": None, "max_length": 20}
    full["vision_config"] |= {"torch_dtype": "bfloat16", "_name_or_path": "", "tokens_per_second": 2}
    assert parse_spec(full, folder="full", key="model.path") == want


def test_a_config_that_states_the_language_model_twice_is_read() -> None:
    """A config with the text settings at the top level and in text_config is parsed to the same
    spec."""
    stored = {**released("qwen2_5_vl"), **STATED_TWICE}
    stored["text_config"] = {
        **STATED_TWICE, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": None, "model_type": "qwen2_5_vl_text",
        "layer_types": ["full_attention"] * 28, "tie_word_embeddings": False,
    }  # fmt: skip
    stored["vision_config"] |= {"in_channels": 3, "initializer_range": 0.02, "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16"}
    want = parse_spec(released("qwen2_5_vl"), folder="released", key="model.path")
    assert parse_spec(stored, folder="twice", key="model.path") == want


ROPES = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768}, "linear": {"factor": 4.0}, "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0], "long_factor": [2.0]}, "llama3": {"factor": 8.0}, "proportional": {},
}  # fmt: skip


@pytest.mark.known_failure("rope-scaling-ignored")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rope_is_refused_by_name(family: str, spelling: str, kind: str, place: str) -> None:
    """Every kind of scaled RoPE is rejected in one line that names the field, in each of its
    spellings."""
    stored = nested(family)
    text = stored["text_config"]
    text[place] = {**text.pop("rope_parameters"), spelling: kind, **ROPES[kind]}
    said = rf"text_config.{place}.{spelling} is {kind}, supported:"
    with pytest.raises(ValueError, match=rf"^model.path=m: config.json [^\n]*{said} [^\n]*$"):
        parse_spec(stored, folder="m", key="model.path")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_scaled_rope_of_a_flat_config_is_refused(family: str) -> None:
    """A scaled RoPE in a flat config is rejected with all its unsupported fields."""
    stored = put(released(family), "rope_scaling", {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0})
    with pytest.raises(ValueError, match=r"rope_scaling.type is yarn, supported: default or mrope; rope_scaling.factor is 4.0,"):
        parse_spec(stored, folder="m", key="model.path")


EVERYWHERE = [
    ("text_config.use_sliding_window", True), ("text_config.layer_types", ["full_attention", "sliding_attention"]),
    ("text_config.hidden_act", "gelu"), ("text_config.attention_dropout", 0.1), ("text_config.partial_rotary_factor", 0.5),
    ("text_config.rope_parameters.partial_rotary_factor", 0.25), ("text_config.num_experts", 8), ("text_config.logit_scale", 0.5),
    ("text_config.mlp_bias", True), ("text_config.attn_output_gate", True), ("text_config.final_logit_softcapping", 30.0),
    ("quantization_config", {"quant_method": "awq"}), ("text_config.quantization_config", {"quant_method": "fp8"}),
    ("auto_map", {"AutoModel": "modeling.Own"}), ("architectures", ["Qwen2VLForSequenceClassification"]), ("skip_layer_mlp", [27, 5]),
    ("mlp_scalars", {"27": 0.9}), ("vision_config.use_abs_pos", True), ("vision_config.in_chans", 4),
    ("vision_config.spatial_patch_size", 7), ("vision_config.rope_parameters", {"rope_theta": 5000.0}), ("vision_config.quantization", 1),
    ("hidden_size", 77), ("rope_theta", 77.0), ("rope_scaling", {"mrope_section": [1, 2, 3]}), ("text_config.is_decoder", 0),
    ("text_config.per_layer_config", {"0": {"use_sliding_window": True}}),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("path", "value"), EVERYWHERE, ids=[path for path, _ in EVERYWHERE])
def test_what_is_not_computed_is_refused_with_path_and_value(family: str, path: str, value: object) -> None:
    """Settings that the trainer does not compute are rejected with path and value.

    This includes flat duplicates of text_config, which transformers ignores in all
    families.
    """
    if family.startswith("qwen3_5"):  # these values of other families are its own
        value = {"text_config.attn_output_gate": False, "text_config.rope_parameters.partial_rotary_factor": 0.5}.get(path, value)
    if (family, path) == ("qwen3_5_moe", "text_config.num_experts"):
        path = "text_config.num_local_experts"  # its name in Qwen3-VL with experts
    shown = str(value["rope_theta"] if "rope_theta" in str(value) else "")
    with pytest.raises(ValueError, match="unsupported settings") as told:
        parse_spec(put(nested(family), path, value), folder="m", key="--hf")
    line = str(told.value)
    last = "sliding_attention" if path.endswith("layer_types") else shown
    assert line.startswith("--hf=m: config.json has unsupported settings: ") and "\n" not in line
    assert (path in line or path.rpartition(".")[2] in line) and last in line and line.endswith("if the model does not use them")


@pytest.mark.parametrize(
    ("family", "path", "value"),
    [
        ("qwen2_vl", "vision_config.hidden_act", "silu"),
        ("qwen2_vl", "vision_config.window_size", 112),
        ("qwen2_5_vl", "text_config.attention_bias", False),
        ("qwen3_vl", "text_config.attention_bias", True),
        ("qwen3_vl", "text_config.sliding_window", 4096),
        ("qwen3_vl", "vision_config.fullatt_block_indexes", [1]),
    ],
)
def test_what_one_family_does_not_compute(family: str, path: str, value: object) -> None:
    """Settings that one family does not compute are rejected, although another family has them."""
    with pytest.raises(ValueError, match=f"{path} is {str(value)[:4]}".replace("[", r"\[")):
        parse_spec(put(nested(family), path, value), folder="m", key="model.path")


def test_every_mistake_is_named_up_to_four() -> None:
    """An error names at most four unsupported fields."""
    stored = nested("qwen2_5_vl") | {f"unknown_{number}": 1 for number in range(6)}
    with pytest.raises(ValueError, match="unsupported settings") as told:
        parse_spec(json.loads(json.dumps(stored, default=str)), folder="m", key="model.path")
    assert [f"unknown_{number}" in str(told.value) for number in range(6)] == [True] * 4 + [False] * 2
