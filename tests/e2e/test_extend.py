"""The examples of docs/extend.md, run verbatim outside the repository; one of them runs from an
installed wheel.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.documented_commands import doc_examples
from tests.support.wheels import build_wheel

EXAMPLES = {name.removesuffix(".py"): source for name, source in doc_examples().items()}
TINY = {
    "model": {"min_pixels": 784, "max_pixels": 3136},
    "engine": {"kv_cache_mib": 16, "max_model_len": 256},
    "batch": {"prompts_per_step": 2, "group_size": 4},
    "task": {"max_turns": 1, "max_new_tokens": 8, "eval_samples": 1},
    "run": {"steps": 1},
    "rollouts": {"keep_best": 8},
}


@pytest.fixture
def home(random_model: Path, tmp_path: Path) -> Path:
    """A user's folder with the examples, a data file of questions, and configs/experiment/mine.yaml
    with the shared settings.
    """
    for name, source in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(source)
    rows = [{"question": f"Say {number}.", "answer": str(number)} for number in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    chosen = {**TINY, "model": {**TINY["model"], "path": str(random_model)}}
    experiment.write_text("# @package _global_\n" + yaml.safe_dump(chosen))
    return tmp_path


def run(home: Path, name: str, *arguments: str) -> str:
    result = fork_server.run_script(home / f"{name}.py", *arguments, cwd=home, timeout_s=200)
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_they_are_short() -> None:
    """The document's examples stay within its stated limits: ten lines for a reward, fifteen for a
    task.
    """
    assert EXAMPLES.keys() == {"short", "echo", "gradient", "sequential"}
    lines = {name: [line for line in source.splitlines() if line.strip()] for name, source in EXAMPLES.items()}
    assert len(lines["short"]) <= 10, "a reward takes ten lines"
    own = [line for line in lines["echo"] if not re.match(r"from|import|if __name__|    cli", line)]
    assert len(own) <= 15, "a task takes fifteen, without its imports and its start"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of this checkout and install it, without its dependencies, into a separate
    folder.
    """
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    pip = [sys.executable, "-m", "pip", "-q", "--no-input"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)], check=True, timeout=120)
    return folder / "site"


def installed(home: Path, site: Path, *words: str) -> str:
    """Run a fresh interpreter that imports the installed wheel instead of this repository, and
    return its stdout.
    """
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_wheel_holds_what_a_run_reads(site: Path) -> None:
    """The wheel contains every config, font and prompt file of the checkout, and its console
    scripts.
    """
    for room, pattern in (("configs", "**/*.yaml"), ("megatron_rl/tasks", "**/*.ttf"), ("megatron_rl/rewards", "**/*.yaml")):
        held = {path.relative_to(ROOT / room) for path in (ROOT / room).glob(pattern)}
        target = site / ("megatron_rl/configs" if room == "configs" else room)
        assert held and {path.relative_to(target) for path in target.glob(pattern)} == held, room
    scripts = {path.name for path in (site / "bin").iterdir()}
    assert {"megatron-rl", "merger", "converter_hf_to_mcore", "extract_images_from_parquet"} <= scripts


def test_a_reward_of_ten_lines_runs_from_a_wheel(home: Path, site: Path) -> None:
    """The experiment is found in the configs folder next to the user's file, and the recorded
    rewards equal the function's formula.
    """
    data = ["task.data.train=[mine.jsonl]", "task.data.eval=[mine.jsonl]"]
    arguments = ["short.py", "task=vqa", "experiment=mine", "task.reward=accuracy+short", "run.dir=out", *data]
    assert installed(
        home, site, "-c", "import megatron_rl, megatron_rl_sandbox, megatron_rl_tools; print(megatron_rl.__file__)"
    ).startswith(str(site))
    installed(home, site, *arguments)
    rollouts = [entry.rollout for entry in read_recorded(home / "out" / "rollouts" / "step_000000.jsonl")]
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert rollout.reward_terms["short"] == pytest.approx(1 / (1 + len(rollout.turns[-1].text)))
        assert rollout.reward == pytest.approx(rollout.reward_terms["accuracy"] + rollout.reward_terms["short"])
    (step, _) = read_metrics(home / "out" / "metrics.jsonl")
    assert step["reward/short"] == pytest.approx(sum(rollout.reward_terms["short"] for rollout in rollouts) / 8)


def test_a_task_of_fifteen_lines_runs(home: Path) -> None:
    """The document's example task runs one step, and the recorded rewards equal its reward rule."""
    run(home, "echo", "task=echo", "experiment=mine", "task.options.words=2", "run.dir=out")
    rollouts = [entry.rollout for entry in read_recorded(home / "out" / "rollouts" / "step_000000.jsonl")]
    assert {rollout.example_id for rollout in rollouts} == {"red", "green"} and {rollout.task for rollout in rollouts} == {"echo"}
    assert [rollout.reward for rollout in rollouts] == [float(rollout.example_id in rollout.turns[0].text) for rollout in rollouts]
    assert yaml.safe_load((home / "out" / "config.yaml").read_text())["task"]["options"] == {"words": 2}


