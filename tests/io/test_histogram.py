"""Quantiles of binned counts against sorted numbers, and quantiles of an update against those of
all its tokens."""

import math
from itertools import pairwise

import numpy
import pytest
import torch
import torch.distributed as dist

from megatron_rl.io.histogram import BINS_PER_OCTAVE, MAX_EXPONENT, MIN_EXPONENT, NUM_BINS, count_in_bins, quantile
from megatron_rl.policy.loss_metrics import read_metrics, reduce_metrics
from megatron_rl.types import LossMetrics

NAME = "rollout_mismatch/logprob_abs_diff"


def by_bin(size_R: torch.Tensor) -> dict[int, int]:
    """Return the nonzero bin counts keyed by bin."""
    return {place: count for place, count in enumerate(count_in_bins(size_R).tolist()) if count}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [1, 7, 99, 100, 101, 5000])
def test_a_quantile_is_that_of_the_sorted_numbers(num: int, seed: int) -> None:
    """The quantile is the smallest number that 99% do not exceed, or up to 9% more.

    The numbers resemble bfloat16 logprob differences: most are small, a few are large.
    """
    size_R = (torch.randn(num, generator=torch.Generator().manual_seed(seed)) * 2 - 5).exp()
    truth = numpy.quantile(size_R.numpy(), 0.99, method="inverted_cdf")
    assert truth * (1 - 1e-6) <= quantile(by_bin(size_R), 99) <= truth * 2 ** (1 / BINS_PER_OCTAVE) * (1 + 1e-6)


def test_bins_by_hand() -> None:
    """Bin edges equal values computed by hand; an edge belongs to the bin below it.

    Zeros, values above the last edge, and NaN are counted too.
    """
    edges = [2.0 ** (MIN_EXPONENT + place / BINS_PER_OCTAVE) for place in range(NUM_BINS - 1)]
    assert edges[-1] == 2.0**MAX_EXPONENT and all(upper / lower == pytest.approx(1.0905077) for lower, upper in pairwise(edges))
    assert by_bin(torch.tensor([0.0, 1e-30, 0.5, 0.51, 1e9, math.inf, math.nan])) == {0: 2, 208: 1, 209: 1, NUM_BINS - 1: 3}
    assert quantile({208: 98, 209: 1, 210: 1}, 99) == pytest.approx(0.5 * 2 ** (1 / 8)) and quantile({208: 99, 210: 1}, 99) == 0.5
    assert quantile({208: 98, NUM_BINS - 1: 2}, 99) == math.inf and quantile({}, 99) == 0.0
    assert count_in_bins(torch.zeros(0)).tolist() == [0] * NUM_BINS


@pytest.mark.parametrize("cuts", [[1000], [1, 999], [300, 0, 700], [250] * 4])
def test_an_update_has_the_quantile_of_all_its_tokens(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantile is that of all tokens of an update, however they are split into micro-batches on
    two ranks. Quantiles of single micro-batches would differ."""
    size_R = torch.cat([torch.full((985,), 0.01), torch.linspace(0.1, 1.5, 15)])[torch.randperm(1000)]

    def told(part_R: torch.Tensor) -> LossMetrics:
        largest = part_R.max() if len(part_R) else torch.zeros(())
        return LossMetrics(
            sums={"tokens": len(part_R), "denominator": len(part_R), NAME: part_R.sum()}, maxima={f"{NAME}_max": largest},
            histograms={NAME: count_in_bins(part_R)},
        )  # fmt: skip

    def gather(into: list, mine: object) -> None:
        into[:] = [mine, mine]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    found = reduce_metrics(read_metrics([told(part_R) for part_R in size_R.split(cuts)]), error="")
    truth = float(size_R.sort().values[989])  # 0.5
    assert truth <= found[f"{NAME}_p99"] <= truth * 2 ** (1 / BINS_PER_OCTAVE) and found["tokens"] == 2000
    assert found[NAME] == pytest.approx(float(size_R.mean())) and found[f"{NAME}_max"] == 1.5


def test_a_quantile_is_never_above_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported quantile never exceeds the reported maximum."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(0, mine))
    for value in (0.0, 0.3, 1e9):
        size_R = torch.tensor([value])
        sums = {"tokens": 1.0, "denominator": 1.0}
        one = LossMetrics(sums=sums, maxima={f"{NAME}_max": size_R.max()}, histograms={NAME: count_in_bins(size_R)})
        assert reduce_metrics(read_metrics([one]), error="")[f"{NAME}_p99"] == pytest.approx(value)
