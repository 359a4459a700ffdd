"""Models with released shapes for benchmarks: their tensors are those that transformers creates
from the config, and no two tensors are equal.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from megatron_rl.models.hf_config import read_spec
from megatron_rl_tools.data import make_shapes


def test_a_folder_holds_the_tensors_of_its_config(tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(make_shapes.RELEASED_SIZES["qwen2_5_vl"], "3B", small)
    monkeypatch.setattr(make_shapes, "BLOCK_SIZE", 1 << 16)
    assert make_shapes.main(["--size", "3B", "--layers", "1", "--out", str(tmp_path / "out")]) == 0
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(weights)
    assert {name: tensor.shape for name, tensor in tensors.items()} == read_spec(tmp_path / "out").shapes()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    large = [tensor.flatten()[:4096].float() for tensor in tensors.values() if tensor.numel() >= 4096]
    assert len({tuple(tensor[:8].tolist()) for tensor in large}) == len(large) > 10
    assert all(0.01 < tensor.std() < 0.03 for tensor in large)
    assert make_shapes.main(["--size", "3B", "--out", str(tmp_path / "out")]) == 1


def test_a_folder_of_another_family_has_the_names_that_it_was_released_with(tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(make_shapes.RELEASED_SIZES["qwen3_vl"], "2B", small)
    monkeypatch.setattr(make_shapes, "BLOCK_SIZE", 1 << 16)
    assert make_shapes.main(["--family", "qwen3_vl", "--size", "2B", "--layers", "1", "--out", str(tmp_path / "out")]) == 0
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert len(model.model.language_model.layers) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "qwen3_vl", "--out", "out"], "error: --size=3B: choose one of 2B, 4B, 8B, 32B"),
        (["--layers", "-1", "--out", "out"], "error: --layers=-1: must be at least 1"),
        (["--out", "file/out"], "error: --out=file/out: could not be written ("),
    ],
)
def test_refusals(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capsys) -> None:  # noqa: ANN001
    monkeypatch.setattr(make_shapes, "BLOCK_SIZE", 1 << 16)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert make_shapes.main(["--size", "3B", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
