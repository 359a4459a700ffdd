"""Comparison of checkpoints: the smallest difference is found, named and measured, and equal
checkpoints compare equal across formats and naming styles.
"""

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.name_mapping import nested_name
from megatron_rl_tools.convert import compare, converter_hf_to_mcore
from tests.support.foreign_checkpoints import State

NAME = "model.layers.2.mlp.down_proj.weight"


def changed(model: Path, out: Path, change: Callable[[State], State]) -> Path:
    shutil.copytree(model, out)
    save_file(change(load_file(out / "model.safetensors")), out / "model.safetensors", metadata={"format": "pt"})
    return out


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[State], State]:
    return lambda state: {**state, name: tensor}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = compare.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_equal_across_formats_and_spellings(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Hugging Face checkpoint with released names, the one with nested names and the Megatron
    checkpoint have equal tensors. Logits of transformers and Megatron on a CPU agree within 1e-4,
    at magnitudes of about 10.
    """
    newer = changed(random_model, tmp_path / "newer", lambda state: {nested_name(name): tensor for name, tensor in state.items()})
    assert converter_hf_to_mcore.main(["--hf", str(newer), "--out", str(tmp_path / "mcore")]) == 0
    assert run(capsys, random_model, newer) == (
        0,
        "81 tensors bitwise equal, 0 within the tolerance of 0, 0 outside the tolerance or without a counterpart\n",
    )
    assert run(capsys, tmp_path / "mcore", random_model)[0] == 0
    code, said = run(capsys, random_model, tmp_path / "mcore", "--logits", "--atol", "1e-4")
    assert code == 0 and "logits of the text prompt" in said and "logits of the two-image prompt" in said


def test_one_bit_is_a_difference(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flipping the last bit of one number in 4 MB is a difference. 0.0 and -0.0 are not bitwise
    equal but are equal within a tolerance of 0.
    """
    tensor = load_file(random_model / "model.safetensors")[NAME]
    flipped = tensor.clone()
    flipped.view(torch.int32)[7, 3] ^= 1
    gap = (flipped.double() - tensor.double()).abs().max().item()
    other = changed(random_model, tmp_path / "flipped", with_tensor(NAME, flipped))
    code, said = run(capsys, random_model, other)
    assert code == 1 and NAME in said and f"{gap:.3g}" in said
    assert "80 tensors bitwise equal, 0 within the tolerance of 0, 1 outside" in said
    assert run(capsys, random_model, other, "--atol", gap)[0] == 0
    assert run(capsys, random_model, other, "--atol", gap * 0.99)[0] == 1
    zeros = changed(random_model, tmp_path / "zeros", with_tensor(NAME, torch.zeros_like(tensor)))
    negative = changed(random_model, tmp_path / "negative", with_tensor(NAME, -torch.zeros_like(tensor)))
    assert run(capsys, zeros, negative) == (
        0,
        "80 tensors bitwise equal, 1 within the tolerance of 0, 0 outside the tolerance or without a counterpart\n",
    )


def test_nan_is_beyond_every_tolerance(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN is a difference even if equal values follow it in later chunks."""
    monkeypatch.setattr(compare, "CHUNK_SIZE", 1000)
    tensor = load_file(random_model / "model.safetensors")[NAME]
    tensor[0, 0] = math.nan
    other = changed(random_model, tmp_path / "nan", with_tensor(NAME, tensor))
    code, said = run(capsys, random_model, other, "--atol", "1e9")
    assert code == 1 and NAME in said and "nan" in said
    assert run(capsys, other, other)[0] == 0  # bitwise equal


def test_what_cannot_be_subtracted_differs(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing tensor, an extra tensor and a different shape are differences at any tolerance.
    Tensors of different dtypes are compared by value.
    """
    tensor = load_file(random_model / "model.safetensors")[NAME]

    def change(state: State) -> State:
        del state["model.norm.weight"]
        return {**state, "extra.weight": torch.ones(3), NAME: tensor[:-1].contiguous()}

    code, said = run(capsys, random_model, changed(random_model, tmp_path / "other", change), "--atol", "1e9")
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in said.splitlines() if "differs" in line]
    assert code == 1 and sorted(rows) == [
        ["extra.weight", "nothing", "float32 [3]", "differs"],
        [NAME, "float32 [128, 256]", "float32 [127, 256]", "differs"],
        ["model.norm.weight", "float32 [128]", "nothing", "differs"],
    ]
    halved = changed(random_model, tmp_path / "halved", with_tensor(NAME, tensor.bfloat16()))
    gap = (tensor.bfloat16().double() - tensor.double()).abs().max().item()
    assert run(capsys, random_model, halved, "--atol", gap)[0] == 0
    assert run(capsys, random_model, halved, "--atol", gap * 0.99)[0] == 1


def test_a_copy_of_tied_embeddings_and_padding_are_no_difference(
    tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(state: State) -> State:
        (name,) = (name for name in state if name.endswith("embed_tokens.weight"))
        padded = torch.cat([state[name], torch.ones(64, state[name].shape[1])])
        return {**state, name: padded, "lm_head.weight": padded.clone()}

    number = len(load_file(tied_model / "model.safetensors"))
    code, said = run(capsys, tied_model, changed(tied_model, tmp_path / "published", change))
    assert code == 0
    assert said == f"{number} tensors bitwise equal, 0 within the tolerance of 0, 0 outside the tolerance or without a counterpart\n"


def test_logits_are_held_to_the_tolerance(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights agree within --atol, but the logits do not."""
    tensor = load_file(random_model / "model.safetensors")["model.norm.weight"]
    other = changed(random_model, tmp_path / "louder", with_tensor("model.norm.weight", tensor + 0.01))
    assert run(capsys, random_model, other, "--atol", "0.0101")[0] == 0
    assert run(capsys, random_model, other, "--atol", "0.0101", "--logits")[0] == 1


def test_folders_that_cannot_be_compared(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "contains no checkpoint")):
        assert compare.main([str(random_model), str(wrong)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_a_damaged_checkpoint_is_named_as_it_was_given(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, checkpoint = checkpoints["untied"]
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    data = next(damaged.glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 5000)
    assert compare.main([str(model), str(damaged)]) == 1
    assert re.fullmatch(f"error: folder={damaged}: [a-z_.0-9]+: {data.name} is truncated; .*\n", capsys.readouterr().err)
