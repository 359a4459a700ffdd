"""Every benchmark runs at its smallest sizes, which measure nothing, through the program that a
user starts. Benchmarks that start training runs, several engines or a sandbox are long.
"""

import asyncio
import gzip
import json
import math
import re
import socket
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType

import httpx
import pandas
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megatron_rl.batching.packing import pack
from megatron_rl.config import TaskSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.trace import write_trace
from megatron_rl.observe.viewer.demo import make_demo_run
from megatron_rl.observe.viewer.store import label_folders
from megatron_rl.rollout.scheduler import choose_prompts
from megatron_rl.tasks.gym_cards.task import NumberLineTask
from tests.conftest import ROOT, SUPPORT
from tests.contracts.test_configs import settings_of
from tests.observe.test_viewer import CHROMIUM
from tests.support import fork_server
from tests.support.fake_listener import FakeEngineHolder
from tests.support.listener_clients import serve_listener
from tests.support.model_server_process import encode_png, make_noise_image

FOLDER = ROOT / "benchmarks"
TRL = ROOT / ".venv-trl"


def said_by(name: str, *arguments: object, timeout_s: float = 120) -> str:
    """Run benchmarks/NAME.py; assert exit code 0; return its output."""
    ended = fork_server.run_script(FOLDER / f"{name}.py", *arguments, timeout_s=timeout_s)
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


def rows(said: str) -> list[list[str]]:
    """Return the cells of a Markdown table's rows without the header."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    return [line for line in lines[2:] if not set("".join(line)) <= set("-")]


def test_none_is_left_out() -> None:
    """Every benchmark in benchmarks/ is named in this module. prose_sample, points24_errors and
    published_scores, with published_files, have their own modules.
    """
    tested = Path(__file__).read_text()
    assert not [path.stem for path in FOLDER.glob("*.py") if not re.search(rf"\b{path.stem}\b", tested)]


def test_convert(random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversion tools run in forked processes, which saves a few seconds of imports. The peak
    memory of a process is checked separately to be in bytes.
    """
    convert = benchmark("convert")
    assert 300 << 20 < convert.cost(sys.executable, "-c", "b'x' * (300 << 20)").peak_bytes < 100 << 30

    def tool(source: Path, *command: str) -> object:
        ended = fork_server.run_script(*command, timeout_s=120)
        assert ended.returncode == 0, ended.stdout
        return convert.Cost(seconds=1.0, peak_bytes=1 << 30)

    monkeypatch.setattr(convert, "converted", tool)
    monkeypatch.setattr(sys, "argv", ["convert.py", "--models", str(random_model), "--folder", str(tmp_path / "new")])
    convert.main()
    said = capsys.readouterr().out
    there, back = [line.split() for line in said.splitlines()[1:]]
    assert there[:3] == ["random", "to", "Megatron"] and back[:4] == ["random", "to", "Hugging", "Face"]
    assert there[5] == back[6] == "1.00" and not (tmp_path / "new").exists()
    assert (random_model / "config.json").exists(), "what is not its own stays"


def test_logprob_memory() -> None:
    """The sums do not depend on the block size."""
    one, other = rows(said_by("logprob_memory", "--rows", 8, "--hidden", 16, "--blocks", 8, 3))
    assert (one[0], other[0]) == ("8", "3")
    assert [float(cell) for cell in one[3:]] == pytest.approx([float(cell) for cell in other[3:]], rel=1e-4)


@pytest.mark.long
def test_card_games(tmp_path: Path) -> None:
    """Two cells of one game share a warm start. Cells with results are not run again, and cells
    without results are listed as not run.
    """
    given = ("--out", tmp_path, "--tiny", "--seeds", 3, "--cells")
    said = said_by("card_games", *given, "number_line/ppo", timeout_s=240)
    assert "seed 3, number_line/ppo: done" in said
    found = {(row[0], row[1]): row for row in rows(said)}
    ran = found["number_line", "ppo"]
    assert ran[2] == "1" and 0 <= float(ran[3].split()[0]) <= 100 and float(ran[8]) > 0 and float(ran[9]) > 0
    assert found["blackjack", "ppo"][2] == found["number_line", "gigpo"][2] == "not run" and len(found) == 7
    began = time.monotonic()
    assert rows(said_by("card_games", *given, "number_line/ppo")) == rows(said)
    assert time.monotonic() - began < 5, "read, not run"


@pytest.mark.long
def test_env_steps(random_model: Path) -> None:
    theirs, ours, ratio = rows(
        said_by("env_steps", "--model", random_model, "--seconds", 0.5, "--steps", 2, "--max-tokens", 4, "--games", 8, "--cores", 2)
    )
    assert float(theirs[1]) > 0 and float(ratio[1]) == pytest.approx(float(ours[1]) / float(theirs[1]), rel=0.1)


