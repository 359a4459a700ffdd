"""The digest of an adapter's base model is equal in every format of the same weights, and different
for every other model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.name_mapping import PEFT_PREFIX
from megatron_rl.weights.formats.base_digest import DIGEST, compute_base_digest
from megatron_rl.weights.formats.checkpoint_source import TensorSource
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import make_peft_config

CHANGED = (
    "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.bias", "model.layers.3.mlp.down_proj.weight",
    "model.layers.3.input_layernorm.weight", "visual.blocks.1.attn.qkv.weight", "visual.blocks.1.mlp.down_proj.weight",
    "visual.merger.mlp.0.weight",
)  # fmt: skip


def opened(folder: Path, like: Path) -> TensorSource:
    return open_source(folder, read_spec(like), key="model.path")


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_checkpoint_of_megatron_has_the_digest_of_its_origin(
    kind: str, checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """A Megatron checkpoint and a bfloat16 copy have the digest of the Hugging Face model they come
    from."""
    model, mcore = checkpoints[kind]
    digest = compute_base_digest(opened(model, model))
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert compute_base_digest(opened(mcore, model)) == digest
    source = opened(mcore, model)
    assert [compute_base_digest(source), compute_base_digest(source)] == [digest, digest]
    rounded = copy_with(model, tmp_path / "bf16", lambda _, tensor: tensor.bfloat16())
    assert compute_base_digest(opened(rounded, model)) == digest


def copy_with(model: Path, out: Path, change: object) -> Path:
    out.mkdir()
    shutil.copy(model / "config.json", out)
    tensors = {name: change(name, tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("changed", CHANGED)
def test_another_model_has_another_digest(changed: str, random_model: Path, tmp_path: Path) -> None:
    """Changing any trainable tensor of a block (attention, MLP, vision tower or merger) changes the
    digest."""
    found = []

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.replace("language_model.", "").endswith(changed):
            return tensor
        found.append(name)
        return tensor * 1.125

    other = copy_with(random_model, tmp_path / "other", change)
    assert len(found) == 1
    assert compute_base_digest(opened(other, random_model)) != compute_base_digest(opened(random_model, random_model))


def adapter(folder: Path, *, digest: str) -> Path:
    folder.mkdir()
    model = load_known_spec("Qwen/Qwen2.5-VL-3B-Instruct")
    config = make_peft_config(model, rank=2, alpha=4.0, dropout=0.0, targets=["attention"], base="runs/one/final", digest=digest)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"{PEFT_PREFIX}model.language_model.layers.0.self_attn.o_proj"
    halves = {f"{name}.lora_A.weight": torch.zeros(2, 128), f"{name}.lora_B.weight": torch.zeros(128, 2)}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_adapter_goes_with_its_own_base_alone(random_model: Path, tied_model: Path, tmp_path: Path) -> None:
    """An adapter is merged only into the base model with the recorded digest.

    Without a recorded digest there is a warning.
    """
    digest = compute_base_digest(opened(random_model, random_model))
    own, silent = adapter(tmp_path / "own", digest=digest), adapter(tmp_path / "silent", digest="")
    assert MergedTensors(opened(random_model, random_model), own, key="--lora").warning == ""
    with pytest.raises(ValueError, match=rf"^--lora={own}: was trained on another base model \(runs/one/final\); use"):
        MergedTensors(opened(tied_model, tied_model), own, key="--lora")
    warning = MergedTensors(opened(tied_model, tied_model), silent, key="--lora").warning
    assert warning.startswith(f"--lora={silent}: its adapter_config.json has no base_model_digest: cannot check that runs/one/final ")


def test_peft_reads_a_config_with_a_digest(tmp_path: Path) -> None:
    """PEFT loads an adapter_config.json that contains the digest, with a warning."""
    folder = adapter(tmp_path / "own", digest="sha256:0")
    with pytest.warns(UserWarning, match=DIGEST):
        config = LoraConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (2, 4.0, "runs/one/final")
