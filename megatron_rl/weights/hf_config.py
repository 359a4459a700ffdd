"""What a Hugging Face config.json says about the weights: the tensors that must exist, and the table's rows for them."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from megatron_rl.weights.mapping import Heads, Row, canonical, table


def read_config(folder: str | Path, *, key: str = "model.path") -> Qwen2_5_VLConfig:
    """The config of a Qwen2.5-VL folder, flat (as released, transformers 4) or nested (transformers 5).

    A released config says only at the top whether embeddings are tied; here `text_config.tie_word_embeddings` always holds it.
    Raises ValueError under the setting's or option's name `key`.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{key}={folder}: no config.json in it; give a Hugging Face model folder")
    try:
        stored = json.loads(path.read_text())
        config = Qwen2_5_VLConfig.from_dict(stored)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{key}={folder}: config.json is damaged ({' '.join(str(error).split())}); copy it again") from error
    if stored.get("model_type") != "qwen2_5_vl":
        raise ValueError(f"{key}={folder}: config.json describes model_type {stored.get('model_type')}; only qwen2_5_vl is known")
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    return config


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