def test_mfu(random_model: Path, tmp_path: Path) -> None:
    sizes, trace = ("--sequences", 4, "--text", 16, "--image", 56, "--updates", 1), tmp_path / "trace.json.gz"
    said = said_by("mfu", "--model", random_model, *sizes, "--group", 2, "--profile", "--trace", trace)
    assert any(event.get("name") == "aten::mm" for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    row = rows(said)[0]
    assert row[0] == "CPU" and float(row[2]) > 0 and float(row[4]) > 0
    assert re.search(r"^host synchronizations in one update: \{.*'aten::_local_scalar_dense': [1-9]", said, re.MULTILINE)


def test_what_mfu_counts(random_model: Path) -> None:
    """Token counts and FLOPs equal values computed by hand. An image of 4 x 4 patches is 4 tokens;
    with the two tokens around it and 4 text tokens a prompt has 10 tokens, 9 of which can be
    shared; a response adds 4. There are two pairs of sequences, with and without shared prompts.
    """
    mfu, spec = benchmark("mfu"), read_spec(random_model)
    pack_them = partial(pack, image_token_id=spec.image_token_id, positions=spec.rope_positions)
    apart, shared = (
        pack_them(mfu.pieces(spec, contexts=4, text=8, side=56, group=2, unshared=unshared), share_prompts=True)
        for unshared in (True, False)
    )
    assert (apart.num_tokens, shared.num_tokens) == (4 * 14, 2 * 9 + 4 * 5) and len(apart.images) == len(shared.images) == 2
    assert mfu.squares(apart) == 4 * 14**2 and mfu.squares(shared) == 2 * 9**2 + 4 * (14**2 - 9**2)
    attention = 12 * spec.num_layers * spec.num_heads * spec.head_dim / 2 * mfu.squares(shared)
    language = 900 * 38 + 100 * 4 * 4
    for has_adapters, expected in ((False, 6 * language + 6 * 10 * 32), (True, 4 * language + 2 * 10 * 32)):
        counted = mfu.flops({"decoder": 900, "output": 100, "vision": 10}, [shared], spec, has_adapters=has_adapters)
        assert counted == expected + attention
    named = {"model.embed_tokens.weight": 2, "lm_head.weight": 2, "model.norm.weight": 3, "visual.merger.weight": 4}
    assert mfu.count_parameters((name, torch.ones(size)) for name, size in named.items()) == {"decoder": 3, "output": 2, "vision": 4}
    named["model.layers.0.mlp.experts.down_proj"] = 8
    assert mfu.count_parameters(((name, torch.ones(size)) for name, size in named.items()), used_experts=0.25)["decoder"] == 3 + 2


@pytest.mark.long
def test_host_memory() -> None:
    """More episodes need at least as much memory for images."""
    few, many, difference = rows(said_by("host_memory", "--side", 56, "--episodes", 2, 3, "--ranks", 1))
    assert float(few[1]) <= float(many[1]) and min(float(few[2]), float(many[2])) > 0.2
    assert "measured / planned" in difference[2]


def test_scheduling() -> None:
    (row,) = rows(said_by("scheduling", "--seeds", 0, "--episodes", 2, "--turns", 1, "--tokens", 3))
    locked, free, alone = map(float, row[1:4])
    assert locked > 0 and free > 0 and alone > 0


def test_engine_stalls() -> None:
    """The images are large enough to be rendered in a thread outside the event loop."""
    sizes = ("--groups", 2, "--samples", 2, "--megapixels", 0.2, "--tokens", 40, "--step-ms", 2)
    said = json.loads(said_by("engine_stalls", *sizes).splitlines()[-1])
    assert 40 < said["steps"] <= 160 and 0 < said["stalled_share"] < 1 and 0 < said["longest_stall_s"] <= said["stalled_s"]


def test_weight_sync(torchrun, random_model: Path) -> None:  # noqa: ANN001
    """weight_sync.py runs with one of its layouts and prints its row."""
    said = torchrun(1, FOLDER / "weight_sync.py", "--layout", "1 process", "--repeats", 1, "--model", random_model)
    assert re.search(r"^1 process +\d+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+", said, re.MULTILINE), said


@pytest.mark.long
def test_sandbox_calls() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = ("--parts", "warm", "throughput")
    said = said_by("sandbox_calls", *parts, "--repeats", 2, "--clients", 2, "--seconds", 0.1, "--port", port)
    assert (
        "| warm call: print |" in said
        and len(re.findall(r"^\| .*, one open box per client \| \d+ \| \d+ \| \d+ \|$", said, re.MULTILINE)) == 3
    )


@pytest.mark.long
def test_alfworld_random(alfworld_games: Path) -> None:
    """The planner wins all games, and the random player takes more steps than the planner."""
    said = said_by("alfworld_random", "--games", alfworld_games, "--num", 6, "--timed", 1, "--at-once", 2)
    assert f"12 games in {alfworld_games}, 0 of them new" in said
    chance, planner, (at_once, rate, memory) = [row for row in rows(said) if row[0] != "concurrent games"]
    assert (chance[0], planner[0]) == ("random", "planner") and planner[1].startswith("100.0 (")
    assert float(chance[-2]) > float(planner[-2]) and at_once == "2" and int(rate) > 0 and int(memory) > 0


@pytest.mark.long
def test_sandbox_calls_leave_nothing() -> None:
    """sandbox_calls leaves no processes. This test must run alone on the machine, because files of
    other programs in the temporary folder would be counted.
    """
    assert "| processes | 0 |" in said_by("sandbox_calls", "--parts", "leaks", "--calls", 200)


def benchmark(name: str) -> ModuleType:
    """Import a benchmark as a module without running it."""
    sys.path.insert(0, str(FOLDER))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(FOLDER))


