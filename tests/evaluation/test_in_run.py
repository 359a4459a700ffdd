"""Scores of an evaluation from rollouts made by hand, without infrastructure failures; and the
episodes that an evaluation runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import AlgoSettings, ModelSettings, Settings, TaskSettings
from megatron_rl.errors import NonFiniteValue, RunFailed
from megatron_rl.evaluation.in_run import compute_eval_scores, evaluate_in_run
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Example, Rollout, Status
from tests.support.scripted_rollout_manager import ScriptedEngine, make_rollout_manager


class Positive:
    own: Mapping[str, float] = {}

    def success(self, rollout: Rollout) -> bool:
        return rollout.reward > 0

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the test's own metrics, and a number that identifies the episodes passed in."""
        return {**self.own, "scored": sum(len(examples[rollout.group].id) for rollout in rollouts)}


EXAMPLES = [Example("a", {}, probability=0.25), Example("b", {}, probability=0.75)]


def rollout(group: int, reward: float | None) -> Rollout:
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Rollout(task="t", example_id="e", group=group, sample_index=0, status=status, reward=reward, reason="judge: 429")


def test_weights_are_those_of_the_scored() -> None:
    """Examples with a probability are weighted by it, over the scored rollouts."""
    rollouts = [rollout(0, 2.0), rollout(0, None), rollout(1, -1.0), rollout(1, 1.0)]
    # Reward 2 with weight 1/4, then -1 and 1 with weight 3/4: total weight 7/4.
    scores = compute_eval_scores(Positive(), EXAMPLES, rollouts, max_failed=0.25)
    expected = {"success": 1.0 / 1.75, "return": 0.5 / 1.75, "tool_use": 0.0, "failed_fraction": 0.25, "scored": 3}
    assert scores == pytest.approx(expected), "examples that are weighted as dealt are no sample"


def test_a_sample_is_counted_by_its_scored_episodes() -> None:
    """Examples without a probability count equally, and the number of scored episodes is
    reported."""
    plain = [replace(example, probability=None) for example in EXAMPLES]
    scores = compute_eval_scores(Positive(), plain, [rollout(0, 2.0), rollout(0, None), rollout(1, -1.0), rollout(1, 1.0)], max_failed=0.25)
    assert scores["success"] == pytest.approx(2 / 3) and scores["episodes"] == 3


def test_a_task_that_knows_better_than_the_mean_is_believed() -> None:
    """Metrics of the task override the computed means, except the number of episodes and the failed
    fraction."""
    task = Positive()
    task.own = {"success": 0.43, "draws": 0.09, "failed_fraction": 0.0}
    plain = [replace(example, probability=None) for example in EXAMPLES]
    scores = compute_eval_scores(task, plain, [rollout(0, 2.0), rollout(1, None)], max_failed=0.5)
    shares = {"success": 0.43, "draws": 0.09, "return": 2.0, "tool_use": 0.0}
    assert scores == {**shares, "failed_fraction": 0.5, "scored": 1}, "what is worked out is of no sample"
    task.own = {"draws": 0.09, "failed_fraction": 0.0, "episodes": 9}
    scores = compute_eval_scores(task, plain, [rollout(0, 2.0), rollout(1, None)], max_failed=0.5)
    assert (scores["episodes"], scores["failed_fraction"]) == (1, 0.5)


def test_a_part_is_a_mean_over_those_that_it_judged() -> None:
    """The mean of a reward term is over the rollouts that have it: here 1 with weight 1/4 and 0.5
    with weight 3/4. A term never overrides a standard metric such as return."""
    rollouts = [rollout(0, 2.0), rollout(0, 2.0), rollout(1, -1.0)]
    rollouts[0].reward_terms, rollouts[2].reward_terms = {"won": 1.0, "return": 9.0}, {"won": 0.5}
    scores = compute_eval_scores(Positive(), EXAMPLES, rollouts, max_failed=0)
    assert scores["won"] == pytest.approx(0.25 * 1 + 0.75 * 0.5) and scores["return"] == pytest.approx((2 * 0.25 * 2 - 0.75) / 1.25)


def test_success_is_told_by_data_source() -> None:
    """Success is also reported per data source.

    Source `cups` has one rollout with weight 1/4 that succeeds and one with weight 3/4 that fails;
    `far away` has one that succeeds; one failed rollout has no source.
    """
    rollouts = [rollout(0, 2.0), rollout(1, -1.0), rollout(1, 2.0), rollout(0, -1.0)]
    for made, source in zip(rollouts, ["cups", "cups", "far away", ""], strict=True):
        made.source = source
    scores = compute_eval_scores(Positive(), EXAMPLES, rollouts, max_failed=0)
    assert {name: value for name, value in scores.items() if "/" in name} == {"success/cups": 0.25, "success/far_away": 1.0}


def test_too_many_failures_are_no_score() -> None:
    """An evaluation with too many failed episodes raises, with the first reason."""
    with pytest.raises(RunFailed, match="1 of 2 episodes failed, run.max_failed_fraction=0.1; first reason: judge: 429"):
        compute_eval_scores(Positive(), EXAMPLES, [rollout(0, None), rollout(1, 1.0)], max_failed=0.1)
    with pytest.raises(RunFailed, match="2 of 2"):
        compute_eval_scores(Positive(), EXAMPLES, [rollout(0, None)] * 2, max_failed=0.99)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_no_failure_of_the_policy(reward: float) -> None:
    """A non-finite reward raises an error that names the task and the example."""
    with pytest.raises(NonFiniteValue, match=rf"^task=t: e#0 has the reward {reward}; fix its reward function$"):
        compute_eval_scores(Positive(), EXAMPLES, [rollout(0, 1.0), rollout(1, reward), rollout(1, None)], max_failed=0.5)


def test_an_evaluation_is_the_same_whenever_it_takes_place(random_model: Path) -> None:
    """An evaluation sends the same requests whenever it runs, first greedily, then sampled.

    It uses eval_max_turns, and none of its seeds occurs in training.
    """
    task = TaskSettings(name="talk", max_turns=2, eval_max_turns=1, eval_samples=3)
    settings = Settings(model=ModelSettings(path=str(random_model)), task=task, algo=AlgoSettings(temperature=0.6))
    engine = ScriptedEngine()
    fleet = make_rollout_manager(Renderer(settings.model), engine)
    fleet.generate(0, is_enough=lambda _: True)
    training, engine.requests = engine.requests, []
    scores = evaluate_in_run(fleet.task, settings, rollout_manager=fleet)
    assert (scores["eval/greedy_success"], scores["eval/sampled_return"]) == (1.0, 1.0)
    once, engine.requests = engine.requests, []
    fleet.generate(1, is_enough=lambda _: True)
    engine.requests = []
    evaluate_in_run(fleet.task, settings, rollout_manager=fleet)
    assert engine.requests == once and [sampling.temperature for sampling in once] == [0.0] * 2 + [0.6] * 6
    assert not {sampling.seed for sampling in once} & {sampling.seed for sampling in training}
