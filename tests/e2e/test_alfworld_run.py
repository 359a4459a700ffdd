"""A run of the ALFWorld task with a real engine: one GRPO step on two games and an evaluation per
task type. No TextWorld process is left at the end.
"""

import json
from pathlib import Path

import psutil
import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.tasks.alfworld.game_files import GAME_FILE
from megatron_rl.types import Rollout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT

TRAIN = ROOT / "launch" / "train.py"


@pytest.fixture(scope="module")
def folder(torchrun, alfworld_games: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ANN001
    """Run one GRPO step from an untrained model.

    Nearly every response is invalid and is replaced by a random command.
    """
    home = tmp_path_factory.mktemp("household")
    make_checkpoint(home / "nano", words=alfworld_games / "words.txt")
    games = [f"task.data.{split}=[{alfworld_games / split}]" for split in ("train", "eval")]
    sizes = (
        "task.data.max_eval=3", "task.eval_samples=0", "task.max_turns=3", "task.max_new_tokens=8", "task.options.invalid=random",
        "engine.kv_cache_mib=16", "batch.prompts_per_step=2", "batch.group_size=2", "run.steps=1", "rollouts.keep_best=4",
    )  # fmt: skip
    own = ("experiment=alfworld_grpo_cpu", f"model.path={home / 'nano'}", f"run.dir={home / 'grpo'}")
    torchrun(1, TRAIN, *own, *games, *sizes, timeout_s=240)
    return home / "grpo"


def rollouts(folder: Path) -> list[Rollout]:
    return [entry.rollout for path in sorted((folder / "rollouts").glob("step_*.jsonl")) for entry in read_recorded(path)]


def test_games_were_played_and_counted(folder: Path) -> None:
    """Each turn is a separate sequence with the rendered image of TextWorld's output, and a
    rollout's reward is the sum of its turn rewards.
    """
    played = rollouts(folder)
    assert len(played) == 4 and {rollout.task for rollout in played} == {"alfworld"}
    for rollout in played:
        assert len(rollout.sequences) == len(rollout.turns) == 3 and all(len(context.images) == 1 for context in rollout.sequences)
        assert len({context.images[0].key for context in rollout.sequences}) > 1, "commands were given"
        assert all(turn.tool_call.error for turn in rollout.turns if not turn.text.startswith("{"))
        assert rollout.reward_terms["won"] == 0 and rollout.reward == pytest.approx(sum(turn.reward for turn in rollout.turns))
        (kind,) = [name for name in rollout.reward_terms if name.startswith("won_")]
        assert kind.removeprefix("won_") in ("pick", "look", "clean", "heat", "cool", "two")
    (step,) = [step for step in read_metrics(folder / "metrics.jsonl") if "reward/mean" in step]
    assert step["rollout/failed_fraction"] == 0 and step["rollout_mismatch/logprob_abs_diff_max"] < 1e-4
    assert step["rollout/tool_errors"] > 0.5 and step["time/episode_environment"] > 0


def test_the_evaluation_tells_who_won_by_kind(folder: Path) -> None:
    """The evaluation reports a success rate per task type."""
    told = json.loads((folder / "eval.json").read_text())
    assert told["greedy_success"] == told["greedy_won"] == 0
    assert len([name for name in told if name.startswith("greedy_won_")]) >= 2
    assert (folder / "final" / "config.json").exists()


def test_no_process_of_textworld_is_left(folder: Path, alfworld_games: Path) -> None:
    """After the run, no process has a game file in its command line."""
    games = {str(path) for path in alfworld_games.rglob(GAME_FILE)}
    assert not [process for process in psutil.process_iter(["cmdline"]) if games & {*(process.info["cmdline"] or [])}]
