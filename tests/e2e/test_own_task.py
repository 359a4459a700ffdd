"""A task from a user's file outside the repository, with a multi-turn sequence and a second image,
run with a real engine and real weight updates.
"""

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.types import Rollout
from tests.conftest import SUPPORT
from tests.support import fork_server

OWN = SUPPORT / "custom_task.py"


@pytest.fixture(scope="module")
def folder(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run custom_task.py in a separate folder and return its run directory."""
    home = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(OWN, home / "mine.py")
    result = fork_server.run_script(home / "mine.py", random_model, "run", cwd=home, timeout_s=240)
    assert result.returncode == 0, result.stdout
    return home / "run"


def steps(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / "metrics.jsonl")[:-1]


def rollouts(folder: Path) -> list[list[Rollout]]:
    return [[entry.rollout for entry in read_recorded(path)] for path in sorted((folder / "rollouts").glob("step_*.jsonl"))]


def test_engine_and_trainer_agree_on_a_context_with_two_images(folder: Path) -> None:
    """Engine and trainer logprobs differ by at most 1e-4 in each of the 4 steps.

    Every step changes the policy: its ratios deviate from 1 by more than 1e-3.
    """
    assert len(steps(folder)) == 4
    for step in steps(folder):
        assert step["rollout_mismatch/logprob_abs_diff_max"] <= 1e-4
        assert step["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
        assert step["grad_norm"] > 0 and step["policy/ratio_abs_dev_max"] > 1e-3


def test_the_context_was_continued(folder: Path) -> None:
    """The three turns of a rollout lie in one sequence, one after another.

    The second image differs in shape from the first.
    """
    for records in rollouts(folder):
        assert len(records) == 12, "every rollout of the step is recorded"
        for record in records:
            (context,) = record.sequences
            assert [turn.sequence for turn in record.turns] == [0, 0, 0]
            spans = [turn.token_span for turn in record.turns]
            ends = [0, *(end for _, end in spans)]
            assert all(start > end for (start, _), end in zip(spans, ends[:-1], strict=True)), "an observation lies before each reply"
            assert record.num_sampled == sum(end - start for start, end in spans) and spans[-1][1] == len(context.token_ids)
            assert [image.pil.size for image in context.images] == [(112, 112), (168, 84)]
            assert record.reason == "asked thrice" and record.task == "mine"
        assert {record.example_id for record in records} == {"red", "green", "blue"}, "dealt without repetition"


def test_the_rubric_is_the_users(folder: Path) -> None:
    """The recorded rewards equal the user's rubric, recomputed from the recorded responses."""
    for records in rollouts(folder):
        for record in records:
            text = "".join(turn.text for turn in record.turns)
            assert record.reward_terms["vowels"] == pytest.approx(sum(letter in "aeiou" for letter in text) / max(len(text), 1))
            assert [turn.reward for turn in record.turns] == pytest.approx([-len(turn.text) / 100 for turn in record.turns])
            assert record.reward == pytest.approx(record.reward_terms["vowels"] - 0.5 * len(text) / 100)
    for step, records in zip(steps(folder), rollouts(folder), strict=True):
        assert step["reward/mean"] == pytest.approx(sum(record.reward for record in records) / 12)
        assert step["reward/vowels"] == pytest.approx(sum(record.reward_terms["vowels"] for record in records) / 12)


def test_the_evaluation_is_the_users(folder: Path) -> None:
    """The evaluation's success metric follows the user's `success` method."""
    evaluation = json.loads((folder / "eval.json").read_text())
    assert evaluation["greedy_success"] == float(evaluation["greedy_return"] > 0.5), "one example, one greedy episode"
    assert (folder / "final" / "config.json").exists()
