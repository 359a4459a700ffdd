"""launch/evaluate.py reproduces the metrics of a run's own evaluation and gives the same results
after being killed. Also tests what it refuses.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from PIL import Image as pil
from safetensors.torch import load_file, save_file

from megatron_rl.config import EvaluationSettings, ModelSettings, RunSettings, Settings
from megatron_rl.entrypoints.evaluate import open_evaluated_weights
from megatron_rl.evaluation.results_directory import fingerprint_weights
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.support import fork_server

TRAIN, EVALUATE, COMPARE = (ROOT / "launch" / name for name in ("train.py", "evaluate.py", "compare.py"))
TINY = (
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "engine.max_model_len=512", "task.max_new_tokens=6",
)  # fmt: skip
GAME = (*TINY, "task=number_line", "task.max_turns=4", "task.options.invalid=random", "run.seed=5")
"""The random model's responses contain no valid move. With invalid=random, the game draws a move
with a seed derived from the example's index.
"""
NUM_ROWS = 9


@pytest.fixture(scope="module")
def trained(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of one step whose evaluation samples two rollouts per example."""
    run = tmp_path_factory.mktemp("trained") / "run"
    words = ("run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=2", f"run.dir={run}")
    result = fork_server.run_script(TRAIN, *GAME, *words, f"model.path={random_model}", timeout_s=240)
    assert result.returncode == 0, result.stdout
    return run


def scores_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / "evaluation.json").read_text())["scores"]


@pytest.mark.parametrize(("kind", "words"), [("greedy", ()), ("sampled", ("evaluation.samples=2", "evaluation.temperature=1"))])
def test_the_numbers_are_those_of_the_run(kind: str, words: tuple[str, ...], trained: Path, random_model: Path, tmp_path: Path) -> None:
    """The metrics equal those in the run's eval.json to 1e-12. The 30 start states are evaluated in
    two chunks, with weights from the run directory and config and tokenizer from the initial model.
    """
    given = (*GAME, f"model.path={random_model}", f"evaluation.weights={trained}/final", "evaluation.chunk=20", f"run.dir={tmp_path}/out")
    result = fork_server.run_script(EVALUATE, *given, *words, timeout_s=240)
    assert result.returncode == 0, result.stdout
    expected = json.loads((trained / "eval.json").read_text())
    found = scores_of(tmp_path / "out")
    own = {f"{kind}_{name}": value for name, value in found.items() if not name.startswith(("pass_at", "success_"))}
    assert own == {name: pytest.approx(value, abs=1e-12) for name, value in expected.items() if name.startswith(f"{kind}_")}
    assert found["return"] % 1 and 0 < found["success"] < 1, "no two starts are alike"
    assert "success_low" not in found, "all starts are played, with their probabilities: they are no sample"


