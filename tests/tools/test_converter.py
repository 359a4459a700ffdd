"""The converter's rules and refusals, in one process and without building a Megatron model. Every
error is one line and leaves existing files unchanged.
"""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models import name_mapping
from megatron_rl.weights.formats.torch_dist import McoreTensors, TorchDistWriter
from megatron_rl_tools.convert.converter_hf_to_mcore import main
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support import fork_server

WEIGHTS = "model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "vision_depth": 1, "vision_hidden": 32, "vocab": 300}
    for name in ("untied", "tied"):
        make_checkpoint(folder / name, init="random", seed=3, tied=name == "tied", **sizes)
    return {name: folder / name for name in ("untied", "tied")}


def variant(source: Path, out: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a model folder with changed tensors."""
    shutil.copytree(source, out)
    save_file(change(load_file(out / WEIGHTS)), out / WEIGHTS, metadata={"format": "pt"})
    return out


def by_hand(tensors: Tensors, *, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """Return Megatron's tensors, assembled by loops over heads from tensors with released names,
    independently of the table in name_mapping.py.
    """
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("visual."):
            made["vision." + name.removeprefix("visual.")] = tensor
    layers = sorted({int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")})
    for layer in layers:
        hf, mcore = f"model.layers.{layer}.", f"language.decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            q, k, v = (tensors[f"{hf}self_attn.{part}_proj.{kind}"] for part in "qkv")
            dim, rows = q.shape[0] // heads, []
            for group in range(kv_heads):
                for head in range(group * heads // kv_heads, (group + 1) * heads // kv_heads):
                    rows.append(q[head * dim : (head + 1) * dim])
                rows += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
            made[f"{mcore}self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        made[f"{mcore}mlp.linear_fc1.weight"] = torch.cat([tensors[f"{hf}mlp.gate_proj.weight"], tensors[f"{hf}mlp.up_proj.weight"]])
        made[f"{mcore}mlp.linear_fc2.weight"] = tensors[f"{hf}mlp.down_proj.weight"]
        made[f"{mcore}self_attention.linear_proj.weight"] = tensors[f"{hf}self_attn.o_proj.weight"]
        made[f"{mcore}self_attention.linear_qkv.layer_norm_weight"] = tensors[f"{hf}input_layernorm.weight"]
        made[f"{mcore}mlp.linear_fc1.layer_norm_weight"] = tensors[f"{hf}post_attention_layernorm.weight"]
    made["language.embedding.word_embeddings.weight"] = tensors[EMBEDDINGS]
    made["language.decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
    if "lm_head.weight" in tensors:
        made["language.output_layer.weight"] = tensors["lm_head.weight"]
    return made


def released(tensors: Tensors) -> Tensors:
    return {name_mapping.canonical_name(name): tensor for name, tensor in tensors.items()}


def assert_holds(checkpoint: Path, wanted: Tensors) -> None:
    stored = McoreTensors(checkpoint)
    assert stored.specs.keys() == wanted.keys()
    for key, tensor in wanted.items():
        found = stored.read(key)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), key


def newer(name: str) -> str:
    """Return the name that transformers uses since version 4.52."""
    first, rest = name.split(".", 1)
    return {"model": "model.language_model.", "visual": "model.visual.", "lm_head": "lm_head."}[first] + rest


def convert(hf: Path, out: Path, *options: str) -> int:
    return main(["--hf", str(hf), "--out", str(out), *options])


@pytest.mark.parametrize("spelling", ["visual.", "model.visual."])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_every_tensor_is_where_megatron_has_it(name: str, spelling: str, models: dict[str, Path], tmp_path: Path) -> None:
    source = models[name]
    assert any(stored.startswith("visual.") for stored in load_file(source / WEIGHTS))
    if spelling == "model.visual.":
        source = variant(source, tmp_path / "newer", lambda tensors: {newer(name): tensor for name, tensor in tensors.items()})
    assert convert(source, tmp_path / "out", "--tp", "2", "--pp", "2") == 0
    assert_holds(tmp_path / "out", by_hand(released(load_file(models[name] / WEIGHTS))))
    assert {path.name for path in (tmp_path / "out" / "hf").iterdir()} == {path.name for path in models[name].iterdir()} - {WEIGHTS}
    assert not list(tmp_path.glob(".*"))


def test_a_rank_reads_its_own_chunks_only(models: dict[str, Path], tmp_path: Path) -> None:
    """The chunks of the checkpoint are those that Megatron requests at tp=2: two equal parts, and
    for gate and up two equal parts each.
    """
    assert convert(models["untied"], tmp_path / "out", "--tp", "2") == 0
    stored = McoreTensors(tmp_path / "out")
    layer = "language.decoder.layers.1."
    starts = {key: [tuple(offsets) for offsets, _ in stored.chunks(layer + key)] for key in (
        "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "self_attention.linear_proj.weight", "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight", "mlp.linear_fc1.layer_norm_weight",
    )}  # fmt: skip
    assert starts == {
        "self_attention.linear_qkv.weight": [(0, 0), (64, 0)], "self_attention.linear_qkv.bias": [(0,), (64,)],
        "self_attention.linear_proj.weight": [(0, 0), (0, 32)],
        "mlp.linear_fc1.weight": [(0, 0), (48, 0), (96, 0), (144, 0)], "mlp.linear_fc2.weight": [(0, 0), (0, 48)],
        "mlp.linear_fc1.layer_norm_weight": [(0,)],
    }  # fmt: skip


def test_every_tensor_is_rounded_when_asked(models: dict[str, Path], tmp_path: Path) -> None:
    assert convert(models["untied"], tmp_path / "out", "--dtype", "bf16") == 0
    tensors = {name: tensor.bfloat16() for name, tensor in released(load_file(models["untied"] / WEIGHTS)).items()}
    assert_holds(tmp_path / "out", by_hand(tensors))
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_padding_of_the_vocabulary_is_left_out(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pad(tensors: Tensors) -> Tensors:
        ends = ("embed_tokens.weight", "lm_head.weight")
        return {name: torch.cat([tensor, torch.ones(5, 64)]) if name.endswith(ends) else tensor for name, tensor in tensors.items()}

    assert convert(variant(models["untied"], tmp_path / "padded", pad), tmp_path / "out") == 0
    assert "5 rows of vocabulary padding (beyond config.vocab_size) removed" in capsys.readouterr().out
    assert_holds(tmp_path / "out", by_hand(released(load_file(models["untied"] / WEIGHTS))))


def test_a_stored_head_of_tied_embeddings_is_a_copy(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With tied embeddings, a stored lm_head.weight that equals the embeddings is dropped, and one
    that differs is refused.
    """

    def with_head(tensors: Tensors, change: float) -> Tensors:
        head = released(tensors)[EMBEDDINGS].clone()
        head[7, 3] += change
        return {**tensors, "lm_head.weight": head}

    assert convert(variant(models["tied"], tmp_path / "copy", lambda tensors: with_head(tensors, 0.0)), tmp_path / "out") == 0
    assert_holds(tmp_path / "out", by_hand(released(load_file(models["tied"] / WEIGHTS))))
    other = variant(models["tied"], tmp_path / "other", lambda tensors: with_head(tensors, 1e-3))
    assert_refused(other, tmp_path / "none", capsys, "lm_head.weight differs from model.embed_tokens.weight")


def test_what_is_missing_beside_weights_is_a_warning(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing tokenizer or processor gives a warning, and the conversion succeeds."""
    shutil.copytree(models["tied"], tmp_path / "bare")
    for name in ("tokenizer.json", "processor_config.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink()
    assert convert(tmp_path / "bare", tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "warning:" in said and "contains no tokenizer" in said and "contains no processor" in said


def assert_refused(hf: Path | str, out: Path, capsys: pytest.CaptureFixture[str], said: str, *options: str) -> None:
    """Assert exit code 1, a one-line error, and no new files, hidden ones included."""
    before = sorted(out.parent.rglob("*"))
    capsys.readouterr()
    assert main(["--hf", str(hf), "--out", str(out), *options]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("converting")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and said in errors[0], errors
    assert sorted(out.parent.rglob("*")) == before


def without(tensors: Tensors, name: str) -> Tensors:
    return {stored: tensor for stored, tensor in tensors.items() if name_mapping.canonical_name(stored) != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: without(tensors, UP), f"Missing: {UP}"),
        (lambda tensors: {**tensors, "model.layers.2.mlp.up_proj.weight": torch.ones(2)}, "unknown: model.layers.2.mlp.up_proj.weight"),
        (
            lambda tensors: {**without(tensors, UP), UP: torch.ones(95, 64)},
            f"{UP} has the shape [95, 64], but config.json requires [96, 64]",
        ),
        (lambda tensors: {**without(tensors, EMBEDDINGS), EMBEDDINGS: torch.ones(9, 64)}, "model.embed_tokens.weight has 9 rows"),
        (lambda tensors: {**without(tensors, UP), UP: torch.ones(96, 64, dtype=torch.bfloat16)}, "different types"),
        (lambda tensors: {**without(tensors, UP), UP: torch.ones(96, 64, dtype=torch.int8)}, "quantized"),
        (lambda tensors: {**tensors, "model.visual.merger.ln_q.weight": torch.ones(32)}, "remove one of the two"),
    ],
    ids=["missing", "unknown", "shape", "short vocabulary", "mixed types", "quantized", "twice"],
)
def test_tensors_that_are_not_the_models(change, said: str, models: dict[str, Path], tmp_path: Path, capsys) -> None:  # noqa: ANN001
    assert_refused(variant(models["untied"], tmp_path / "wrong", change), tmp_path / "out", capsys, said)


def test_folders_that_are_damaged(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["untied"], broken)
    os.truncate(broken / WEIGHTS, (broken / WEIGHTS).stat().st_size - 100)
    assert_refused(broken, tmp_path / "out", capsys, f"--hf={broken}: {WEIGHTS} is corrupt")
    index = broken / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    assert_refused(broken, tmp_path / "out", capsys, "lists model-00002-of-00002.safetensors, but the folder does not contain")
    index.write_text("{")
    assert_refused(broken, tmp_path / "out", capsys, "model.safetensors.index.json is damaged")
    for value in (None, [], {"weight_map": None}, *({"weight_map": {"x": name}} for name in (None, 3, ["a"], ""))):
        index.write_text(json.dumps(value))
        assert_refused(broken, tmp_path / "out", capsys, "model.safetensors.index.json is damaged")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": WEIGHTS}}))
    shutil.copyfile(models["untied"] / WEIGHTS, broken / WEIGHTS)
    assert_refused(broken, tmp_path / "out", capsys, "files: model.safetensors")
    index.unlink()
    (broken / WEIGHTS).rename(broken / "pytorch_model.bin")
    assert_refused(broken, tmp_path / "out", capsys, "*.bin pickles")
    (broken / "pytorch_model.bin").unlink()
    assert_refused(broken, tmp_path / "out", capsys, "no *.safetensors file")
    (broken / "config.json").unlink()
    assert_refused(broken, tmp_path / "out", capsys, "config.json is missing")
    assert_refused(tmp_path / "a" / "b" / "c", tmp_path / "out", capsys, "neither a folder")


def test_a_layout_that_does_not_fit(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remedy = "error: --tp=4: does not divide the model's 2 key/value heads; use one of 1, 2"
    assert_refused(models["untied"], tmp_path / "out", capsys, remedy, "--tp", "4")
    assert_refused(
        models["untied"], tmp_path / "out", capsys, "error: --pp=3: must divide the number of layers of the model (2)", "--pp", "3"
    )
    assert_refused(models["untied"], tmp_path / "out", capsys, "error: --tp=0", "--tp", "0")


def test_places_that_cannot_be_written(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An --out that is a file, or below a file, is refused, also with --force."""
    (file := tmp_path / "file").write_text("mine")
    assert_refused(models["tied"], file, capsys, f"--out={file}: exists")
    assert_refused(models["tied"], file, capsys, "not a checkpoint", "--force")
    assert_refused(models["tied"], file / "out", capsys, f"--out={file / 'out'}: could not be written (")
    assert file.read_text() == "mine"


def test_a_checkpoint_is_replaced_only_when_told_to(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert convert(models["tied"], out) == 0
    assert_refused(models["untied"], out, capsys, "exists")
    assert_holds(out, by_hand(released(load_file(models["tied"] / WEIGHTS))))
    assert convert(models["untied"], out, "--force") == 0
    assert_holds(out, by_hand(released(load_file(models["untied"] / WEIGHTS))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_disk_that_fills_up(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is a one-line error, and a checkpoint that was to be replaced stays intact."""
    assert convert(models["tied"], tmp_path / "out") == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert_refused(models["untied"], tmp_path / "new", capsys, "File too large")
        assert_refused(models["untied"], tmp_path / "out", capsys, "File too large", "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(tmp_path / "out", by_hand(released(load_file(models["tied"] / WEIGHTS))))


@pytest.mark.parametrize("fault", ["lost", "renamed", "short"])
def test_a_result_that_is_not_the_plan(fault: str, models: dict[str, Path], tmp_path: Path, capsys, monkeypatch) -> None:  # noqa: ANN001
    """The files on disk are compared with the plan, independently of what the writer reports."""
    key, add = "language.decoder.layers.1.mlp.linear_fc2.weight", TorchDistWriter.add

    def add_wrongly(self: TorchDistWriter, name: str, *runs: torch.Tensor, dim: int, parts: int) -> None:
        if name == key and fault == "lost":
            return
        renamed = name.replace("fc2", "fc3") if name == key and fault == "renamed" else name
        add(self, renamed, *(runs[0][:-2],) if name == key and fault == "short" else runs, dim=dim, parts=parts)

    monkeypatch.setattr(TorchDistWriter, "add", add_wrongly)
    assert_refused(models["untied"], tmp_path / "out", capsys, key)


DIES = """
import os, signal, sys
from megatron_rl.weights.formats.torch_dist import TorchDistWriter
from megatron_rl_tools.convert.converter_hf_to_mcore import main
add = TorchDistWriter.add
def die_at_the_norm(self, name, *arguments, **options):
    if name == "language.decoder.final_layernorm.weight":
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, name, *arguments, **options)
TorchDistWriter.add = die_at_the_norm
main(sys.argv[1:])
"""


def test_a_killed_conversion_leaves_no_checkpoint_and_can_be_run_again(
    models: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arguments = ["--hf", str(models["untied"]), "--out", str(tmp_path / "out")]
    script = tmp_path_factory.mktemp("script") / "dies.py"
    script.write_text(DIES)
    killed = fork_server.run_script(script, *arguments, timeout_s=200)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.partial" and list(left.glob("*.distcp")) and not (left / ".metadata").exists()
    assert main(arguments) == 0
    assert_holds(tmp_path / "out", by_hand(released(load_file(models["untied"] / WEIGHTS))))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