def test_the_tiny_runs_compose() -> None:
    """The tiny settings of the two benchmarks that take minutes compose to valid settings."""
    numberline, search = benchmark("numberline"), benchmark("visual_search")
    for stage in ("sft", "grpo"):
        assert settings_of(f"experiment=numberline_{stage}_cpu", *numberline.TINY[stage]).stage == ("sft" if stage == "sft" else "rl")
    for stage, experiment in search.STAGES.items():
        assert settings_of(f"experiment={experiment}", *search.TINY[stage]).task.data.max_eval == 4
    minigrid = benchmark("minigrid_learning")
    for cell, words in minigrid.CELLS.items():
        place = minigrid.ENVIRONMENTS[cell.split("/")[0]]
        whole, tiny = (settings_of(*words, *place, *more) for more in ((), [*minigrid.TINY, *minigrid.TINY_STAGE["rl"]]))
        assert whole.batch.prompts_per_step * whole.batch.group_size == 48, "all algorithms have equally many episodes"
        assert whole.task.max_turns == whole.task.options.kwargs["max_steps"] and tiny.run.steps == 1


def test_distillation_table(tmp_path: Path) -> None:
    """All cells train on equally many episodes, and the table has the finished runs with their mean."""
    distillation = benchmark("distillation")
    for words in distillation.CELLS.values():
        given = [*distillation.EPISODES, *(word.format(teacher="t") for word in words)]
        whole, tiny = (settings_of("experiment=numberline_grpo_cpu", *given, *more) for more in ((), distillation.TINY))
        assert whole.run.steps * whole.batch.prompts_per_step * whole.batch.group_size == 1152 and tiny.run.steps == 1
        assert whole.distill.has_teacher == bool(words) and whole.distill.teacher in ("", "t")
    for seed, greedy in ((0, 0.5), (1, 0.75)):
        folder = tmp_path / f"seed{seed}" / "distill"
        folder.mkdir(parents=True)
        (folder / "eval.json").write_text(json.dumps({"greedy_success": greedy, "sampled_success": 0.25}))
    assert rows(distillation.format_table(tmp_path, [0, 1, 2])) == [["distill", "50.0 / 75.0", "62.5", "25.0 / 25.0", "25.0"]]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_distillation(tmp_path: Path) -> None:
    """A tiny cell trains the warm start, the teacher and the policy."""
    said = said_by("distillation", "--seeds", 0, "--out", tmp_path / "out", "--tiny", "--cells", "distill", timeout_s=800)
    assert [row[0] for row in rows(said)] == ["warm start", "teacher", "distill"]


def test_minigrid_table(tmp_path: Path) -> None:
    """Scores and intervals are those of finished runs, and all other runs are listed as not run."""
    references = {place: {"random play": [0.25, 0.1, 400], "solver": [1.0, 0.7, 400]} for place in ("empty", "door_key")}
    (tmp_path / "references.json").write_text(json.dumps(references))
    found = {"greedy_success": 0.8, "greedy_return": 0.5, "greedy_episodes": 10}
    found |= {"sampled_success": 0.5, "sampled_return": -0.25, "sampled_episodes": 20}
    folder = tmp_path / "seed1" / "door_key" / "ppo"
    folder.mkdir(parents=True)
    (folder / "eval.json").write_text(json.dumps(found))
    (folder.parent / "ppo.seconds").write_text("90.0\n")
    table = benchmark("minigrid_learning").make_table(tmp_path, [0, 1], num_reference=400)
    assert "| door_key | ppo | 1 | 80.0 (49.0 to 94.3) | 0.500 | 50.0 (29.9 to 70.1) | -0.250 | 1.5 |" in table
    assert "| empty | random play | | 25.0 (21.0 to 29.5) | 0.100 | | | |" in table and "| door_key | ppo | 0 | not run |" in table
    assert sum(row[3] == "not run" for row in rows(table)) == 2 * 6 - 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("minigrid") is None, reason="minigrid is not installed")
def test_minigrid_learning(tmp_path: Path) -> None:
    """A finished cell is not run again. The solver reaches the goal in every episode."""
    given = ("--out", tmp_path, "--tiny", "--seeds", 3, "--cells", "empty/grpo")
    said = said_by("minigrid_learning", *given, timeout_s=800)
    found = {(row[0], row[1]): row for row in rows(said)}
    assert float(found["empty", "grpo"][-1]) > 0 and found["door_key", "gigpo"][3] == "not run"
    assert found["empty", "solver"][3].startswith("100.0 ") and (tmp_path / "empty.png").is_file()
    assert rows(said_by("minigrid_learning", *given)) == rows(said)


