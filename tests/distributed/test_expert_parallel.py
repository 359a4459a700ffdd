"""Expert parallelism (parallel.ep) with two data-parallel ranks that have different numbers of
micro-batches and of tokens, compared with whole experts on each rank.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.config import ParallelSettings
from megatron_rl.memory_plan.expert_memory import expert_gradient_bytes, expert_working_bytes
from megatron_rl.models.hf_config import read_spec
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.support.expert_parallel_world import NUM_TOKENS, SHARES
from tests.support.hf_reference import relative_error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_checkpoint(folder / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2, layers=3)
    return folder / "moe"


@pytest.fixture(scope="module")
def found(model: Path, torchrun) -> dict[str, dict]:  # noqa: ANN001
    torchrun(2, SUPPORT / "expert_parallel_world.py", model, model / "found.pt")
    return torch.load(model / "found.pt", weights_only=True)


def test_each_rank_holds_half_of_the_experts(found: dict[str, dict]) -> None:
    """Layer 1 is dense; two layers have eight experts."""
    assert found["whole"]["shapes"] == [[(8, 96, 128)] * 2] * 2
    assert found["divided"]["shapes"] == [[(4, 96, 128)] * 2] * 2


def test_the_experts_of_all_ranks_are_sent(found: dict[str, dict]) -> None:
    """The weights that engines receive are those of the model folder, bit for bit, on both ranks. A
    flipped bit in the last rank's last expert is sent by both.
    """
    before, after = found["divided"]["sent"]
    assert before == [[], []]
    assert after == [[("model.layers.2.mlp.experts.down_proj", [[7, 95, 127]])]] * 2


@pytest.mark.parametrize("step", range(len(SHARES)), ids=list(SHARES))
def test_uneven_ranks_compute_the_same(step: int, found: dict[str, dict]) -> None:
    """Logprobs of each micro-batch, losses and gradient norms are those of whole experts, if a rank
    has fewer micro-batches than the other or none.
    """
    whole, divided = found["whole"], found["divided"]
    for theirs, ours in zip(whole["logprobs"][step], divided["logprobs"][step], strict=True):
        assert [len(logprob_T) for logprob_T in ours] == [len(logprob_T) for logprob_T in theirs]
        assert all((one - other).abs().max() <= 1e-5 for one, other in zip(theirs, ours, strict=True))
    for key, value in whole["metrics"][step].items():
        assert divided["metrics"][step][key] == pytest.approx(value, rel=1e-5, abs=1e-9), key


def test_the_weights_after_all_updates(found: dict[str, dict]) -> None:
    """Every tensor is that of whole experts, and with overlapped reductions every bit is equal.

    Nothing is clipped, because Megatron sums the squares of the norm per bucket.
    """
    whole, divided, overlapped = (found[name]["weights"] for name in ("whole", "divided", "overlapped"))
    assert max(relative_error(divided[name], tensor) for name, tensor in whole.items()) <= 1e-5
    assert all(torch.equal(overlapped[name], tensor) for name, tensor in divided.items())


def test_the_memory_of_a_layer_is_planned(found: dict[str, dict], model: Path) -> None:
    """Both ranks together save the bytes of whole experts, because a token has as many rows. With
    gathered tokens and without, the temporary tensors of the backward pass take at least half of
    the plan, and at most all of it with the largest gradient.
    """
    whole, divided = (found[name]["memory"] for name in ("whole", "divided"))
    assert abs(sum(saved for saved, _ in divided) - sum(saved for saved, _ in whole)) <= 2 * NUM_TOKENS
    planned = [NUM_TOKENS * expert_working_bytes(read_spec(model), ParallelSettings(ep=ep), itemsize=4) for ep in (1, 2)]
    gradients = [expert_gradient_bytes(read_spec(model), ParallelSettings(ep=ep), itemsize=4) for ep in (1, 2)]
    assert gradients == [4 * 8 * 128 * 2 * 96, 4 * 4 * 128 * 2 * 96]
    for ranks, working, gradient in zip((whole, divided), planned, gradients, strict=True):
        assert working / 2 <= max(peak - saved for saved, peak in ranks) <= working + gradient


def test_reductions_of_experts_overlap(found: dict[str, dict]) -> None:
    """All buckets, also those of experts, are reduced early if both ranks have gradients for all
    parameters in their last micro-batch; in the first update, Megatron counts gradients.
    """
    overlapped = found["overlapped"]
    assert overlapped["buckets"] > found["divided"]["buckets"] == 2
    assert overlapped["early"] == [[0, 0], [overlapped["buckets"]] * 2, [0, 0], [0, 0]]
