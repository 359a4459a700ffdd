"""Rollout corrections in updates of a real network, with images and shared prompts, in one
micro-batch or several."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.config import AlgoSettings, OptimSettings
from megatron_rl.observe.step_metrics import merge_update_metrics
from megatron_rl.types import MicroBatch
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world

EVERY = ("none", "bypass", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geo_mask", "k3_mask", "opsm", "bypass+geo_mask")
BOUNDS = {"token_mask_low": 0.95, "token_mask_high": 1.05, "sequence_mask_high": 1.1, "geo_mask_low": 0.995, "geo_mask_high": 1.005}
BOUNDS |= {"k3_mask_high": 0.0025, "opsm_delta": 1e-3}


@pytest.fixture
def world() -> Iterator[None]:
    with single_process_world():
        yield


def test_an_update_does_not_depend_on_how_it_was_cut(world: None, random_model: Path) -> None:
    """Loss, gradient norm and metrics are the same in one micro-batch and in several.

    The engine's logprobs differ from the trainer's by up to 0.1, or not at all. A tiny learning
    rate keeps the weights unchanged.
    """
    policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=1e-12, min_lr=0.0, weight_decay=0.0))
    contexts = make_example_items(renderer)
    cuts = {size: policy.pack(contexts, max_tokens=size) for size in (200, 10_000)}
    assert [len(batches) > 1 for batches in cuts.values()] == [True, False]

    def told(algo: AlgoSettings, batches: list[MicroBatch]) -> dict[str, float]:
        metrics = merge_update_metrics([policy.update(batches, make_policy_objective(algo), step=0)])
        return {name: value for name, value in metrics.items() if not name.endswith("lr")}

    for spread in (0.1, 0.0):
        for batches in cuts.values():
            for batch, said_T in zip(batches, policy.logprobs(batches), strict=True):
                batch.rollout_logprob_T = said_T + spread * torch.sin(3.0 * batch.target_T + 2.0) * batch.mask_T
        plain = told(AlgoSettings(), cuts[10_000])
        for correction in EVERY:
            algo = AlgoSettings(rollout_correction=correction, **BOUNDS)
            whole, cut = (told(algo, batches) for batches in cuts.values())
            assert cut == pytest.approx(whole, rel=1e-5, abs=1e-5), correction
            if spread == 0.0:
                assert whole["loss"] == pytest.approx(plain["loss"], abs=1e-5), "a mean of terms near 1 of either sign"
                assert whole["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
            elif "mask" in correction or correction == "opsm":
                assert 0 < whole["rollout_mismatch/masked_fraction"] < 1, (correction, whole)
                assert whole["rollout_mismatch/is_eff_sample_size"] < 1