def test_an_option_that_there_is_not(home: Path) -> None:
    """An unknown task option ends the run with an error line that names it."""
    (home / "configs" / "task").mkdir()
    (home / "configs" / "task" / "echo.yaml").write_text("name: echo\noptions: {word: 2}\n")
    said = fork_server.run_script(home / "echo.py", "task=echo", "experiment=mine", "run.dir=out", cwd=home, timeout_s=100)
    assert said.returncode == 1 and re.search(r"^error: .*word\b", said.stdout, re.MULTILINE), said.stdout


def test_a_mistake_in_one_reply_fails_that_rollout(home: Path) -> None:
    """The reward function raises KeyError for one of the step's two prompts.

    The rollouts of this prompt fail, and the step trains on the rollouts of the other prompt.
    """
    own = "from megatron_rl.cli import cli\ndef picky(reply, answer):\n    return len(reply) / {'0': 1, '1': 2}[answer]\n"
    (home / "picky.py").write_text(own + "cli(rewards={'picky': picky})\n")
    rows = [{"question": f"Say {number}.", "answer": str(number)} for number in (1, 2)]
    (home / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    given = ("task=vqa", "task.reward=picky", "experiment=mine", "run.dir=out", "run.max_failed_fraction=0.5")
    said = run(home, "picky", *given, "task.data.train=[two.jsonl]", "task.data.eval=[one.jsonl]")
    assert re.search(
        r"^permanent error, not retried: train/1: reward picky on train/1: KeyError: '2' \(.*picky.py:3\)$", said, re.MULTILINE
    ), said
    (step, _) = read_metrics(home / "out" / "metrics.jsonl")
    assert (step["rollout/failed"], step["rollout/completed"] + step["rollout/truncated"]) == (4.0, 4.0)
    assert step["rollout/stop_permanent_infra_error"] == 4.0 and step["reward/picky"] == step["reward/mean"]


def test_an_algorithm_learns_by_its_own_surrogate(home: Path) -> None:
    """A user's policy loss is used together with a reward from another file. Each sequence is its
    own micro-batch.

    At the first update every ratio is 1, so the loss must equal the negative mean advantage over
    the tokens.
    """
    own = "import gradient, short\nfrom megatron_rl.algo.algorithms import Algorithm\nfrom megatron_rl.algo import advantages\n"
    own += "row = Algorithm(advantage_fn=advantages.rloo, policy_loss=gradient.policy_gradient)\n"
    (home / "both.py").write_text(own + "short.cli(rewards={'short': short.short}, algorithms={'gradient': row})\n")
    data = ("task.data.train=[mine.jsonl]", "task.data.eval=[mine.jsonl]")
    run(
        home,
        "both",
        "task=vqa",
        "task.reward=short",
        "algo.name=gradient",
        "experiment=mine",
        "run.dir=out",
        "batch.micro_batch_tokens=8",
        *data,
    )
    (step, _) = read_metrics(home / "out" / "metrics.jsonl")
    rollouts = [entry.rollout for entry in read_recorded(home / "out" / "rollouts" / "step_000000.jsonl")]
    total = {group: sum(rollout.reward for rollout in rollouts if rollout.group == group) for group in (0, 1)}
    credit = [(rollout.reward - (total[rollout.group] - rollout.reward) / 3, rollout.num_sampled) for rollout in rollouts]
    assert step["loss"] == pytest.approx(-sum(worth * tokens for worth, tokens in credit) / sum(tokens for _, tokens in credit), abs=1e-5)
    assert step["grad_norm"] > 0 and len({rollout.reward for rollout in rollouts}) > 1


def test_a_family_is_planned(home: Path) -> None:
    """A memory plan works for a model family defined in a user's file, without creating a run
    directory.
    """
    said = run(home, "sequential", "task=vqa", "experiment=mine", "run.dir=out", "plan.only=true", "plan.gpu=l4")
    assert "l4" in said.lower() and not (home / "out").exists()


def test_the_doctor_and_help_know_the_users_file(home: Path) -> None:
    """`doctor`, `--cfg job` and `--help` of a user's file include its task and its experiment."""
    given = ("task=echo", "experiment=mine", "run.dir=out")
    assert run(home, "echo", "doctor", *given).endswith("a run can start\n")
    shown = yaml.safe_load(run(home, "echo", *given, "--cfg", "job"))
    assert shown["task"]["options"] == {"words": 3} and shown["batch"]["group_size"] == 4
    assert "echo" in run(home, "echo", "--help") and not (home / "out").exists()
