"""Tests the per-token statistics in a run's record, with one update and with four updates per step.
Oracles: the recorded logprobs of the engine, and Hugging Face's model.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl import training_batch, training_loop
from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.batching.token_stats import build_token_stats
from megatron_rl.config import AlgoSettings, BatchSettings, RolloutStoreSettings, RunSettings, Settings
from megatron_rl.explain.hf_reference import HfReferenceModel
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import make_patch_fn
from megatron_rl.models.hf_config import read_spec
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.open_checkpoint import open_source
from tests.support.golden_rollouts import CASES, LOGPROB_BOUND, build_golden_policy, load_rollouts
from tests.support.single_process_policy import single_process_world

FAST = 3.0
"""Learning rate that changes logprobs by far more than LOGPROB_BOUND from one update to the
next.
"""


def noted(settings: Settings) -> tuple[list[RecordedSequence], set[tuple[int, int]]]:
    """Return the sequences that one step trained on, and the sources of those in the first update.

    The step's updates change the weights by a large amount.
    """
    rollouts, algorithm = load_rollouts(), ALGORITHMS[settings.algo.name]
    with single_process_world():
        policy, notes = build_golden_policy(settings), build_token_stats(settings)
        training_loop.fills_batch(rollouts, settings, algorithm)
        minibatches = training_batch.prepare_training_batch(
            rollouts, settings, policy, algorithm=algorithm, fetch_images=lambda needed: None, step=0
        )
        update = training_loop.make_updaters(settings, policy, None, ALGORITHMS, notes)
        before = policy.logprobs(minibatches[0])
        for batches in minibatches * settings.batch.epochs:
            update(batches, 0)
        moved = max((now - then).abs().max() for now, then in zip(policy.logprobs(minibatches[0]), before, strict=True))
        notes.write_to(rollouts)
    assert moved > 10 * LOGPROB_BOUND
    first = {(origin.rollout, origin.sequence) for batch in minibatches[0] for origin in batch.origin_S if origin is not None}
    contexts = [
        RecordedSequence(row, number, each) for row, rollout in enumerate(rollouts) for number, each in enumerate(rollout.sequences)
    ]
    return [each for each in contexts if each.tokens.entropies], first


@pytest.mark.parametrize(("name", "num"), [("return_to_go", 1), ("grpo", 4)])
def test_the_first_look_at_each_token_is_kept(name: str, num: int, random_model: Path) -> None:
    settings = replace(CASES[name], lr=FAST).settings(random_model)
    settings = replace(settings, run=RunSettings(dir="nowhere"), rollouts=RolloutStoreSettings(save="all"))
    assert settings.batch.minibatches * settings.batch.epochs == num
    (looked, first), spec = noted(settings), read_spec(str(random_model))
    renderer = Renderer(settings.model)
    source, patches = open_source(random_model, spec, key="model.path"), make_patch_fn(renderer)
    reference = HfReferenceModel(
        spec, source, banned_ids=renderer.banned_ids, patches=patches, device=torch.device("cpu"), cache_bytes=1 << 30
    )
    assert sum(len(each.sampled_rows) for each in looked) > 60 and len({each.rollout_index for each in looked}) > 5
    for each in looked:
        logits_RV = reference.compute_logits(each).double().masked_fill(reference.banned_mask, -torch.inf)
        entropy_R = torch.distributions.Categorical(logits=logits_RV).entropy()
        ours_R = torch.tensor([each.tokens.entropies[row + 1] for row in each.sampled_rows], dtype=torch.float64)
        gap = (ours_R - entropy_R).abs().max().item()
        assert gap <= LOGPROB_BOUND if (each.rollout_index, each.index) in first else gap > LOGPROB_BOUND, gap
        old_R = torch.tensor([each.tokens.old_logprobs[row + 1] for row in each.sampled_rows])
        torch.testing.assert_close(old_R, torch.tensor(each.recorded_logprobs), rtol=0, atol=LOGPROB_BOUND)
        observed = [place for place, sampled in enumerate(each.tokens.loss_mask) if not sampled]
        assert not any(each.tokens.entropies[place] or each.tokens.old_logprobs[place] for place in observed)


@pytest.mark.parametrize(
    ("record", "algo", "batch", "notes"),
    [
        ("best", {}, {}, False),
        ("all", {}, {}, True),
        ("all", {}, {"minibatches": 2}, True),
        ("all", {"rollout_correction": "bypass"}, {}, True),
        (
            "all",
            {"rollout_correction": "bypass"},
            {"epochs": 2},
            False,
        ),  # after the first update, the logprobs of the second update's tokens under the step's first weights are not available
    ],
)
def test_what_is_not_of_the_steps_weights_is_not_noted(record: str, algo: dict, batch: dict, notes: bool) -> None:
    settings = Settings(
        algo=AlgoSettings(**algo), batch=BatchSettings(**batch), run=RunSettings(dir="nowhere"), rollouts=RolloutStoreSettings(save=record)
    )
    assert (build_token_stats(settings) is not None) == notes
