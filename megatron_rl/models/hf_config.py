"""What a Hugging Face config.json says about the weights: the tensors that must exist, and the table's rows for them."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.activations import ACT2FN

from megatron_rl.models.mapping import Heads, Row, canonical, table

TEXT_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
VISION_SIZES = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "out_hidden_size", "patch_size", "spatial_merge_size",
    "temporal_patch_size", "window_size",
)  # fmt: skip


def read_config(folder: str | Path, *, key: str = "model.path") -> Qwen2_5_VLConfig:
    """The config of a Qwen2.5-VL folder, flat (as released, transformers 4) or nested (transformers 5).

    A released config says only at the top whether embeddings are tied; here `text_config.tie_word_embeddings` always holds it.
    Raises ValueError under the setting's or option's name `key`.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{key}={folder}: no config.json in it; give a Hugging Face model folder (hf download ... --local-dir makes one)")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(error, folder=folder, key=key) from error
    return parse_config(stored, folder=folder, key=key)


def parse_config(stored: dict[str, object], *, folder: str | Path, key: str) -> Qwen2_5_VLConfig:
    """What read_config gives for a config.json with this content; `folder` is only named in errors."""
    try:
        config = Qwen2_5_VLConfig.from_dict(stored)
    except (ValueError, TypeError, AttributeError, IndexError, StrictDataclassError) as error:
        raise _damaged(error, folder=folder, key=key) from error
    if stored.get("model_type") != "qwen2_5_vl":
        raise ValueError(f"{key}={folder}: config.json describes model_type {stored.get('model_type')}; only qwen2_5_vl is known")
    wrong = _wrong_in(config)
    if wrong:
        raise _damaged(wrong, folder=folder, key=key)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    return config


def _damaged(reason: object, *, folder: str | Path, key: str) -> ValueError:
    return ValueError(f"{key}={folder}: config.json is damaged ({' '.join(str(reason).split())}); copy it again")


def _wrong_in(config: Qwen2_5_VLConfig) -> str:
    """What no model can have, though it has the right type (which transformers checks), in words; empty if there is nothing."""
    for part, each in (("", config), ("text_config.", config.text_config), ("vision_config.", config.vision_config)):
        if each.dtype is not None and not (isinstance(each.dtype, torch.dtype) and each.dtype.is_floating_point):
            return f"{part}dtype is {each.dtype}, no floating-point type of torch"
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    sizes = [("", name, text[name]) for name in TEXT_SIZES] + [("vision_config.", name, vision[name]) for name in VISION_SIZES]
    for part, name, size in sizes:
        if not isinstance(size, int) or size < 1:
            return f"{part}{name} is {size}, not a positive integer"
    for part, whole, divisor, values in (
        ("", "hidden_size", "num_attention_heads", text),
        ("", "num_attention_heads", "num_key_value_heads", text),
        ("vision_config.", "hidden_size", "num_heads", vision),
    ):
        if values[whole] % values[divisor]:
            return f"{part}{divisor} is {values[divisor]}, which does not divide {whole}, {values[whole]}"
    for part, values in (("", text), ("vision_config.", vision)):
        if values["hidden_act"] not in ACT2FN:
            return f"{part}hidden_act is {values['hidden_act']}, which transformers does not know"
    if vision["out_hidden_size"] != text["hidden_size"]:
        return f"vision_config.out_hidden_size is {vision['out_hidden_size']}, but hidden_size is {text['hidden_size']}"
    base = text["rope_parameters"].get("rope_theta")
    if not isinstance(base, int | float) or base <= 0:
        return f"rope_theta is {base}, not a positive number"
    if not isinstance(text["rope_parameters"].get("mrope_section"), list):
        return f"rope_scaling.mrope_section is {text['rope_parameters'].get('mrope_section')}, no list of numbers"
    return ""


def hf_shapes(config: Qwen2_5_VLConfig) -> dict[str, torch.Size]:
    """The shape of every tensor that a checkpoint of this config holds, by canonical name: those of transformers' own model
    (5.19, built without memory). Tied embeddings stand once, as `model.embed_tokens.weight`."""
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(deepcopy(config))  # transformers notes its attention in the config that it is given
    shapes = {canonical(name): tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def rows_of(config: Qwen2_5_VLConfig) -> list[Row]:
    """The table of the model that a config (of `read_config`) describes."""
    text = config.text_config
    return table(
        num_layers=text.num_hidden_layers,
        heads=Heads(text.num_attention_heads, text.num_key_value_heads, text.hidden_size // text.num_attention_heads),
        tied=config.tie_word_embeddings,
        vision_names=sorted(name.removeprefix("visual.") for name in hf_shapes(config) if name.startswith("visual.")),
    )
