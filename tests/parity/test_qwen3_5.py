"""Qwen3.5 against Hugging Face and at several layouts, with the tests of test_policy.py.

The example packs of these tests are trees of shared prefixes. Layer 2 has attention, the other
three layers have gated delta nets.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.parity.test_policy import check_layouts
from tests.support.hf_reference import HfReference, relative_error

pytestmark = pytest.mark.timeout(900)
ALONE = ["1,1,1,0,none,delta"]
TWO_PROCESSES = ["2,1,1,1,selective,delta", "1,2,1,0,full,delta"]
LONG = {
    2: ["1,1,1,0,selective,delta", "2,1,1,0,none,delta"],
    4: ["4,1,1,1,full,delta", "2,2,1,0,none,delta", "2,1,1,1,full,0.1,delta", "1,2,2,0,selective,delta"],
}


def write_model(folder: Path) -> HfReference:
    """Write a model that tensor parallelism can cut into four.

    With seeds 1 and 2, one of the 24 gradients of a norm is so close to zero that Adam multiplies its
    rounding error by more than the tolerance of the first step.
    """
    make_checkpoint(folder / "delta", family="qwen3_5", init="random", seed=3, heads=8, kv_heads=4)
    return HfReference(folder / "delta")


def test_two_layouts_are_those_of_hf(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Logits, logprobs, every gradient and three steps agree with HF, with one process, and with
    the dry plan, for tensor and sequence parallelism and for a pipeline.
    """
    hf = {"delta": write_model(tmp_path)}
    check_layouts({1: ALONE, 2: TWO_PROCESSES}, tmp_path, hf, tmp_path, torchrun)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Data parallelism, interleaved pipelines, tp 4, small buckets and recomputation agree as well."""
    hf = {"delta": write_model(tmp_path)}
    check_layouts({1: ALONE, **LONG}, tmp_path, hf, tmp_path, torchrun)


@pytest.mark.long
def test_a_checkpoint_is_read_with_another_layout(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Weights and optimizer state written with tp 2 are read bit for bit with two stages and with
    two replicas, and the next update is that of the unbroken run.
    """
    make_checkpoint(tmp_path / "delta", family="qwen3_5", init="random", seed=1)
    out = tmp_path / "out"
    out.mkdir()
    reads = [f"read:tp2:{layout}" for layout in ("tp2", "pp2", "dp2")]
    torchrun(2, SUPPORT / "checkpoint_world.py", tmp_path / "delta", out, "write:tp2", *reads)
    unbroken, *resumed = (torch.load(out / f"{name}.pt", weights_only=True) for name in ("tp2", "tp2_at_tp2", "tp2_at_pp2", "tp2_at_dp2"))
    for again in resumed:
        assert not again["different"]
        assert sum(key.endswith(("A_log", "dt_bias", "conv1d_by_head.weight")) for key in again["keys"]) == 3 * 3 * 4, (
            "weights and three states"
        )
        assert max(relative_error(again["change"][name], change) for name, change in unbroken["change"].items()) <= 1e-5
