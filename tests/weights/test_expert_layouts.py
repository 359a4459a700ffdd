"""Experts with a tensor for each matrix: read as fused ones, and written by --experts separate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rl.models.hf_config import read_spec
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor import check_model_folder
from megatron_rl.weights.formats.base_digest import compute_base_digest
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.convert import compare, converter_hf_to_mcore
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.foreign_checkpoints import State, read_hf_tensors, write_fsdp
from tests.support.merge_checks import assert_refused, assert_same_tensors, run_merge

LAYER = "model.language_model.layers.0.mlp.experts."
NAMED = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "fused"
    make_checkpoint(folder, family="qwen3_vl_moe", init="random", seed=3, layers=2)
    return folder


def cut(tensors: State) -> State:
    """Cut the fused experts by hand: gate and up are the first and last columns of gate_up_proj."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor) if stem.endswith("experts") else ():
            half = matrix.shape[1] // 2
            parts = {"gate_proj": matrix[:, :half], "up_proj": matrix[:, half:]} if kind == "gate_up_proj" else {"down_proj": matrix}
            found |= {f"{stem}.{expert}.{part}.weight": values.T.contiguous() for part, values in parts.items()}
        if not stem.endswith("experts"):
            found[name] = tensor
    return found


def with_weights(fused: Path, out: Path, tensors: State) -> Path:
    out.mkdir(parents=True)
    for path in fused.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    save_file(tensors, out / "model.safetensors")
    return out


