"""The merger over this trainer's own checkpoints: bitwise round trips, LoRA, refusals, a full disk, SIGKILL; and the bulk wrapper."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from tests.conftest import ROOT
from tests.unit.foreign import State, tensors_of
from tools.convert import converter_hf_to_mcore, merge_run, merger


def merge(checkpoint: Path, out: Path, *options: object) -> int:
    return merger.main(["--checkpoint", str(checkpoint), "--out", str(out), *map(str, options)])


def stored(folder: Path) -> State:
    """All tensors of a folder under the names in its files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])]


def assert_refused(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], *said: str, options: tuple[object, ...] = ()) -> None:
    """Exit code 1, one line, nothing written."""
    capsys.readouterr()
    assert merge(checkpoint, out, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert not [part for part in said if part not in error], error
    assert not out.exists() and not out.with_name(f".{out.name}.partial").exists()


@pytest.fixture(scope="session")
def checkpoints(random_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """'untied', 'tied': (Hugging Face folder, the checkpoint that the converter made of it)."""
    folder = tmp_path_factory.mktemp("mcore")
    for name, model in (("untied", random_model), ("tied", tied_model)):
        assert converter_hf_to_mcore.main(["--hf", str(model), "--out", str(folder / name), "--tp", "2"]) == 0
    return {"untied": (random_model, folder / "untied"), "tied": (tied_model, folder / "tied")}


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("style", ["released", "nested"])
def test_there_and_back_is_the_same_to_the_last_bit(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str, style: str
) -> None:
    """Tensors, names, companions; and transformers loads it without a missing, unexpected or misshapen key, and computes the same."""
    model, checkpoint = checkpoints[kind]
    out = tmp_path / "out"
    assert merge(checkpoint, out, "--style", style, "--reference", model) == 0
    assert_same(tensors_of(out), tensors_of(model))
    prefixes = {".".join(name.split(".")[:2]) for name in stored(out)} - {"lm_head.weight"}
    released = {"visual.blocks", "visual.merger", "visual.patch_embed", "model.layers", "model.norm", "model.embed_tokens"}
    assert prefixes == ({"model.visual", "model.language_model"} if style == "nested" else released)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(out).keys() and set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(model).values())
    companions = [path for path in model.iterdir() if path.suffix != ".safetensors"]
    assert all((out / path.name).read_bytes() == path.read_bytes() for path in companions)
    loaded, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    original = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    ids = AutoProcessor.from_pretrained(out).tokenizer("Target: 3, current: 1", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, original(input_ids=ids).logits)


def test_another_number_type_is_in_tensors_and_config(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, checkpoint = checkpoints["untied"]
    assert merge(checkpoint, tmp_path / "out", "--dtype", "bf16") == 0
    assert_same(tensors_of(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in tensors_of(model).items()})
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "out"))
    assert before.pop("dtype", None) == "float32" and after.pop("dtype") == "bfloat16" and after == before


