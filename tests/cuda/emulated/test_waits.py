"""Number of times the host waits for the device in an update: never in a layer, never in a
micro-batch, five times per update.

Each policy has images, a prompt that two sequences share, a value head and several blocks of
logits. Copies to the device come from page-locked memory, without a wait.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_rl.config import ParallelSettings
from megatron_rl.policy import attention, transformer
from megatron_rl.policy.parallel import build_layout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.support.single_process_policy import close_with_world, single_process_world
from tests.support.update_waits import LAYER_WAITS, UPDATE_WAITS, count_update_waits

KERNEL_WAITS = {"copy to host in experts.py": 2, "copy to host in torch": 4}
"""Waits of grouped products, in a layer with experts, with and without gradients. Only torch's
kernels for CPUs read the numbers of rows; tests/cuda/test_full_size.py counts without them."""

SPARSE_LAYERS = {"qwen3_vl_moe": 3, "qwen3_5_moe": 4}
"""Layers with experts in the models of four layers, by family."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for blocks in (2, 4):
        make_checkpoint(folder / str(blocks), preset="nano", init="random", seed=1, layers=blocks, vision_depth=blocks)
    for family in ("qwen3_5", *SPARSE_LAYERS):
        make_checkpoint(folder / family, family=family, init="random", seed=1, vision_depth=2)
    return folder


def waits(model: Path, *, recompute: str = "none", **case: object) -> Counter[str]:
    parallel = ParallelSettings(log_probs_chunk_size=4, recompute=recompute)
    with single_process_world():
        counted, policy = count_update_waits(model, build_layout(parallel, seed=0), parallel, **case)
        close_with_world(policy)
    return counted


@pytest.mark.parametrize(
    ("blocks", "case"),
    [
        ("2", {"micro_batches": 3}), ("4", {"recompute": "full", "rank": 4}), ("4", {"dtype": "float32", "recompute": "selective"}),
        ("qwen3_5", {"micro_batches": 2, "recompute": "selective"}),
    ],
    ids=["bfloat16", "adapters", "float32", "delta nets"],
)  # fmt: skip
def test_the_host_waits_in_no_micro_batch_and_in_no_layer(blocks: str, case: dict, models: Path) -> None:
    """The waits are those of an update, whatever the number of micro-batches and layers."""
    assert waits(models / blocks, **case) == Counter(UPDATE_WAITS)


@pytest.mark.parametrize("family", SPARSE_LAYERS)
def test_a_layer_with_experts_waits_for_the_numbers_of_tokens(family: str, models: Path) -> None:
    """The host waits four times in each sparse layer and each micro-batch, as at full size, and in
    the kernels that replace those of a GPU; never in a shared expert."""
    counted = waits(models / family, micro_batches=2)
    in_layers = {place: SPARSE_LAYERS[family] * 2 * count for place, count in (LAYER_WAITS | KERNEL_WAITS).items()}
    assert counted == Counter(UPDATE_WAITS | in_layers)


def test_a_wait_in_a_layer_is_counted(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that reads its input adds a wait for each of its nine calls in four layers, and an
    index that stays on the host raises."""
    norm = transformer.RMSNorm.forward

    def checking_norm(self: transformer.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all()
        return norm(self, x)

    monkeypatch.setattr(transformer.RMSNorm, "forward", checking_norm)
    assert waits(models / "4") - Counter(UPDATE_WAITS) == {"item in test_waits.py": 9}
    monkeypatch.setattr(attention, "to_device", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match="cu_seqlens_q is on cpu, the query is on cuda:0"):
        waits(models / "4")