def test_weights_are_read_from_what_the_converters_read_and_from_adapters(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Weights in Megatron's torch_dist format equal the tensors of the Hugging Face folder. For an
    adapter, the target equals W + alpha / rank * B A computed by hand, and all other tensors are
    unchanged.
    """
    hf, mcore = checkpoints["untied"]
    stored, name = load_file(hf / "model.safetensors"), "model.layers.1.self_attn.o_proj"
    base = open_evaluated_weights(Settings(model=ModelSettings(path=str(hf))))
    moved = open_evaluated_weights(Settings(model=ModelSettings(path=str(hf)), evaluation=EvaluationSettings(weights=str(mcore))))
    assert base.specs.keys() == moved.specs.keys() and len(base.specs) == len(stored)
    assert all(torch.equal(base.read(each), moved.read(each)) for each in base.specs)
    (target,) = [each for each in base.specs if each.endswith("layers.1.self_attn.o_proj.weight")]
    outputs, inputs = base.specs[target].shape
    a, b = torch.randn(2, inputs), torch.randn(outputs, 2)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["o_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    halves = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    merged = open_evaluated_weights(Settings(model=ModelSettings(path=str(hf)), evaluation=EvaluationSettings(weights=str(tmp_path))))
    torch.testing.assert_close(merged.read(target), base.read(target) + 3.0 * b @ a, rtol=0, atol=1e-5)
    assert all(torch.equal(merged.read(each), base.read(each)) for each in base.specs if each != target)


@pytest.mark.parametrize("changed", ["adapter/adapter_model.safetensors", "base/model.safetensors"])
def test_an_evaluation_of_an_adapter_is_of_its_base_too(changed: str, tmp_path: Path) -> None:
    """Changing either the adapter's or the base model's weight file changes the fingerprint, so
    earlier results no longer count. Changing the tokenizer file does not.
    """
    for name in ("adapter/adapter_model.safetensors", "base/model.safetensors", "base/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"as it was")
    settings = Settings(
        model=ModelSettings(path=str(tmp_path / "base")), evaluation=EvaluationSettings(weights=str(tmp_path / "adapter")),
        run=RunSettings(dir=str(tmp_path / "out")),
    )  # fmt: skip
    before = fingerprint_weights(settings)
    (tmp_path / "base" / "tokenizer.json").write_bytes(b"no weights")
    assert fingerprint_weights(settings) == before and len(before) == 2
    (tmp_path / changed).write_bytes(b"written again")
    assert fingerprint_weights(settings) != before


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create nine questions and a model with a vocabulary that can answer some of them."""
    home = tmp_path_factory.mktemp("rows")
    make_checkpoint(home / "model", preset="nano", init="random", seed=0)
    lines = []
    for number in range(NUM_ROWS):
        pil.new("RGB", (56, 56), (20 * number, 90, 200)).save(home / f"{number}.png")
        lines.append({"question": f"What is {number}?", "answer": str(number), "images": [f"{number}.png"]})
    (home / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def asking(rows: Path, out: Path) -> tuple[str, ...]:
    sampling = ("evaluation.samples=2", "evaluation.temperature=1", "evaluation.chunk=2")
    return (*TINY, "task=vqa", f"task.data.eval=[{rows}/mine.jsonl]", f"model.path={rows}/model", f"run.dir={out}", *sampling)


@pytest.fixture(scope="module")
def unbroken(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    result = fork_server.run_world(2, EVALUATE, *asking(rows, out), timeout_s=240)
    assert result.returncode == 0, result.stdout
    return out


def test_killed_it_goes_on(rows: Path, unbroken: Path, tmp_path: Path) -> None:
    """The evaluation is killed after the first of five chunks and repeated with one process instead
    of two. The finished chunk is not evaluated again, and the examples.jsonl equals that of the
    uninterrupted evaluation.
    """
    out, (chunks, first) = tmp_path / "out", (tmp_path / "out" / "rollouts", tmp_path / "out" / "rollouts" / "step_000000.jsonl")
    killed = fork_server.Process(EVALUATE, *asking(rows, out))
    deadline = time.monotonic() + 150
    while not first.exists():
        assert time.monotonic() < deadline and killed.poll() is None, killed.output.read_text()
        time.sleep(0.01)
    killed.kill()
    assert not (out / "evaluation.json").exists()
    assert len(list(chunks.glob("*.jsonl"))) < 5, "killed too late to show anything"
    written = first.stat().st_mtime_ns
    result = fork_server.run_script(EVALUATE, *asking(rows, out), timeout_s=240)
    assert result.returncode == 0, result.stdout
    assert first.stat().st_mtime_ns == written
    assert (out / "examples.jsonl").read_text() == (unbroken / "examples.jsonl").read_text()
    found = scores_of(out)
    assert found == scores_of(unbroken) and found["episodes"] == 2 * NUM_ROWS
    assert found["success_low"] <= found["success"] <= found["success_high"] and found["pass_at_1"] <= found["pass_at_2"]
    said = json.loads((out / "evaluation.json").read_text())["stated"]
    assert said["examples"] == "9 of split eval, 2 episodes each, seed 0" and said["sampling"] == "temperature 1.0"


def test_all_that_was_played_needs_no_engine(rows: Path, unbroken: Path) -> None:
    """Repeating the command computes the metrics from the recorded rollouts without an engine. One
    line of examples.jsonl is compared with its recorded rollouts.
    """
    before = (unbroken / "examples.jsonl").read_text()
    result = fork_server.run_script(EVALUATE, *asking(rows, unbroken), timeout_s=120)
    assert result.returncode == 0 and "evaluation condition" in result.stdout, result.stdout
    assert (unbroken / "examples.jsonl").read_text() == before
    kept = [json.loads(line)["rollout"] for line in (unbroken / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    line = json.loads(before.splitlines()[2])
    assert [each["example_id"] for each in kept] == ["eval/2", "eval/2", "eval/3", "eval/3"] and line["id"] == "eval/2"
    assert line["rewards"] == [each["reward"] for each in kept[:2]]
    assert line["responses"] == [[turn["text"] for turn in each["turns"]] for each in kept[:2]]


def test_asked_to_stop_it_stops_between_chunks(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = fork_server.Process(EVALUATE, *asking(rows, out))
    deadline = time.monotonic() + 150
    while not (out / "rollouts" / "step_000000.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None, process.output.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == os.EX_TEMPFAIL and "Traceback" not in said, said
    assert not (out / "evaluation.json").exists()


def test_what_is_refused(rows: Path, unbroken: Path, trained: Path, random_model: Path, tmp_path: Path) -> None:
    """Other settings, other weights, a training run's directory and a split without examples are
    refused in one line each. run.overwrite=true moves the old results aside.
    """
    refusals = {
        ("task.max_new_tokens=7",): f"run.dir={unbroken}: contains an evaluation with other settings: task.max_new_tokens=7 (was 6)",
        (f"run.dir={trained}",): f"run.dir={trained}: contains a training run; set run.overwrite=true to move this folder aside",
        (f"evaluation.weights={tmp_path}", f"run.dir={tmp_path}/no"): f"evaluation.weights={tmp_path}: contains no checkpoint",
        (
            "engine.mode=server",
            "engine.num_local_servers=1",
            f"run.dir={tmp_path}/no",
        ): "engine.num_local_servers=1: is only supported for training; set engine.urls to running servers",
        ("evaluation.split=train", f"run.dir={tmp_path}/no"): "task.data.train=[]: set the question files",
    }
    for words, line in refusals.items():
        result = fork_server.run_script(EVALUATE, *asking(rows, unbroken), *words, timeout_s=120)
        assert result.returncode == 1 and f"error: {line}" in result.stdout, (words, result.stdout)
    os.utime(rows / "model" / "model.safetensors")
    result = fork_server.run_script(EVALUATE, *asking(rows, unbroken), timeout_s=120)
    assert "contains an evaluation of different weights: the weight files have changed" in result.stdout
    result = fork_server.run_script(EVALUATE, *asking(rows, unbroken), "run.overwrite=true", timeout_s=240)
    assert result.returncode == 0 and (unbroken.with_name("out.1") / "evaluation.json").exists(), result.stdout
    result = fork_server.run_script(COMPARE, unbroken.with_name("out.1"), unbroken, timeout_s=120)
    assert result.returncode == 0 and "+0.0 (+0.0 to +0.0)" in result.stdout and "another" not in result.stdout, result.stdout