def test_verify_runs_both_models(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said when it holds; and a table that swaps gate and up, which a comparison of names and shapes cannot see, is found out."""
    _, checkpoint = checkpoints["untied"]
    assert merge(checkpoint, tmp_path / "out", "--verify") == 0
    assert "verified" in capsys.readouterr().err
    code = """
import sys
from megatron_rl.weights import mapping
mapping.split_halves = lambda fused: fused.chunk(2, 0)[::-1]
from tools.convert.merger import main
sys.exit(main(sys.argv[1:]))"""
    arguments = ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "swapped"), "--verify"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1 and "error: --verify=" in result.stderr, result.stderr
    assert not (tmp_path / "swapped").exists() and not (tmp_path / ".swapped.partial").exists()
    assert_refused(checkpoint, tmp_path / "cast", capsys, "--verify", options=("--verify", "--dtype", "bf16"))


def test_missing_companions_are_a_warning(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["untied"][1], checkpoint)
    for name in ("tokenizer.json", "processor_config.json"):
        (checkpoint / "hf" / name).unlink()
    assert merge(checkpoint, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "warning: " in said and "no tokenizer" in said and "no processor" in said
    assert (tmp_path / "out" / "config.json").exists()


def change_reference(change: Callable[[State], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return write


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("visual.merger.ln_q.weight"), "for visual.merger.ln_q.weight one side has [64], the other nothing"),
        (lambda state: state.update({"extra": torch.ones(1)}), "for extra one side has nothing, the other [1]"),
        (lambda state: state.update({"model.norm.weight": torch.ones(129)}), "for model.norm.weight one side has [128], the other [129]"),
    ],
)  # fmt: skip
def test_a_reference_that_differs(
    checkpoints: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[State], None],
    said: str,
) -> None:
    model, checkpoint = checkpoints["untied"]
    shutil.copytree(model, tmp_path / "reference")
    change_reference(change)(tmp_path / "reference")
    assert_refused(checkpoint, tmp_path / "out", capsys, said, options=("--reference", tmp_path / "reference"))


def test_damaged_checkpoints_and_places_are_refused(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, whole = checkpoints["untied"]
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    assert_refused(tmp_path / "nowhere", out, capsys, "no such folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", out, capsys, "holds no checkpoint", "mp_rank_*", "model_world_size_*")
    shutil.copytree(whole, checkpoint)
    config = json.loads((checkpoint / "hf" / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (checkpoint / "hf" / "config.json").write_text(json.dumps(config))
    assert_refused(checkpoint, out, capsys, "Missing: language.decoder.layers.4.")
    config["text_config"] |= {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "intermediate_size": 258}
    (checkpoint / "hf" / "config.json").write_text(json.dumps(config))
    assert_refused(checkpoint, out, capsys, "language.decoder.layers.0.mlp.linear_fc1.weight", "model.layers.0.mlp.gate_proj.weight", "258")
    shutil.rmtree(checkpoint / "hf")
    assert_refused(checkpoint, out, capsys, "no config.json")
    data = next(path for path in checkpoint.iterdir() if path.suffix == ".distcp")
    data.write_bytes(data.read_bytes()[:-5000])
    assert_refused(checkpoint, out, capsys, data.name, options=("--reference", model))
    (tmp_path / "file").write_text("in the way")
    assert_refused(whole, tmp_path / "file" / "out", capsys, "file")
    before = sorted(whole.iterdir())
    capsys.readouterr()
    assert (
        merge(whole, whole.parent, "--force") == 1 and "holds --checkpoint" in capsys.readouterr().err and sorted(whole.iterdir()) == before
    )


def test_only_force_replaces_and_only_a_model(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, checkpoint = checkpoints["untied"]
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(model, out)
    (out / "old").touch()
    assert merge(checkpoint, out) == 1 and "exists" in capsys.readouterr().err and (out / "old").exists()
    assert merge(checkpoint, out, "--force") == 0 and not (out / "old").exists()
    other.mkdir()
    (other / "thesis.txt").touch()
    assert (
        merge(checkpoint, other, "--force") == 1
        and "is no Hugging Face folder" in capsys.readouterr().err
        and (other / "thesis.txt").exists()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_full_disk_is_an_error_that_leaves_nothing(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file-size limit makes the kernel refuse the write, as a full disk does."""
    _, checkpoint = checkpoints["untied"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        assert_refused(checkpoint, tmp_path / "out", capsys, "model-00001", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_killed_merge_leaves_no_folder_and_can_be_run_again(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, checkpoint = checkpoints["untied"]
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    code = """
import os, signal, sys
from megatron_rl.weights.source import MegatronSource
from tools.convert.merger import main
read = MegatronSource.read
def killed(self, name):
    if name == "model.norm.weight":
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, name)
MegatronSource.read = killed
main(sys.argv[1:])"""
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out)]
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert result.returncode == -signal.SIGKILL and not out.exists() and any(partial.iterdir())
    assert merge(checkpoint, out) == 0
    assert_same(tensors_of(out), tensors_of(model))
    assert not partial.exists()


def write_adapter(folder: Path, *, targets: dict[str, tuple[int, int]], rank: int = 3, **settings: object) -> State:
    """A random adapter in PEFT's format: module -> (outputs, inputs)."""
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
    """Names in both spellings; W + scale B A in double precision is the oracle. The base is ours, or a Hugging Face folder."""
    model, checkpoint = checkpoints["untied"]
    adapter = write_adapter(tmp_path / "adapter", targets=TARGETS, use_rslora=use_rslora)
    scale = 7 / 3**0.5 if use_rslora else 7 / 3
    before = tensors_of(model)
    for base in (checkpoint, model):
        out = tmp_path / f"merged_{base.name}"
        assert merge(base, out, "--lora", tmp_path / "adapter") == 0
        after = tensors_of(out)
        touched = set()
        for module in TARGETS:
            a, b = (adapter[f"base_model.model.{module}.lora_{half}.weight"].double() for half in "AB")
            name = f"{module.replace('model.language_model.', 'model.').replace('model.visual.', 'visual.')}.weight"
            torch.testing.assert_close(after[name].double(), before[name].double() + scale * b @ a, rtol=1e-5, atol=1e-5)
            assert not torch.equal(after[name], before[name])
            touched.add(name)
        assert_same({name: after[name] for name in after.keys() - touched}, {name: before[name] for name in before.keys() - touched})


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
    """One that fails does not stop the others; a second call merges what is left; --steps selects."""
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
        assert_same(tensors_of(out / path.name), tensors_of(model))
    assert merge_run.main([*call, "--steps", "4"]) == 1 and "there are 3 6 9" in capsys.readouterr().err
    assert merge_run.main(["--run", str(tmp_path / "merged" / "step_00000003"), "--out", str(out)]) == 1