def test_geometry_tables(tmp_path: Path) -> None:
    """Three grids and one pair of circles in each split. The majority answer, the means, the t
    interval over two seeds and Wilson's interval equal values computed by hand; cells without a
    result are listed as not run."""
    geometry = benchmark("geometry")
    asked = [("Grid", "2"), ("Grid", "2"), ("Grid", "3"), ("Circles", "Yes")]
    trained = [("Grid", "3"), ("Grid", "2"), ("Grid", "2"), ("Circles", "No"), ("Circles", "Yes"), ("Circles", "Yes")]
    correct = {("sft", 0): (1 / 3, 0.0), ("sft", 1): (1 / 3, 0.0), ("grpo", 0): (1.0, 1.0), ("grpo", 1): (1.0, 0.0)}
    for seed in (0, 1):
        data = tmp_path / f"seed{seed}" / "data"
        data.mkdir(parents=True)
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in trained]
        (data / "train.jsonl").write_text("".join(lines))
        for split in geometry.SPLITS:
            name = "" if split == "eval" else f", {split.removeprefix('shift_')}"
            lines = [json.dumps({"task": task + name, "prompt": task, "groundtruth": answer}) + "\n" for task, answer in asked]
            (data / f"{split}.jsonl").write_text("".join(lines))
        for cell in geometry.CELLS:
            grid, circles = correct[cell, seed]
            metrics = {"greedy_task_grid": grid, "greedy_task_circles": circles}
            for shift in ("color", "width", "size", "count"):
                metrics |= {f"greedy_task_grid_{shift}": 0.0, f"greedy_task_circles_{shift}": float(cell == "grpo")}
            (tmp_path / f"seed{seed}" / cell).mkdir()
            (tmp_path / f"seed{seed}" / cell / "eval.json").write_text(json.dumps(metrics))
        (tmp_path / f"seed{seed}" / "grpo.seconds").write_text("90.0\n")
    found = {(row[0], row[1]): row for row in rows_of_tables(geometry.make_tables(tmp_path, [0, 1, 2]))}
    mean, reach = 87.5, 12.706 * 12.5  # deviation 17.68 over the root of 2; the differences 75 and 50 have the same
    assert found["eval", "75.0"][2:] == ["25.0 (25.0 to 25.0)", f"{mean} ({max(0, mean - reach):.1f} to 100.0)", "+62.5 (-96.3 to +221.3)"]
    assert found["shift_count", "75.0"][2:] == ["0.0 (0.0 to 0.0)", "25.0 (25.0 to 25.0)", "+25.0 (+25.0 to +25.0)"]
    assert found["sft", "0"][2] == "25.0 (4.6 to 69.9)" and found["grpo", "1"][2] == "75.0 (30.1 to 95.4)"
    assert found["grpo", "0"][-1] == "1.5" and set(found["sft", "2"][2:-1]) == {"not run"}
    assert found["Grid", "33.3 (33.3 to 33.3)"][2] == "100.0 (100.0 to 100.0)" and found["Circles", "0.0 (0.0 to 0.0)"]


def rows_of_tables(said: str) -> list[list[str]]:
    """Return the cells of the rows of several Markdown tables, without their headers."""
    return [row for table in said.split("\n\n") for row in rows(table)]


@pytest.mark.long
def test_geometry(tmp_path: Path) -> None:
    """A finished cell is not run again."""
    given = ("--out", tmp_path, "--tiny", "--seeds", 3)
    said = said_by("geometry", *given, timeout_s=800)
    assert "seed 3, grpo: done" in said and (tmp_path / "geometry_curves.png").is_file()
    assert not any("not run" in row for row in rows_of_tables(said[said.index("| split") : said.index("curve:")].strip()))
    began = time.monotonic()
    assert said_by("geometry", *given).count("done") == 2 and time.monotonic() - began < 30


