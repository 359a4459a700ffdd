"""Tests when the logprob difference between engine and trainer ends a run: bounds by precision and
means over all ranks, with numbers computed by hand.
"""

import math
import re

import pytest
import torch.distributed as dist

from megatron_rl.config import EngineSettings, ModelSettings, RunSettings, Settings
from megatron_rl.errors import LogprobMismatch
from megatron_rl.policy.loss_metrics import reduce_metrics
from megatron_rl.run.failure_checks import MismatchCheck

GAP, LARGEST = "rollout_mismatch/logprob_abs_diff", "rollout_mismatch/logprob_abs_diff_max"


def settings_of(*, model: str = "float32", engine: str = "float32", **run: object) -> Settings:
    return Settings(model=ModelSettings(path="m", dtype=model), engine=EngineSettings(dtype=engine), run=RunSettings(dir="run", **run))


def update(mean: float, *, tokens: float = 100.0, **more: float) -> dict[str, float]:
    return {"tokens": tokens, GAP: mean, LARGEST: 2 * mean, **more}


def is_refused(settings: Settings, *updates: dict[str, float]) -> bool:
    check = MismatchCheck(settings)
    try:
        for each in updates:
            check(each)
    except LogprobMismatch:
        return True
    return False


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (settings_of(), 1e-3),
        (settings_of(model="bfloat16"), 5e-2),
        (settings_of(engine="bfloat16"), 5e-2),
        (settings_of(model="bfloat16", engine="bfloat16"), 5e-2),
        (settings_of(max_logprob_abs_diff=0.25), 0.25),
        (settings_of(model="bfloat16", max_logprob_abs_diff=0.01), 0.01),
    ],
)
def test_the_coarser_precision_decides_unless_a_bound_is_set(settings: Settings, bound: float) -> None:
    assert not is_refused(settings, update(bound)) and not is_refused(settings, update(0.0))
    assert is_refused(settings, update(bound * 1.001)) and is_refused(settings, update(math.inf))
    assert is_refused(settings, update(math.nan)), "NaN is above every bound"


def test_tokens_of_older_weights_do_not_count() -> None:
    """A mean of 0.0008 over all tokens is 0.0032 over the quarter of the tokens that the current
    weights sampled.
    """
    current = "rollout/on_policy_fraction"
    assert is_refused(settings_of(), update(8e-4, **{current: 0.25})) and not is_refused(settings_of(), update(8e-4, **{current: 1.0}))
    assert not is_refused(settings_of(), update(0.0, **{current: 0.0}))


def test_it_waits_for_tokens_and_compares_once() -> None:
    """An update without such tokens decides nothing. Later updates are not compared, because they
    differ by design: old logprobs are those of the step's first weights.
    """
    nothing, stale = update(0.0, tokens=0.0), update(0.0, **{"rollout/on_policy_fraction": 0.0})
    assert is_refused(settings_of(), nothing, stale, update(0.1))
    assert not is_refused(settings_of(), nothing, update(1e-5), update(0.1))
    replay = settings_of()
    replay.run.mode = "replay"
    assert not is_refused(replay, update(0.1)), "other weights may have sampled what is replayed"


def test_the_mean_is_over_the_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens with a mean of 2e-4 and 300 with 3e-3 have the mean 0.92 / 400. The first rank
    alone would pass the check; both ranks raise the same error.
    """
    ranks = [(100.0, 0.02, 1e-3), (300.0, 0.9, 0.5)]
    numbers = [
        {"sums": {"tokens": n, "denominator": n, GAP: total}, "losses": {"loss": 0.0}, "maxima": {LARGEST: top}, "histograms": {}}
        for n, total, top in ranks
    ]
    gathered = [(each["sums"], each["losses"], each["maxima"], {}, "") for each in numbers]

    def gather(into: list, _: object) -> None:
        into[:] = gathered

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    said = "the mean absolute logprob difference over the sampled tokens is 0.0023 (largest 0.5), above the bound 0.001 (of float32)"
    for own in numbers:
        metrics = reduce_metrics([own], error="")
        assert metrics[GAP] == pytest.approx(0.92 / 400)
        with pytest.raises(LogprobMismatch, match=re.escape(said)):
            MismatchCheck(settings_of())(metrics)
    assert not is_refused(settings_of(), update(0.02 / 100))


def test_a_bound_below_zero_is_refused() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"^run.max_logprob_abs_diff=\S+: must not be negative; 0 uses the default of the dtype$"):
            settings_of(max_logprob_abs_diff=wrong)