def stored(folder: Path) -> State:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_both_layouts_hold_the_same_model(fused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merger writes the matrices cut by hand, and every reader of Hugging Face names reads them
    as the fused tensors, bit for bit: the merger, the converter, FSDP shards, digests, the
    comparison, and the check of a model folder.
    """
    assert run_merge(fused, tmp_path / "separate", "--experts", "separate") == 0
    assert_same_tensors(stored(tmp_path / "separate"), cut(stored(fused)))
    assert run_merge(tmp_path / "separate", tmp_path / "back", "--reference", tmp_path / "separate") == 0
    assert_same_tensors(stored(tmp_path / "back"), stored(fused))
    assert converter_hf_to_mcore.main(["--hf", str(tmp_path / "separate"), "--out", str(tmp_path / "mcore"), "--tp", "2"]) == 0
    assert run_merge(tmp_path / "mcore", tmp_path / "merged", "--verify") == 0
    assert_same_tensors(stored(tmp_path / "merged"), stored(fused))
    write_fsdp(tmp_path / "fsdp", cut(read_hf_tensors(fused)), (3,))
    assert run_merge(tmp_path / "fsdp", tmp_path / "gathered", "--reference", fused) == 0
    assert_same_tensors(stored(tmp_path / "gathered"), stored(fused))
    digests = {compute_base_digest(open_source(folder, read_spec(fused), key="model.path")) for folder in (fused, tmp_path / "separate")}
    assert len(digests) == 1
    assert compare.main([str(fused), str(tmp_path / "separate")]) == 0
    report = CheckReport()
    assert check_model_folder(str(tmp_path / "separate"), report, key="model.path"), report
    capsys.readouterr()


def test_the_matrices_of_qwen3_5_are_not_transposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its fused tensors consist of the matrices as they are; both layouts hold the same model."""
    make_checkpoint(tmp_path / "fused", family="qwen3_5_moe", init="random", seed=3)
    assert run_merge(tmp_path / "fused", tmp_path / "separate", "--experts", "separate") == 0
    whole, parts = stored(tmp_path / "fused"), stored(tmp_path / "separate")
    gate_up = [torch.cat([parts[f"{LAYER}{expert}.{part}_proj.weight"] for part in ("gate", "up")]) for expert in range(8)]
    assert torch.equal(torch.stack(gate_up), whole[f"{LAYER}gate_up_proj"])
    down = torch.stack([parts[f"{LAYER}{expert}.down_proj.weight"] for expert in range(8)])
    assert torch.equal(down, whole[f"{LAYER}down_proj"])
    assert run_merge(tmp_path / "separate", tmp_path / "back") == 0
    assert_same_tensors(stored(tmp_path / "back"), whole)
    capsys.readouterr()


def test_transformers_fuses_the_written_matrices_alike(fused: Path, tmp_path: Path) -> None:
    """Qwen3-MoE in transformers, which reads separate experts, gets the matrices in the same order:
    gate before up.
    """
    assert run_merge(fused, tmp_path / "separate", "--experts", "separate") == 0
    text = read_spec(fused).config.text_config
    kept = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim")}
    config = Qwen3MoeConfig(
        **kept, num_hidden_layers=2, num_attention_heads=text.num_attention_heads, num_key_value_heads=text.num_key_value_heads,
        num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False, mlp_only_layers=text.mlp_only_layers,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "text")
    words = {name.replace("language_model.", ""): tensor for name, tensor in stored(tmp_path / "separate").items() if "visual" not in name}
    save_file(words, tmp_path / "text" / "model.safetensors", metadata={"format": "pt"})
    model, report = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    for kind in ("gate_up_proj", "down_proj"):
        read = model.state_dict()[f"model.layers.0.mlp.experts.{kind}"]
        assert torch.equal(read, stored(fused)[f"model.language_model.layers.0.mlp.experts.{kind}"].transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda of: of.pop(f"{LAYER}3.up_proj.weight"), f"Missing: {NAMED}3.up_proj.weight; unknown: none"),
        (lambda of: of.update({f"{LAYER}8.down_proj.weight": torch.ones(128, 96)}), f"unknown: {NAMED}8.down_proj.weight"),
        (lambda of: of.update({f"{LAYER}3.up_proj.weight_scale": torch.ones(1)}), f"unknown: {NAMED}3.up_proj.weight_scale"),
        (lambda of: of.update({f"{LAYER}down_proj": torch.ones(8, 96, 128)}),
         f"{NAMED}down_proj and {NAMED}0.down_proj.weight are the same experts in two layouts; remove one"),
        (lambda of: of.update({f"{LAYER}5.down_proj.weight": torch.ones(96, 128)}),
         f"{NAMED}5.down_proj.weight has the shape [96, 128], but config.json requires [128, 96]"),
        (lambda of: of.update({f"{LAYER}5.down_proj.weight": torch.ones(128, 96).bfloat16()}),
         f"{NAMED}5.down_proj.weight is bfloat16 [128, 96], but {NAMED}0.down_proj.weight is float32 [128, 96]"),
    ],
)  # fmt: skip
def test_incomplete_experts_are_refused(
    change: Callable[[State], object], said: str, fused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A matrix that is missing, unknown, stored twice, or of another shape or dtype is named."""
    tensors = cut(stored(fused))
    change(tensors)
    assert_refused(with_weights(fused, tmp_path / "changed", tensors), tmp_path / "out", capsys, said)


def test_what_separate_experts_do_not_support(fused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers does not read separate experts of this model, so logits cannot be verified."""
    separate = with_weights(fused, tmp_path / "separate", cut(stored(fused)))
    assert converter_hf_to_mcore.main(["--hf", str(separate), "--out", str(tmp_path / "mcore"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert f"--hf={separate}: transformers does not read experts with separate tensors" in said and said.count("\n") == 1
    assert not (tmp_path / "mcore").exists()
    assert converter_hf_to_mcore.main(["--hf", str(fused), "--out", str(tmp_path / "mcore")]) == 0
    refused = ("--experts", "separate", "--verify")
    assert_refused(tmp_path / "mcore", tmp_path / "out", capsys, "--verify: transformers does not read separate experts", options=refused)
    make_checkpoint(tmp_path / "dense", family="qwen3_vl", layers=1)
    said = "--experts=separate: the model has no experts; remove the option"
    assert_refused(tmp_path / "dense", tmp_path / "out", capsys, said, options=("--experts", "separate"))
