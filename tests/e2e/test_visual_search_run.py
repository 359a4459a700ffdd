"""A tool-use run from end to end:

SFT on transcripts, then GRPO with a policy that crops the canvas by running Python in a real
sandbox.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.types import Rollout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT

TRAIN = ROOT / "launch" / "train.py"
OWN = ("engine.kv_cache_mib=16", "task.eval_samples=1", "task.data.max_eval=8", "task.sandbox.size=4")


@dataclass(frozen=True, slots=True)
class Finished:
    warm: Path
    grpo: Path

    @property
    def recorded(self) -> list[Rollout]:
        return [entry.rollout for file in sorted((self.grpo / "rollouts").glob("*.jsonl")) for entry in read_recorded(file)]


@pytest.fixture(scope="module")
def finished(torchrun, tmp_path_factory: pytest.TempPathFactory) -> Finished:  # noqa: ANN001
    """Train with SFT for 50 steps, which teach the format but not the correct positions, so that
    the policy crops some region and answers something. Then run two GRPO steps.
    """
    home = tmp_path_factory.mktemp("search")
    make_checkpoint(home / "nano", preset="nano_search", seed=0)
    stages = ("sft.splits=[correct]", "sft.steps=[50]", "sft.batch_size=12", "sft.num_demonstrations=48", "optim.lr=2e-3")
    begin = f"model.path={home / 'nano'}"
    torchrun(2, TRAIN, "experiment=visual_search_sft_cpu", begin, f"run.dir={home / 'sft'}", *stages, *OWN, timeout_s=400)
    sizes = ("batch.prompts_per_step=4", "batch.group_size=4", "run.steps=2", "rollouts.keep_best=16")
    start = f"model.path={home / 'sft' / 'final'}"
    torchrun(2, TRAIN, "experiment=visual_search_python_cpu", start, f"run.dir={home / 'grpo'}", *sizes, *OWN, timeout_s=400)
    return Finished(home / "sft", home / "grpo")


def test_the_sandbox_ran_the_policys_code_and_the_policy_saw_the_crop(finished: Finished) -> None:
    """The crop returned by the sandbox is the second image of the sequence, with the same number of
    image tokens (25) as the first, and the next turn is sampled after it.
    """
    looked = [rollout for rollout in finished.recorded if rollout.turns[0].tool_call is not None and rollout.turns[0].images]
    assert len(finished.recorded) == 32
    assert len(looked) >= 4, [rollout.turns for rollout in finished.recorded]
    for rollout in looked:
        first, second = rollout.turns
        assert first.tool_call.tool == "python"
        assert first.tool_call.ran and not first.tool_call.error
        assert ".crop((x + 25, y + 25, x + 75, y + 75)).show()" in first.tool_call.source
        assert first.text.endswith("</code>"), "the stop text stays in the reply"
        (context,) = rollout.sequences
        assert context.images[1:] == first.images
        assert len(context.token_ids) - rollout.num_sampled >= 2 * 25
        assert rollout.num_sampled == sum(turn.token_span[1] - turn.token_span[0] for turn in rollout.turns)
        assert second.token_span[0] > first.token_span[1] + 25, "the crop's 25 image tokens stand between the turns"


def test_engine_and_trainer_agree_on_contexts_with_two_pictures(finished: Finished) -> None:
    """Engine and trainer logprobs agree within 1e-4 on sequences with two images, and no rollout
    fails.
    """
    steps = [step for step in read_metrics(finished.grpo / "metrics.jsonl") if "reward/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout_mismatch/logprob_abs_diff_max"] < 1e-4
        assert step["rollout/failed_fraction"] == 0
        assert step["rollout/tool_use"] > 0


def test_rewards_are_those_of_the_rule(finished: Finished) -> None:
    """Rewards recomputed from the recorded rollouts match:

    1.1 for a correct answer after a tool call, 1 for a correct answer without one, else 0.
    """
    for rollout in finished.recorded:
        expected = rollout.reward_terms["accuracy"] * (
            1 + 0.1 * sum(turn.tool_call is not None and turn.tool_call.ran for turn in rollout.turns)
        )
        assert rollout.reward == pytest.approx(expected)
        assert rollout.reward_terms["accuracy"] in (0.0, 1.0)


def test_both_stages_tell_accuracy_and_tool_use(finished: Finished) -> None:
    """The evaluations of SFT and of GRPO report success and tool use."""
    for folder in (finished.warm, finished.grpo):
        told = json.loads((folder / "eval.json").read_text())
        assert {"greedy_success", "greedy_tool_use", "sampled_success", "sampled_tool_use"} <= told.keys()
        assert 0 <= told["greedy_success"] <= 1
        assert told["sampled_tool_use"] > 0