def test_agent_frameworks_table(tmp_path: Path) -> None:
    """Success is the fraction of positive returns, with Wilson's interval; other runs are listed as
    not run; and all cells train on equally many episodes."""
    frameworks = benchmark("agent_frameworks")
    home = tmp_path / "seed1"
    found = {
        "verifiers_before_greedy": [[-4.0], [1.0]],
        "verifiers_before_sampled": [[1.0, -2.0], [0.0, -1.0]],
        "verifiers_after_sampled": [[1.0, 1.0], [1.0, -1.0]],
    }
    for name, rewards in found.items():
        (home / name).mkdir(parents=True)
        (home / name / "evaluation.json").write_text("{}")
        (home / name / "examples.jsonl").write_text("".join(json.dumps({"rewards": each}) + "\n" for each in rewards))
    (home / "verifiers" / "final").mkdir(parents=True)
    (home / "verifiers" / "final" / "config.json").write_text("{}")
    steps = [{"step": step, "reward/mean": 0.5, "rollout_mismatch/logprob_abs_diff_max": gap} for step, gap in enumerate((2e-6, 1e-6))]
    (home / "verifiers" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (home / "verifiers.seconds").write_text("90.0\n")
    table = frameworks.make_table(tmp_path, [0, 1])
    assert "| verifiers | 1 | SFT | 50.0 (9.5 to 90.5) | -1.50 | 25.0 (4.6 to 69.9) | -0.50 |  |  |" in table
    assert "| verifiers | 1 | GRPO | not run |  | 75.0 (30.1 to 95.4) | 0.50 | 2.0e-06 | 1.5 |" in table
    assert sum(cell == "not run" for row in rows(table) for cell in row) == 2 * 4 * len(frameworks.CELLS) - 3
    for cell in frameworks.CELLS:
        task = frameworks.task_settings(cell, tmp_path, "http://127.0.0.1:1")
        settings = settings_of(*task, *frameworks.MODEL, *frameworks.RL, "model.path=nano", "run.dir=out")
        assert (settings.batch.prompts_per_step, settings.batch.group_size, settings.run.steps) == (8, 8, 24)


def test_agent_frameworks_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, only unfinished parts of a cell run; a finished cell runs nothing."""
    frameworks, launched = benchmark("agent_frameworks"), []
    is_interrupted = True

    def run(command: list[str], **_: object) -> None:
        folder = Path(command[-1].removeprefix("run.dir="))
        script = [word for word in command if word.startswith("launch/")][-1]
        launched.append((script, folder.name))
        if is_interrupted and folder.name == "number_line":
            raise CalledProcessError(75, command)
        name = "evaluation.json" if script == "launch/evaluate.py" else "final/config.json"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")

    monkeypatch.setattr(frameworks.subprocess, "run", run)
    monkeypatch.setattr(frameworks, "make", lambda *_: None)
    (tmp_path / "seed0" / "data").mkdir(parents=True)
    (tmp_path / "seed0" / "data" / "words.txt").write_text("+\n")
    kinds = ("greedy", "sampled")
    before, after = ([("launch/evaluate.py", f"number_line_{time}_{kind}") for kind in kinds] for time in ("before", "after"))
    training = ("launch/train.py", "number_line")
    with pytest.raises(CalledProcessError):
        frameworks.run_cell("number_line", 0, tmp_path, tmp_path, tiny=False)
    assert launched == [("launch/train.py", "sft"), *before, training]
    launched.clear()
    is_interrupted = False
    for _ in range(2):
        frameworks.run_cell("number_line", 0, tmp_path, tmp_path, tiny=False)
    assert launched == [training, *after]
    assert all(float((tmp_path / "seed0" / f"{name}.seconds").read_text()) >= 0 for name in ("sft", "number_line"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (ROOT / ".venv-agents").exists(), reason="needs bash launch/install_agents.sh .venv-agents")
def test_agent_frameworks(tmp_path: Path) -> None:
    """A finished cell is not run again."""
    given = ("--out", tmp_path, "--tiny", "--seeds", 3, "--cells", "verifiers")
    said = said_by("agent_frameworks", *given, timeout_s=800)
    _, row = (row for row in rows(said) if row[0] == "verifiers")
    assert row[1:3] == ["3", "GRPO"] and float(row[7]) <= 1e-4 and float(row[8]) > 0
    assert rows(said_by("agent_frameworks", *given)) == rows(said)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["numberline", "visual_search"])
def test_a_recipe_over_seeds(name: str, tmp_path: Path) -> None:
    said = said_by(name, "--seeds", 0, "--out", tmp_path / "out", "--tiny", timeout_s=800)
    assert all(row[0] == "0" for row in rows(said)) and rows(said)
    assert (tmp_path / "out" / "reward_curve.png").exists()


@pytest.fixture
def given(random_model: Path, tmp_path: Path) -> Namespace:
    return Namespace(model=str(random_model), steps=2, warmup=1, seed=0, out=tmp_path)


@pytest.fixture(scope="module")
def vs_trl() -> ModuleType:
    return benchmark("vs_trl")


@pytest.mark.long
def test_our_side_of_the_comparison(
    given: Namespace, vs_trl: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark starts, monitors and reads this project's side as in a comparison, with one
    process and fewer episodes.
    """
    monkeypatch.setattr(vs_trl, "PROMPTS", 4)
    monkeypatch.setattr(vs_trl, "GROUP_SIZE", 2)
    ours = vs_trl.measure(vs_trl.our_side(given, given.out / "ours", processes=1), given)
    assert ours.step_s > 0 and ours.first_step_s > ours.step_s and len(ours.solved) == 2 and ours.peak_rss_gb > 0.1
    theirs = replace(ours, side="TRL 2x1", step_s=2 * ours.step_s)
    vs_trl.report([theirs, ours], given)
    vs_trl.compare([theirs, ours], ours=ours.side, theirs=theirs.side)
    said = capsys.readouterr().out
    assert "seconds per step: TRL 2x1 / ours 1x1 = 2.00" in said and "the same policy" in said


def test_trls_side_without_trl(given: Namespace, vs_trl: ModuleType) -> None:
    """TRL's side runs with a fake in place of TRL, which is not installed. Prompt ids and pixels,
    the order of prompts, the reward and the log are checked.
    """
    side = vs_trl.trl_side(given, given.out / "TRL", switches=vs_trl.TRL_BEST)
    side.log.parent.mkdir()
    assert side.command[-2:] == ["--micro-batch", "64"]
    start = next(index for index, word in enumerate(side.command) if word == "benchmarks/trl_side.py")
    ended = fork_server.run_script(SUPPORT / "fake_trl.py", *side.command[start + 1 :], timeout_s=120)
    assert ended.returncode == 0, ended.stdout
    lines = [json.loads(line) for line in side.log.read_text().splitlines()]
    assert [vs_trl.solved_fraction(line) for line in lines] == [0.5, 0.5], "right steps and no JSON"
    assert all(vs_trl.step_seconds(line) > 0 and -0.5 <= line["reward/mean"] <= 0 for line in lines)
    examples = NumberLineTask(TaskSettings(name="number_line")).examples("train")
    dealt = [example for step in range(2) for example in choose_prompts(examples, vs_trl.PROMPTS, seed=0, batch_index=step)]
    assert json.loads(Path(f"{side.log}.rows").read_text())["current"] == [example.payload["current"] for example in dealt]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRL.exists(), reason="needs .venv-trl, as benchmarks/requirements-trl.txt says; TRL itself was not run")
