"""Extra tensors in a checkpoint: buffers that transformers recomputes are skipped, all others are
rejected by name."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.hf_config import read_spec
from megatron_rl.weights.formats.checkpoint_source import describe_skipped
from megatron_rl.weights.formats.open_checkpoint import open_source

BUFFERS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "visual.rotary_pos_emb.inv_freq", "model.layers.1.attn.masked_bias",
           "model.layers.1.attn.bias", "model.rotary_emb.inv_freq")  # fmt: skip


def beside(model: Path, out: Path, names: tuple[str, ...]) -> Path:
    """Copy the model with additional tensors of these names."""
    out.mkdir()
    shutil.copy(model / "config.json", out)
    tensors = load_file(model / "model.safetensors") | {name: torch.zeros(4) for name in names}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_buffers_are_left_out_with_one_line(random_model: Path, tmp_path: Path) -> None:
    """Recomputed buffers are skipped and listed in one line; the other tensors are those of the
    plain model."""
    folder = beside(random_model, tmp_path / "with", BUFFERS)
    source, plain = (open_source(path, read_spec(random_model), key="model.path") for path in (folder, random_model))
    assert source.specs == plain.specs and sorted(source.skipped) == sorted(BUFFERS)
    assert describe_skipped(source).startswith(
        "skipped: 5 stored tensors that are recomputed (model.layers.0.self_attn.rotary_emb.inv_freq, "
    )
    assert describe_skipped(plain) == ""


@pytest.mark.parametrize("name", ["v_head.summary.weight", "model.layers.0.self_attn.inv_freq", "visual.blocks.0.attn.gate.bias"])
def test_other_tensors_are_refused_by_name(name: str, random_model: Path, tmp_path: Path) -> None:
    """Any other extra tensor is rejected by name."""
    folder = beside(random_model, tmp_path / "with", (name,))
    with pytest.raises(
        ValueError,
        match=f"unknown: {name}. Copy .*, and remove tensors that are not part of the model .such as a value head. from its files$",
    ):
        open_source(folder, read_spec(random_model), key="model.path")
