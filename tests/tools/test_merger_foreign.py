"""The merger with checkpoints of other trainers, intact and damaged: Megatron's mp_rank folders and
FSDP shards.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.foreign_checkpoints import State, read_hf_tensors, write_fsdp, write_megatron_lm, write_verl_megatron
from tests.support.merge_checks import assert_refused, assert_same_tensors, run_merge


def copy_companions(model: Path, into: Path) -> None:
    """Copy what verl stores next to its shards: the Hugging Face folder without weights."""
    shutil.copytree(model, into, ignore=shutil.ignore_patterns("*.safetensors"))


def merged(checkpoint: Path, out: Path, *options: object) -> State:
    assert run_merge(checkpoint, out, *options) == 0
    return read_hf_tensors(out)


@pytest.mark.known_failure("checkpoint-not-mergeable")
@pytest.mark.parametrize(
    ("tp", "pp", "chunks", "padding", "tower"),
    [(1, 1, 1, 0, "hf"), (2, 1, 1, 0, "megatron"), (1, 2, 1, 6, "hf"), (2, 2, 1, 64, "megatron"), (2, 2, 2, 0, "hf")],
)
def test_verl_megatron(random_model: Path, tmp_path: Path, tp: int, pp: int, chunks: int, padding: int, tower: str) -> None:
    """Checkpoints with tensor and pipeline parallelism, interleaved stages, a padded vocabulary and
    both layouts of the vision tower give the Hugging Face model's tensors.
    """
    hf, checkpoint = read_hf_tensors(random_model), tmp_path / "actor"
    write_verl_megatron(checkpoint, hf, tp=tp, pp=pp, chunks=chunks, padding=padding, tower=tower)
    copy_companions(random_model, checkpoint / "huggingface")
    assert_same_tensors(merged(checkpoint, tmp_path / "out", "--reference", random_model), hf)
    assert_same_tensors(merged(checkpoint, tmp_path / "own_config"), hf)


def test_verl_megatron_with_tied_embeddings(tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last stage's copy of tied embeddings is not in the result. A copy that differs from the
    embeddings is an error.
    """
    hf, checkpoint = read_hf_tensors(tied_model), tmp_path / "actor"
    write_verl_megatron(checkpoint, hf, tp=2, pp=2, tied=True)
    copy_companions(tied_model, checkpoint / "huggingface")
    assert_same_tensors(merged(checkpoint, tmp_path / "out"), hf)
    path = checkpoint / "model" / "mp_rank_01_001" / "model.pt"
    states = torch.load(path)
    states[0]["language_model.output_layer.weight"][3, 5] += 1e-3
    torch.save(states, path)
    assert_refused(
        checkpoint, tmp_path / "again", capsys, "language.output_layer.weight differs from the embeddings", "mp_rank_01_001/model.pt"
    )