def test_the_whole_comparison(random_model: Path, tmp_path: Path) -> None:
    sizes = ("--rounds", 1, "--steps", 2, "--warmup", 1)
    said = said_by("vs_trl", "--model", random_model, *sizes, "--out", tmp_path / "out", timeout_s=800)
    assert re.search(r"^seconds per step: TRL 2x1 / ours 2x1 = [\d.]+", said, re.MULTILINE) and "prompt ids and pixels: equal" in said


def test_games_random() -> None:
    """The measured success rates are within 3.9 standard errors of the exact values."""
    num = 2000
    games = {name: (exact, played, best) for name, exact, played, best in rows(said_by("games_random", "--episodes", num))}
    assert games.keys() == {"number_line", "ez_points", "points24", "blackjack"}
    assert games["points24"] == ("-", "0.000 (0.000 to 0.192)", "73.09; held out 70.2")
    for exact, played, _ in (cells for cells in games.values() if cells[0] != "-"):
        share = float(exact) / 100
        assert abs(float(played.split()[0]) / 100 - share) < 3.9 * (share * (1 - share) / num) ** 0.5
    assert games["number_line"][0] == "28.299" and games["blackjack"][2] == "43.16; for the highest return 42.95"


def test_scale() -> None:
    """Busy and idle times equal values computed by hand: with two slots, the third episode takes
    over the slot of the second. On 16 GPUs, the update time is half of that on 8 GPUs, within 2%.
    """
    play_engine = benchmark("scale").play_engine
    assert play_engine([4.0, 1.0, 2.0], 2, [0.0, 1.0, 10.0]) == (31.0, (30.0 * 2 + 1.0) / 2)
    assert play_engine([4.0, 1.0], 8, [0.0, 1.0, 10.0]) == (13.0, (10.0 * 2 + 3.0) / 8)
    told = rows(said_by("scale", "--gpus", 8, 16, "--seeds", 1, timeout_s=240))
    eight, sixteen = [row for row in told if row[0] in ("8", "16")][:2]
    assert (eight[1], sixteen[1]) == ("4,096", "4,096") and float(eight[4]) == pytest.approx(2 * float(sixteen[4]), rel=0.02)
    assert float(sixteen[2]) < float(eight[2]) and "spread" in {row[0] for row in told}


def test_waiting() -> None:
    """The simulation equals values computed by hand for two engines with one slot each, whose steps
    take one second. Then the benchmark compares a synchronous step with a stale one.
    """
    waiting = benchmark("waiting")
    engines = waiting.Engines([waiting.Engine(1, [0.0, 1.0]) for _ in range(2)])
    for group, episodes in enumerate(([1.0, 5.0], [2.0, 2.0], [9.0, 1.0])):
        engines.deal(group, episodes)
    assert engines.play(0.0, until=math.inf, num_groups=1) == 5.0 and engines.played == [0]  # 1 + 2 + 2 of 9 on the first engine
    engines.prefill_again(0.5)
    assert engines.play(7.0, until=math.inf, num_groups=2) == 9.5 and engines.played == [0, 1]  # second engine: 2 + 0.5
    assert engines.play(9.5, until=math.inf, num_groups=1, due={2}) == 14.5 and engines.played == [0, 1, 2]  # first engine: 9.5 from 5 on
    assert engines.take(2, due={2}) == [2, 0] and engines.played == [1]
    assert [engine.idle for engine in engines.each] == [0.0, 4.0]  # the second engine is idle from 10.5 on
    synchronous, stale = rows(said_by("waiting", "--gpus", 8, "--steps", 3, timeout_s=240))[:2]
    assert synchronous[:3] == ["8", "1,024", "0"] and synchronous[4] == "1.00" and synchronous[6] == synchronous[11] == "0.00"
    assert stale[2] == "1" and float(stale[4]) > 1.2 and float(stale[5].strip("%")) < float(synchronous[5].strip("%"))


