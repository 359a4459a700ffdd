"""Trains on recorded rollouts and compares the results with the values recorded with them, on any
machine.

Integers (ids, masks, denominators, filtered groups, packing) must be equal. Losses and all metrics
agree within 1e-5, and the norm of the first gradient within 4e-5. The rollout logprobs come from a
real engine, so the check that the trainer's logprobs agree with them within 1e-4 does not depend on
recorded trainer values.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.batching import minibatches
from megatron_rl.batching.minibatches import episode_weight, make_pack_items
from megatron_rl.batching.packing import PackItem, Segment, scatter_to_rollouts
from megatron_rl.config import BatchSettings, Settings
from tests.support.golden_rollouts import (
    CASES,
    GOLDEN,
    LOGPROB_BOUND,
    build_golden_policy,
    compute_golden_step,
    find_differences,
    load_rollouts,
)
from tests.support.single_process_policy import single_process_world


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def changed(name: str, settings: Settings) -> tuple[list[str], dict[str, Any]]:
    """Return the differences between the recorded and the computed training results, and the
    computed results.
    """
    found = json.loads(json.dumps(compute_golden_step(settings)))
    return find_differences(json.loads((GOLDEN / "expected.json").read_text())[name], found), found


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", CASES)
def test_a_step_teaches_what_it_taught(name: str, random_model: Path) -> None:
    """The results of each case equal the recorded ones.

    Each update changes the policy and consists of several micro-batches; later updates start from
    changed weights, since some ratios are clipped.
    """
    told, found = changed(name, CASES[name].settings(random_model))
    assert told == []
    assert min(update["grad_norm"] for update in found["updates"]) > 0 and min(map(len, found["minibatches"])) > 1
    assert len(found["updates"]) == 1 or max(update["policy/clip_high_fraction"] for update in found["updates"]) > 0


@pytest.mark.usefixtures("world")
def test_the_trainer_agrees_with_the_engine_that_sampled(random_model: Path) -> None:
    """Trainer and engine logprobs agree within LOGPROB_BOUND on every sampled token, including
    those of the filtered group and of the failed rollout. The rollouts include turns of one token
    and sequences with two images.
    """
    rollouts = load_rollouts()
    policy = build_golden_policy(CASES["grpo"].settings(random_model))
    contexts = [each for index, rollout in enumerate(rollouts) for each in make_pack_items(rollout, BatchSettings(), index=index)]
    batches = policy.pack(contexts, max_tokens=400)
    gaps = []
    for (rollout, number), column in scatter_to_rollouts(rollouts, batches, policy.logprobs(batches)).items():
        context = rollouts[rollout].sequences[number]
        sampled = zip(column, context.rollout_logprobs, context.loss_mask, strict=True)
        gaps += [abs(ours - theirs) for ours, theirs, is_sampled in sampled if is_sampled]
    assert len(gaps) == sum(rollout.num_sampled for rollout in rollouts) > 100 and max(gaps) <= LOGPROB_BOUND, max(gaps)
    lengths = {turn.token_span[1] - turn.token_span[0] for rollout in rollouts for turn in rollout.turns}
    assert min(lengths) == 1 and len(lengths) > 5 and max(len(context.images) for each in rollouts for context in each.sequences) == 2


@dataclass(frozen=True)
class Planted:
    """A mistake, and the test case and the first number that reveal it."""

    case: str
    owner: object
    name: str
    wrong: Callable
    shows: str


def unshifted(cls: type, weighted: PackItem, *arguments: object, number: int) -> Segment:
    return replace(whole(weighted, *arguments, number=number), advantages=weighted.sequence.advantages)


def one_more(num_sampled: int, settings: BatchSettings) -> tuple[float, int]:
    weight, denominator = episode_weight(num_sampled, settings)
    return weight, denominator + 1


whole = Segment.from_item
PLANTED = {
    "advantages of the token before": Planted("return_to_go", Segment, "from_item", classmethod(unshifted), "updates[0]/loss"),
    "a denominator one too large": Planted("gspo", minibatches, "episode_weight", one_more, "minibatches[0][0]/denominator"),
    "lengths as weights": Planted("gspo", minibatches, "episode_weight", lambda num, _: (1.0, 1), "updates[0]/grad_norm"),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_noticed(mistake: str, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake changes the recorded number that it should affect."""
    planted = PLANTED[mistake]
    monkeypatch.setattr(planted.owner, planted.name, planted.wrong)
    told, _ = changed(planted.case, CASES[planted.case].settings(random_model))
    assert any(line.startswith(planted.shows) for line in told), told


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("case", "setting", "value"), [("grpo", "clip_ratio_high", 0.09), ("gspo", "clip_ratio_low", 0.09), ("lora", "kl_coef", 0.0501)]
)
def test_a_setting_that_slipped_is_noticed(case: str, setting: str, value: float, random_model: Path) -> None:
    """A slightly changed setting changes the results of the updates and nothing else."""
    settings = CASES[case].settings(random_model)
    told, _ = changed(case, replace(settings, algo=replace(settings.algo, **{setting: value})))
    assert told and all(line.startswith("updates") for line in told), told


def test_a_difference_is_told_with_its_place() -> None:
    """`find_differences` reports each difference with its path and applies its tolerances."""
    expected = {"loss": 1.0, "dropped": ["", "stop_reason"], "rollout_mismatch/logprob_abs_diff": 1e-6}
    assert find_differences(expected, {"loss": 1.000001, "dropped": ["", "stop_reason"], "rollout_mismatch/logprob_abs_diff": 9e-5}) == []
    assert find_differences(expected, {"loss": 1.0001, "dropped": ["", ""], "rollout_mismatch/logprob_abs_diff": 2e-4}) == [
        "dropped[1]: stop_reason is now ", "loss: 1.0 is now 1.0001", "rollout_mismatch/logprob_abs_diff: 0.0002 is above 0.0001",
    ]  # fmt: skip
    assert find_differences({"loss": 1.0}, {"loss": float("nan")}), "NaN is never near"
    assert find_differences({"loss": 1.0}, {}) == ["loss: 1.0 is now None"] and find_differences([1], [1, 2]) == [": [1] is now [1, 2]"]
    assert find_differences({"sampled": 1}, {"sampled": 1.0}) == ["sampled: 1 is now 1.0"]
