"""A run with agents in processes of their own, a real engine and real updates, on two ranks."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image as pil

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl.types import Rollout, Status
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server

AGENT = SUPPORT / "agents" / "vowel_agent.py"


@pytest.fixture(scope="module")
def run(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for three steps with an engine on each of two ranks."""
    home = tmp_path_factory.mktemp("agents")
    for number, color in enumerate(("green", "yellow", "white")):
        pil.new("RGB", (56, 56), color).save(home / f"{number}.png")
    rows = [{"question": f"<image>number {number}?", "answer": "x", "images": [f"{number}.png"]} for number in range(3)]
    (home / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = (
        "task=agent", f"task.options.command=[{sys.executable},{AGENT}]", "task.reward=reported", f"task.data.train=[{home}/q.jsonl]",
        f"task.data.eval=[{home}/q.jsonl]", "task.max_turns=8", "task.max_new_tokens=12", "model.min_pixels=3136", "model.max_pixels=4000",
        "engine.kv_cache_mib=16", "engine.max_model_len=512", "batch.prompts_per_step=2", "batch.group_size=4", "optim.lr=1e-3",
        "run.steps=3", "run.eval_every=0", "rollouts.save=all", f"model.path={random_model}", f"run.dir={home / 'run'}",
    )  # fmt: skip
    result = fork_server.run_world(2, ROOT / "launch" / "train.py", *overrides, timeout_s=280)
    assert result.returncode == 0, result.stdout[-6000:]
    return home / "run"


def rollouts(run: Path) -> list[Rollout]:
    return [each for step in range(3) for each in read_rollouts(step_path(run / "rollouts", step), with_images=False)]


def test_engine_and_trainer_agree_on_every_sampled_token(run: Path) -> None:
    """Engine and trainer logprobs differ by at most 1e-4, in branches and with images, at every
    step, and every step changes the policy."""
    steps = read_metrics(run / "metrics.jsonl")[:-1]
    assert len(steps) == 3
    for step in steps:
        assert step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4
        assert step["grad_norm"] > 0


def test_sessions_are_trees(run: Path) -> None:
    """Turns 0 and 1 share a sequence; turn 2 branches after turn 0; turn 3 has a new prompt."""
    found = rollouts(run)
    assert len(found) == 24
    for rollout in found:
        assert rollout.status is Status.COMPLETED and rollout.reason == "1 continued, 1 branched, 1 new prompts"
        assert [turn.sequence for turn in rollout.turns] == [0, 0, 1, 2]
        first, branch, _ = rollout.sequences
        stop = rollout.turns[0].token_span[1]
        assert first.token_ids[:stop] == branch.token_ids[:stop] and not any(branch.loss_mask[:stop])
        assert [len(context.images) for context in rollout.sequences] == [2, 2, 0]
        text = "".join(turn.text for turn in rollout.turns)
        assert rollout.reward == pytest.approx(sum(letter in "aeiou" for letter in text) / max(1, len(text)))


def test_every_branch_has_the_advantage_of_its_episode(run: Path) -> None:
    """All sampled tokens of an episode have one advantage, with the sign of reward minus mean."""
    by_group: dict[tuple[int, int], list[Rollout]] = {}
    for step in range(3):
        for each in read_rollouts(step_path(run / "rollouts", step), with_images=False):
            by_group.setdefault((step, each.group), []).append(each)
    for members in by_group.values():
        rewards = [each.reward for each in members]
        mean = sum(rewards) / len(rewards)
        for each in members:
            values = {
                round(context.advantages[place], 6)
                for context in each.sequences
                for place, has_loss in enumerate(context.loss_mask)
                if has_loss
            }
            assert len(values) == 1
            assert max(rewards) == min(rewards) or (values.pop() > 0) == (each.reward > mean)