def test_measured_lengths(tmp_path: Path) -> None:
    """Two groups of a rollout store, one with equal episodes, are expressed as multiples of the
    means (30 tokens and 2 s). A group that lost a member is omitted.
    """
    waiting = benchmark("waiting")
    columns = {"group": [0, 0, 1, 1, 2], "num_sampled": [10, 50, 30, 30, 99], "env_s": [0.0, 4.0, 2.0, 2.0, 9.0]}
    pandas.DataFrame(columns).to_parquet(tmp_path / "step_000000.parquet")
    told = waiting.measure(tmp_path)
    assert told == {"tokens": [[10, 50], [30, 30]], "tools": [[0.0, 4.0], [2.0, 2.0]]}
    (tmp_path / "lengths.json").write_text(json.dumps(told))
    tokens, tools = waiting.shape_of(tmp_path / "lengths.json").drawn(200, size=4, seed=0)
    kinds = [{*zip(of_tokens, of_tools, strict=True)} for of_tokens, of_tools in zip(tokens.round(6), tools, strict=True)]
    assert all(kind == {(1.0, 1.0)} or kind <= {(round(1 / 3, 6), 0.0), (round(5 / 3, 6), 2.0)} for kind in kinds)
    assert 60 < kinds.count({(1.0, 1.0)}) < 140


def test_slow_tools() -> None:
    """The proxy forwards path, body, response and status. It delays tool calls, and only these, by
    the configured time.
    """
    asyncio.run(asked_twice())


async def asked_twice() -> None:
    staleness = benchmark("staleness")
    behind = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])
    between = staleness.SlowTools("http://behind", median=0.3, sigma=0.0)
    between.client = httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="http://behind")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(between.app), base_url="http://between") as client:
        took = {}
        for path in ("/boxes", "/boxes/a/calls"):
            began = time.monotonic()
            answer = await client.post(path, content=b"abc", headers={"authorization": "Bearer x"})
            took[path] = time.monotonic() - began
            assert (answer.status_code, answer.headers["retry-after"], answer.text) == (429, "7", f"{path} abc Bearer x")
    assert took["/boxes/a/calls"] >= 0.3 and took["/boxes"] < took["/boxes/a/calls"]


async def echo(request: Request) -> Response:
    told = f"{request.url.path} {(await request.body()).decode()} {request.headers['authorization']}"
    return Response(told, status_code=429, headers={"Retry-After": "7"})


@pytest.mark.long
def test_staleness(random_model: Path, tmp_path: Path) -> None:
    given = ("--model", random_model, "--out", tmp_path / "runs", "--tiny", "--size", 4)
    zero, one = rows(said_by("staleness", *given, timeout_s=600))
    logs = [(tmp_path / "runs" / f"staleness{number}.log").read_text() for number in (0, 1)]
    assert ["algo.rollout_correction=none: run.max_staleness=1" in log for log in logs] == [False, True]
    assert (zero[0], zero[3], one[0]) == ("0", "0.00", "1") and float(one[3]) > 0 and min(float(zero[1]), float(one[1])) > 0


@pytest.mark.long
def test_many_episodes() -> None:
    """Two engines of the benchmark run all episodes of both groups to the end at once."""
    (row,) = rows(said_by("many_episodes", "--tiny", timeout_s=400))
    assert row[:4] == ["16", "16", "0", "16"] and float(row[6]) < float(row[7]) <= float(row[8])


def test_lewis_waits_for_scores_alone(tmp_path: Path) -> None:
    """A step takes 10 s, and scores are awaited from 1 to 5 s (by an episode that started before
    the step) and from 7 to 9 s. Generation overlaps one of these seconds and the update another, so
    40% of the step only waits for scores. Skipped steps are not counted.
    """
    step = [("step", "environment", 0.0, 6.0), ("step", "update", 6.0, 8.0), ("step", "record", 9.5, 10.0)]
    episodes = [("episode 0#0", "scoring", -3.0, 5.0), ("episode 0#1", "scoring", 7.0, 9.0), ("episode 0#2", "reply", -3.0, 1.0)]
    for number in range(3):
        write_trace(tmp_path, number, [[*step, *episodes, ("episode 0#3", "reply", 4.0, 5.0)]] if number else [step])
    assert said_by("lewis_waits", tmp_path, "--skip", 1) == "2 steps, 10.00 s on average; fraction spent only waiting for scores: 40.0%\n"


