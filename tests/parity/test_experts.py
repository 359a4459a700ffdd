"""Qwen3-VL with experts against Hugging Face and at several layouts, with the tests of
test_policy.py.

Tensor parallelism requires sequence parallelism here. Layer 1 of the model is dense.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.parity.test_policy import check_layouts
from tests.support.checkpoint_world import EXPERTS
from tests.support.hf_reference import HfReference, relative_error

pytestmark = pytest.mark.timeout(900)
ALONE = ["1,1,1,0,none,moe"]
TWO_PROCESSES = ["2,1,1,1,none,moe", "1,2,1,0,full,moe", "1,1,1,0,none,ep2,moe"]
LONG = {
    2: ["1,1,1,0,selective,moe", "2,1,1,1,selective,0.1,moe"],
    4: ["4,1,1,1,full,moe", "2,2,1,1,none,moe", "2,1,1,1,full,moe", "1,2,2,0,selective,moe", "2,2,2,1,full,moe"],
}


def write_model(folder: Path, *, layers: int) -> HfReference:
    """Write a model with DeepStack features that fit into the first of two stages or four chunks."""
    make_checkpoint(folder / "moe", family="qwen3_vl_moe", init="random", seed=1, heads=8, kv_heads=4, vision_depth=2, layers=layers)
    return HfReference(folder / "moe")


def test_two_layouts_are_those_of_hf(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Logits, logprobs, every gradient and three steps agree with HF, with one process, and with
    the dry plan, for tensor and sequence parallelism and for a pipeline.
    """
    hf = {"moe": write_model(tmp_path, layers=4)}
    check_layouts({1: ALONE, 2: TWO_PROCESSES}, tmp_path, hf, tmp_path, torchrun)


def test_a_checkpoint_is_read_with_another_layout(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Weights and optimizer state written with tp 2 are read bit for bit with two stages and with
    two replicas, and the next update is that of the unbroken run.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    out = tmp_path / "out"
    out.mkdir()
    reads = [f"read:{EXPERTS}:{layout}" for layout in ("pp2", "dp2")]
    torchrun(2, SUPPORT / "checkpoint_world.py", tmp_path / "moe", out, f"write:{EXPERTS}", *reads)
    unbroken, *resumed = (torch.load(out / f"{name}.pt", weights_only=True) for name in (EXPERTS, f"{EXPERTS}_at_pp2", f"{EXPERTS}_at_dp2"))
    for again in resumed:
        assert not again["different"]
        assert sum("mlp.experts.linear_fc" in key for key in again["keys"]) == 3 * 2 * 4, "weights and three states in three sparse layers"
        assert max(relative_error(again["change"][name], change) for name, change in unbroken["change"].items()) <= 1e-5


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Data parallelism, interleaved pipelines, tp 4, small buckets and recomputation agree as well."""
    hf = {"moe": write_model(tmp_path, layers=8)}
    check_layouts({1: ALONE, **LONG}, tmp_path, hf, tmp_path, torchrun)