def test_megatron_lm_without_a_config(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Megatron-LM checkpoint has two-digit rank folders, a state dict next to pickled arguments
    and random states, unfused norms, and names without a prefix. It requires --reference.
    """
    hf, checkpoint = read_hf_tensors(random_model), tmp_path / "iter_0000100"
    write_megatron_lm(checkpoint, hf, tp=2)
    assert_refused(checkpoint, tmp_path / "out", capsys, "no config.json", "--reference")
    assert_same_tensors(merged(checkpoint, tmp_path / "out", "--reference", random_model), hf)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (random_model / "tokenizer.json").read_bytes()


class _Attack:
    """An object whose unpickling calls os.mkdir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def damage(change: Callable[[State], None], *, at: int) -> Callable[[int, State], None]:
    return lambda rank, state: change(state) if rank == at else None


LINEAR = "module.decoder.layers.2.mlp.linear_fc2.weight"
TABLE_LINEAR = "language.decoder.layers.2.mlp.linear_fc2.weight"
LAYER = "module.decoder.layers.0"
NORM = "module.decoder.final_layernorm.weight"
PLANTED: dict[str, tuple[Callable[[int, State], None], tuple[str, ...]]] = {
    "missing at one rank": (damage(lambda s: s.pop(LINEAR), at=1), (TABLE_LINEAR, "rank 1", "mp_rank_00/model_optim_rng.pt")),
    "missing everywhere": (lambda _, s: s.pop(NORM), ("Missing: language.decoder.final_layernorm.weight",)),
    "a layer too many": (
        lambda _, s: s.update({name.replace(".layers.3.", ".layers.4."): t for name, t in s.items() if ".decoder.layers.3." in name}),
        ("unknown: language.decoder.layers.4.",),
    ),
    "a row too many": (
        lambda _, s: s.update({LINEAR: torch.cat([s[LINEAR], s[LINEAR][:1]])}),
        (TABLE_LINEAR, "model.layers.2.mlp.down_proj.weight", "[129, 256]", "[128, 256]"),
    ),
    "odd rows where three are fused": (
        lambda _, s: s.update({n: t[1:] for n, t in s.items() if n.endswith("layers.1.self_attention.linear_qkv.bias")}),
        ("language.decoder.layers.1.self_attention.linear_qkv.bias", "model.layers.1.self_attn.q_proj.bias"),
    ),
    "parts of two shapes": (damage(lambda s: s.update({LINEAR: s[LINEAR][:, 1:]}), at=1), (TABLE_LINEAR, "parts differ", "[128, 127]")),
    "copies that differ": (damage(lambda s: s.update({NORM: s[NORM] + 1e-6}), at=1), ("final_layernorm.weight", "ranks 0 and 1")),
    "both spellings of a norm": (
        lambda _, s: s.update({f"{LAYER}.mlp.linear_fc1.layer_norm_weight": s[f"{LAYER}.pre_mlp_layernorm.weight"]}),
        ("layers.0.mlp.linear_fc1.layer_norm_weight", "layers.0.pre_mlp_layernorm.weight", "same tensor"),
    ),
    "a layer under two prefixes": (
        damage(lambda s: s.update({f"language_model.{LINEAR.removeprefix('module.')}": s[LINEAR] + 1}), at=1),
        ("mp_rank_01/model_optim_rng.pt", f"{LINEAR} and language_model.{LINEAR.removeprefix('module.')} are two names of the same tensor"),
    ),
    "a name with and without module.": (
        lambda _, s: s.update({NORM.removeprefix("module."): s[NORM]}), (f"{NORM} and {NORM.removeprefix('module.')} are two names of",),
    ),
    "a tower under two prefixes": (
        lambda _, s: s.update({"visual.merger.ln_q.weight": torch.ones(2), "vision_model.merger.ln_q.weight": torch.ones(2)}),
        ("merger.ln_q.weight and ", "are two names of the same tensor"),
    ),
    "a stranger": (lambda _, s: s.update({"module.decoder.adapter": torch.ones(2)}), ("unknown: language.decoder.adapter",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_damaged_classic_checkpoint_is_refused(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    change, said = PLANTED[fault]
    hf, checkpoint = read_hf_tensors(random_model), tmp_path / "checkpoint"
    write_megatron_lm(checkpoint, hf, tp=2, change=change)
    copy_companions(random_model, checkpoint / "hf")
    assert_refused(checkpoint, tmp_path / "out", capsys, *said)


def test_missing_truncated_and_hostile_rank_files_are_refused(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, checkpoint, out = read_hf_tensors(random_model), tmp_path / "checkpoint", tmp_path / "out"
    write_verl_megatron(checkpoint, hf, tp=2, pp=2)
    copy_companions(random_model, checkpoint / "huggingface")
    path = checkpoint / "model" / "mp_rank_01_000" / "model.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert_refused(checkpoint, out, capsys, str(path), "corrupt")
    path.unlink()
    assert_refused(checkpoint, out, capsys, "mp_rank_01_000", "model.pt")
    path.parent.rmdir()
    assert_refused(checkpoint, out, capsys, "tensor-parallel rank 1, stage 0")
    path.parent.mkdir()
    torch.save([{"language_model.decoder.final_layernorm.weight": _Attack(tmp_path / "owned")}], path)
    assert_refused(checkpoint, out, capsys, str(path))
    assert not (tmp_path / "owned").exists()
    path.write_bytes(whole)
    assert_same_tensors(merged(checkpoint, out), hf)


@pytest.mark.known_failure("checkpoint-not-mergeable")
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2), (2, 3)])
def test_fsdp_shards(random_model: Path, tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    """Even and uneven shards with and without replicas give the Hugging Face model's tensors. The
    shards use the newer names, as a model's state dict does.
    """
    hf, checkpoint = read_hf_tensors(random_model), tmp_path / "actor"
    write_fsdp(checkpoint, load_file(random_model / "model.safetensors"), mesh_shape)
    copy_companions(random_model, checkpoint / "huggingface")
    assert_same_tensors(merged(checkpoint, tmp_path / "out"), hf)
    halved = {name: tensor.bfloat16() for name, tensor in hf.items()}
    assert_same_tensors(merged(checkpoint, tmp_path / "out", "--dtype", "bf16", "--force"), halved)
    assert '"dtype": "bfloat16"' in (tmp_path / "out" / "config.json").read_text()


def test_tied_fsdp_shards_of_a_world_of_plain_tensors(tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state dict contains tied embeddings under two names. They are merged if they are equal
    and are an error otherwise.
    """
    hf, checkpoint = read_hf_tensors(tied_model), tmp_path / "actor"
    copy_companions(tied_model, checkpoint / "huggingface")
    path = checkpoint / "model_world_size_1_rank_0.pt"
    embeddings = hf["model.embed_tokens.weight"]
    torch.save({**hf, "lm_head.weight": embeddings}, path)
    assert_same_tensors(merged(checkpoint, tmp_path / "out"), hf)
    torch.save({**hf, "lm_head.weight": embeddings + 1}, path)
    assert_refused(checkpoint, tmp_path / "again", capsys, "lm_head.weight differs from model.embed_tokens.weight")


def test_damaged_fsdp_shards_are_refused(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, checkpoint, out = read_hf_tensors(random_model), tmp_path / "actor", tmp_path / "out"
    write_fsdp(checkpoint, hf, (3,))
    copy_companions(random_model, checkpoint / "huggingface")
    first, second, third = (checkpoint / f"model_world_size_3_rank_{rank}.pt" for rank in range(3))
    whole = second.read_bytes()
    second.unlink()
    assert_refused(checkpoint, out, capsys, second.name)
    third.rename(second)
    shutil.copyfile(first, third)
    assert_refused(
        checkpoint, out, capsys, "the parts on the ranks", "copy the shards of one checkpoint"
    )  # the smaller part in the wrong place
    second.rename(third)
    second.write_bytes(whole[: len(whole) // 2])
    assert_refused(checkpoint, out, capsys, second.name, "corrupt")
    write_fsdp(tmp_path / "other", {name: tensor for name, tensor in hf.items() if name != "model.norm.weight"}, (3,))
    shutil.copyfile(tmp_path / "other" / second.name, second)
    assert_refused(checkpoint, out, capsys, "rank 1", "Missing: model.norm.weight")
    second.write_bytes(whole)
    shutil.copyfile(first, checkpoint / "model_world_size_4_rank_0.pt")
    assert_refused(checkpoint, out, capsys, "world sizes 3, 4")
    (checkpoint / "model_world_size_4_rank_0.pt").unlink()
    assert_same_tensors(merged(checkpoint, out), hf)
    even = tmp_path / "even"
    even.mkdir()
    copy_companions(random_model, even / "hf")
    write_fsdp(tmp_path / "two", hf, (2,))
    for rank, other in ((0, 1), (1, 0)):
        shutil.copyfile(tmp_path / "two" / f"model_world_size_2_rank_{rank}.pt", even / f"model_world_size_2_rank_{other}.pt")
    assert_refused(even, tmp_path / "swapped", capsys, "model_world_size_2_rank_0.pt", "was saved by a different rank")
