"""Gradient reduction that overlaps the backward pass (parallel.overlap_grad_reduce), with two
data-parallel ranks, compared with reduction after the backward pass.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.config import ParallelSettings
from tests.conftest import SUPPORT
from tests.support.grad_reduce_overlap_world import UPDATES


@pytest.fixture(scope="module")
def found(random_model: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict:  # noqa: ANN001
    out = tmp_path_factory.mktemp("overlap")
    torchrun(2, SUPPORT / "grad_reduce_overlap_world.py", random_model, out)
    return torch.load(out / "overlap.pt", weights_only=True)


def test_the_same_updates(found: dict) -> None:
    """The metrics and weights of six updates are bitwise equal. Only the gradient norm may differ,
    by 1e-6, because Megatron sums its squares per bucket; nothing is clipped by it.
    """
    after, beside = found["after"], found["beside"]
    for theirs, ours in zip(after["metrics"], beside["metrics"], strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-6)
        assert ours == theirs
    assert all(torch.equal(beside["weights"][name], tensor) for name, tensor in after["weights"].items())


def test_it_overlaps_where_every_rank_has_all_gradients(found: dict) -> None:
    """All buckets are reduced early, except in the first update, in which Megatron counts
    gradients, and in updates in which one rank's last micro-batch has no image or only the value
    head has a loss. Without the setting there is a single bucket, which is never reduced early.
    """
    assert [any(words) for words in found["beside"]["words"]].count(True) == 1, "one rank has a micro-batch of words alone"
    buckets = found["beside"]["buckets"]
    assert buckets > 3 and found["after"]["buckets"] == 1
    expected = [[0, 0], *([buckets * (last == "pictures")] * 2 for last in UPDATES[1:])]
    assert found["beside"]["early"] == expected
    assert found["after"]["early"] == [[0, 0]] * len(UPDATES)


def test_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^parallel.overlap_grad_reduce=True: requires parallel.pp=1$"):
        ParallelSettings(overlap_grad_reduce=True, pp=2)
