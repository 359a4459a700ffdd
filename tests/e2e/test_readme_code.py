"""The files that the README prints, run verbatim in a user's folder with the README's commands.

Only sizes are replaced: a random model, one step, small batches and a small engine.
"""

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.types import Rollout
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.documented_commands import doc_examples, extract_commands

FILES = doc_examples("README.md")
SMALL = (
    "model.min_pixels=784", "model.max_pixels=3136", "engine.kv_cache_mib=16", "engine.max_model_len=256", "batch.prompts_per_step=3",
    "batch.group_size=4", "task.max_new_tokens=8", "task.eval_samples=1", "run.steps=1", "rollouts.keep_best=12", "run.dir=out",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with the README's files, three questions with images, and a held-out one."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "images").mkdir()
    rows = [{"question": "How many circles?", "answer": str(number), "image": f"images/{number}.png"} for number in range(4)]
    for number in range(4):
        Image.new("RGB", (56, 56), (40 * number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[3]) + "\n")
    return tmp_path


def run_as_printed(name: str, home: Path, model: Path) -> list[Rollout]:
    """Run the README's command for a file, in one process, and return the recorded rollouts."""
    (line,) = [line for line in extract_commands((ROOT / "README.md").read_text()) if f" {name} " in line]
    launcher, arguments = shlex.split(line.partition(f" {name} ")[0]), shlex.split(line.partition(f" {name} ")[2])
    assert launcher == ["torchrun", "--nproc_per_node", "2"]
    result = fork_server.run_script(home / name, *arguments, *SMALL, f"model.path={model}", cwd=home, timeout_s=200)
    assert result.returncode == 0, result.stdout
    assert "done: greedy" in result.stdout
    return [entry.rollout for entry in read_recorded(home / "out" / "rollouts" / "step_000000.jsonl")]


def test_the_code_is_short() -> None:
    """Without imports, blank lines and the start, a reward takes three lines and an environment with
    its task at most fifteen.
    """
    code = {name: source.partition("\n\n\n")[2].partition("if __name__")[0].split("\n") for name, source in FILES.items()}
    assert {name: len([line for line in lines if line.strip()]) for name, lines in code.items()} == {"brief.py": 3, "color.py": 15}


def test_the_reward_of_the_readme_runs(home: Path, random_model: Path) -> None:
    """The recorded rewards equal the formula in the README, and the policy sees the images."""
    rollouts = run_as_printed("brief.py", home, random_model)
    assert {rollout.example_id for rollout in rollouts} == {"train/0", "train/1", "train/2"} and len(rollouts) == 12
    for rollout in rollouts:
        reply, answer = rollout.turns[-1].text, rollout.example_id.removeprefix("train/")
        assert rollout.reward == pytest.approx((answer in reply) / max(1, len(reply.split())))
        assert [image.num_tokens for sequence in rollout.sequences for image in sequence.images] == [4]
    (step, _) = read_metrics(home / "out" / "metrics.jsonl")
    assert step["reward/brief"] == pytest.approx(sum(rollout.reward for rollout in rollouts) / 12)


def test_the_environment_of_the_readme_runs(home: Path, random_model: Path) -> None:
    """An episode ends with reward 1 at the first reply that names the color, or without one after
    three turns.
    """
    rollouts = run_as_printed("color.py", home, random_model)
    assert {rollout.example_id for rollout in rollouts} == {"red", "green", "blue"} and len(rollouts) == 12
    for rollout in rollouts:
        named = [rollout.example_id in turn.text for turn in rollout.turns]
        assert rollout.reward == float(named[-1]) and not any(named[:-1])
        assert named[-1] or len(named) == 3