def test_lewis_table_and_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has one finished cell, compared with values computed by hand, and lists the others
    as not run. The pace is measured with a listener that takes 10 ms per candidate.
    """
    lewis, lewis_pace = benchmark("lewis"), benchmark("lewis_pace")
    folder = tmp_path / "seed3" / "speaker"
    folder.mkdir(parents=True)
    figures = {"success": 0.75, "episodes": 100.0, "frozen": 0.7, "drift": 0.05, "words": 12.25}
    (folder / "eval.json").write_text(json.dumps({f"greedy_{name}": value for name, value in figures.items()}))
    (folder / "load").write_text("4\n")
    folder.with_name("speaker.seconds").write_text("61.4\n")
    table = rows(lewis.table(tmp_path, [3]))
    assert [line[1:3] for line in table if line[2] == "not run"] == [[name, "not run"] for name in ("speaker_sft", *lewis.CELLS[1:])]
    (found,) = [line for line in table if line[2] != "not run"]
    assert found == ["3", "speaker", "75.0% (65.7% to 82.5%)", "70.0%", "-", "5.0%", "12.2", "4", "61"]
    for number in range(4):
        (tmp_path / "kind" / f"thing{number}").mkdir(parents=True)
        (tmp_path / "kind" / f"thing{number}" / "0.png").write_bytes(encode_png(make_noise_image(number, side=28)))
    monkeypatch.setattr(lewis_pace, "REQUESTS", 3)
    with serve_listener(FakeEngineHolder(delay_s=0.01)) as url:
        assert re.fullmatch(r"36 candidates in [\d.]+ s: [\d.]+ per second; engine 0.00 s, other 100.0%", lewis_pace.pace(url, tmp_path))


def test_viewer_folder() -> None:
    """The viewer shows all rollouts that were written and skips none; the measured times and sizes
    are numbers.
    """
    (line,) = rows(said_by("viewer_folder", "--tiny"))
    assert line[0] == "short" and int(line[1]) > 1 and line[13] == f"{int(line[1]) * 256}, 0"
    assert float(line[4]) > 0 and all(float(cell) >= 0 for cell in line[5:13]), "a request that is refused is told by its code"
    assert 50 < float(line[14]) < 8000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_viewer_page() -> None:
    """Every view is drawn in Chromium; the measured times are positive."""
    lines = rows(said_by("viewer_page", "--tiny"))
    assert len(lines) == 6 and all(name.startswith("rollouts") and 0 < float(seconds) < 60 for name, seconds in lines)


def test_thin_run(tmp_path: Path) -> None:
    """The copy has every fifth step with all its images, and the viewer misses nothing of it."""
    run, out = tmp_path / "run", tmp_path / "out"
    make_demo_run(run)
    (run / "final").mkdir()
    for name in ("config.yaml", "eval.json", "final/tokenizer.json"):
        (run / name).write_text("{}")
    benchmark("thin_run").thin_run(run, out, every=5)
    (folder,) = label_folders([out]).values()
    assert set(folder.rollout_table()["step"].to_pylist()) == {0, 5, 10} and folder.skipped == []
    rollouts = [rollout for step in (0, 5, 10) for _, rollout in folder.load_rollouts(step, lambda row: True)]
    keys = {image.key for rollout in rollouts for image in rollout.images}
    assert len(rollouts) == 48 and folder.missing_images(list(keys)) == []
    assert {path.stem for path in (out / "rollouts" / "images").iterdir()} == keys
    assert {path.name for path in out.iterdir()} == {"config.yaml", "eval.json", "metrics.jsonl", "tokenizer.json", "rollouts"}


def test_bank() -> None:
    """No rollout is lost without being counted as evicted, the size limit takes effect, and the
    viewer shows the remaining rollouts.
    """
    kept, _, shown = rows(said_by("bank", "--tiny"))
    assert kept[0] == "64 in steps of 16" and int(kept[5]) + int(shown[0]) == 64 and 0 < int(shown[0]) < 64


def test_gymnasium_environments() -> None:
    """Random episodes from an id alone: Sokoban costs 0.1 in each of three steps, unless a box
    moves. An id that does not exist is one line.
    """
    lines = said_by("gymnasium_environments", "puzzles/Sokoban-v0", "Sokoban-v0", "--episodes", 2, "--max-turns", 3).splitlines()
    played, refused = [json.loads(line) for line in lines if line.startswith("{")]
    assert played["episodes"] == 2 and 2 <= played["turns"] <= 6 and played["frame"] == [192, 192]
    assert played["return"][0] >= -1.3 - 1e-9 and played["step_ms"] > 0 and played["reset_s"] > 0
    assert refused["error"].startswith("task.options.id=Sokoban-v0: not registered")


def test_gymnasium_loop_lag() -> None:
    said = said_by("gymnasium_loop_lag", "puzzles/Sokoban-v0", "--episodes", 3, "--turns", 2, "--idle-s", 0.2)
    idle, busy = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert (idle["episodes"], idle["steps"], busy["episodes"]) == (0, 0, 3) and 3 <= busy["steps"] <= 6
    assert all(0 <= each["lag_median_ms"] <= each["lag_p99_ms"] <= each["lag_max_ms"] and each["ticks"] > 3 for each in (idle, busy))


def test_cuda_kernels() -> None:
    """Without the packages for GPUs, the kernels cannot be compiled; only the arguments are tested.
    The dated result is benchmarks/results/cuda_packages_2026-11-27.md.
    """
    ended = fork_server.run_script(FOLDER / "cuda_kernels.py", "--capability", 70, timeout_s=120)
    assert ended.returncode == 2 and "invalid choice: 70 (choose from 90, 89)" in ended.stdout
