"""A run with agents in processes of their own, a real engine and real updates, on two ranks."""

from pathlib import Path

import pytest

from megatron_rl.types import Rollout
from tests.support.agent_runs import (
    NUM_EPISODES,
    NUM_STEPS,
    agent_overrides,
    check_equal_runs,
    check_logprobs,
    kill_with_agents,
    rollouts_of,
    train,
    write_questions,
)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def run(random_model: Path, questions: Path) -> Path:
    """Train for three steps with an engine on each of two ranks. No checkpoint is written."""
    folder = questions.parent / "run"
    train(2, *agent_overrides(questions, random_model, folder), "checkpoint.save_last=false")
    assert not (folder / "checkpoints").exists()
    return folder


def test_engine_and_trainer_agree_on_every_sampled_token(run: Path) -> None:
    """In branches and with images, at every step."""
    check_logprobs(run)


def test_sessions_are_trees(run: Path) -> None:
    """Turns 0 and 1 share a sequence; turn 2 branches after turn 0; turn 3 has a new prompt."""
    found = [each for step in range(NUM_STEPS) for each in rollouts_of(run, step)]
    assert len(found) == NUM_STEPS * NUM_EPISODES
    for rollout in found:
        assert rollout.reason == "1 continued, 1 branched, 1 new prompts"
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
    for step in range(NUM_STEPS):
        for each in rollouts_of(run, step):
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


def test_a_killed_run_equals_one_that_was_not(run: Path, random_model: Path, questions: Path, tmp_path: Path) -> None:
    """Both ranks are killed with SIGKILL while agents of the second step are running. No process
    and no folder of an agent is left, and the resumed run equals the one that was not killed and
    wrote no checkpoints.
    """
    folder, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    overrides = (*agent_overrides(questions, random_model, folder), "checkpoint.every=1", "checkpoint.background=false")
    kill_with_agents(2, *overrides, after=folder / "checkpoints" / "step_00000001", temporary=temporary)
    assert not (folder / "checkpoints" / "step_00000003").exists()
    assert f"resume: {folder}/checkpoints/step_0000000" in train(2, *overrides)
    check_equal_runs(folder, run)
