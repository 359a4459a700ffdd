"""Merging an adapter into its base model, and merging all checkpoints of a run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.weights.formats.torch_dist import McoreTensors, TorchDistWriter
from megatron_rl_tools.convert import merge_run
from tests.support.foreign_checkpoints import State, read_hf_tensors
from tests.support.merge_checks import assert_refused, assert_same_tensors, run_merge


def write_adapter(folder: Path, *, targets: dict[str, tuple[int, int]], rank: int = 3, **settings: object) -> State:
    """Write a random adapter in PEFT's format; `targets` maps a module to (outputs, inputs). Return
    its tensors.
    """
    generator = torch.Generator().manual_seed(0)
    state = {}
    for module, (outputs, inputs) in targets.items():
        state[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        state[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 7,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return state


TARGETS = {
    "model.language_model.layers.1.self_attn.k_proj": (64, 128), "model.layers.3.mlp.gate_proj": (256, 128),
    "model.visual.blocks.0.attn.qkv": (192, 64), "visual.merger.mlp.2": (128, 256),
}  # fmt: skip


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_is_added_to_its_weights_alone(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, use_rslora: bool) -> None:
    """Only the adapter's target weights change. Oracle: W + scale * B A in double precision. Module
    names use both naming styles, and the base is a Megatron checkpoint or a Hugging Face folder.
    """
    model, checkpoint = checkpoints["untied"]
    adapter = write_adapter(tmp_path / "adapter", targets=TARGETS, use_rslora=use_rslora)
    scale = 7 / 3**0.5 if use_rslora else 7 / 3
    before = read_hf_tensors(model)
    for base in (checkpoint, model):
        out = tmp_path / f"merged_{base.name}"
        assert run_merge(base, out, "--lora", tmp_path / "adapter") == 0
        after = read_hf_tensors(out)
        touched = set()
        for module in TARGETS:
            a, b = (adapter[f"base_model.model.{module}.lora_{half}.weight"].double() for half in "AB")
            name = f"{module.replace('model.language_model.', 'model.').replace('model.visual.', 'visual.')}.weight"
            torch.testing.assert_close(after[name].double(), before[name].double() + scale * b @ a, rtol=1e-5, atol=1e-5)
            assert not torch.equal(after[name], before[name])
            touched.add(name)
        assert_same_tensors(
            {name: after[name] for name in after.keys() - touched}, {name: before[name] for name in before.keys() - touched}
        )


def test_adapters_that_do_not_fit_are_refused(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = checkpoints["untied"]

    def refused(name: str, *said: str, drop: str = "", targets: dict[str, tuple[int, int]] = TARGETS, **settings: object) -> None:
        adapter = write_adapter(tmp_path / name, targets=targets, **settings)
        if drop:
            del adapter[drop]
            save_file(adapter, tmp_path / name / "adapter_model.safetensors")
        assert_refused(model, tmp_path / "out", capsys, *said, options=("--lora", tmp_path / name))

    refused("dora", "use_dora", use_dora=True)
    refused("bias", "bias=all", bias="all")
    refused("whole_modules", "modules_to_save", modules_to_save=["lm_head"])
    refused("ranks", "rank_pattern", rank_pattern={"q_proj": 8})
    refused("stranger", "layers.9.mlp.up_proj", targets={"model.layers.9.mlp.up_proj": (256, 128)})
    refused("misshapen", "model.layers.0.mlp.up_proj", "[257, 3]", "[256, 128]", targets={"model.layers.0.mlp.up_proj": (257, 128)})
    refused("half", "lora_B", "visual.merger.mlp.2", drop="base_model.model.visual.merger.mlp.2.lora_B.weight")
    refused("twice", "k_proj", targets={**TARGETS, "model.layers.1.self_attn.k_proj": (64, 128)})
    (tmp_path / "bare").mkdir()
    assert_refused(model, tmp_path / "out", capsys, "adapter_config.json", options=("--lora", tmp_path / "bare"))


def test_all_steps_of_a_run(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that fails does not stop the others, a second call merges the remaining steps, and
    --steps selects steps.
    """
    model, checkpoint = checkpoints["untied"]
    run, out = tmp_path / "run", tmp_path / "merged"
    steps = [run / "checkpoints" / f"step_{step:08d}" for step in (3, 6, 9)]
    for path in steps:
        shutil.copytree(checkpoint, path)
    shutil.copytree(checkpoint, run / "checkpoints" / ".step_00000012.partial")
    data = next(path for path in steps[1].iterdir() if path.suffix == ".distcp")
    data.rename(data.with_suffix(".lost"))
    call = ["--run", str(run), "--out", str(out)]
    assert merge_run.main(call) == 1
    said = capsys.readouterr()
    assert (
        "error: step_00000006: " in said.err and said.err.count("\n") == 1 and said.out.splitlines()[-1] == "2 merged, 0 skipped, 1 failed"
    )
    assert sorted(path.name for path in out.iterdir()) == ["step_00000003", "step_00000009"]
    data.with_suffix(".lost").rename(data)
    assert merge_run.main([*call, "--steps", "3", "9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 merged, 2 skipped, 0 failed"
    assert merge_run.main(call) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 merged, 2 skipped, 0 failed"
    for path in steps:
        assert_same_tensors(read_hf_tensors(out / path.name), read_hf_tensors(model))
    assert merge_run.main([*call, "--steps", "4"]) == 1 and "choose from 3 6 9" in capsys.readouterr().err
    assert merge_run.main(["--run", str(tmp_path / "merged" / "step_00000003"), "--out", str(out)]) == 1


def test_a_step_is_neither_its_own_result_nor_another_folder_one(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out in the run's checkpoints folder, and an existing folder that is not a merged model, are
    errors and do not count as skipped steps.
    """
    steps, out = tmp_path / "run" / "checkpoints", tmp_path / "merged"
    shutil.copytree(checkpoints["untied"][1], steps / "step_00000003")
    assert merge_run.main(["--run", str(tmp_path / "run"), "--out", str(steps)]) == 1
    said = capsys.readouterr()
    assert "error: step_00000003: --out=" in said.err and "contains --checkpoint=" in said.err and "0 skipped, 1 failed" in said.out
    (out / "step_00000003").mkdir(parents=True)
    assert merge_run.main(["--run", str(tmp_path / "run"), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "step_00000003: exists" in said.err and "0 skipped, 1 failed" in said.out


def test_a_run_whose_adapter_is_gone(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names --checkpoint as damaged and not --lora, because the user passed
    no adapter.
    """
    checkpoint, like = tmp_path / "step", checkpoints["untied"][1]
    tensors = McoreTensors(like)
    checkpoint.mkdir()
    with TorchDistWriter(checkpoint) as writer:
        for key in tensors.specs:
            writer.add(key, tensors.read(key))
        writer.add("vision.merger.mlp.0.adapter.lora_a.0", torch.ones(2, 256))
        writer.finish()
    shutil.copytree(like / "hf", checkpoint / "hf")
    assert_refused(checkpoint, tmp_path / "out", capsys, f"--checkpoint={checkpoint}: contains the training state", "adapter/ is missing")
    (checkpoint / "adapter").mkdir()
    assert_refused(checkpoint, tmp_path / "out", capsys, f"--checkpoint={checkpoint / 'adapter'}: adapter_config.json is missing")
