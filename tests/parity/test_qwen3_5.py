"""Qwen3.5 against Hugging Face and at several layouts, with the tests of test_policy.py.

The example packs of these tests are trees of shared prefixes. Layers 2 and 5 have attention, the
others gated delta nets.
"""

from pathlib import Path

import pytest

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.parity.test_policy import check_layouts
from tests.support.hf_reference import HfReference

pytestmark = pytest.mark.timeout(900)
ALONE = ["1,1,1,0,none,delta"]
TWO_PROCESSES = ["2,1,1,1,selective,delta", "1,2,1,0,full,delta"]
LONG = {
    2: ["1,1,1,0,selective,delta", "2,1,1,0,none,delta"],
    4: ["4,1,1,1,full,delta", "2,2,1,0,none,delta", "2,1,1,1,full,0.1,delta", "1,2,2,0,selective,delta"],
}


def write_model(folder: Path, *, layers: int) -> HfReference:
    """Write a model that tensor parallelism can cut into four.

    With seeds 1 and 2, one of the 24 gradients of a norm is so close to zero that Adam multiplies its
    rounding error by more than the tolerance of the first step.
    """
    make_checkpoint(folder / "delta", family="qwen3_5", init="random", seed=3, heads=8, kv_heads=4, layers=layers)
    return HfReference(folder / "delta")


def test_two_layouts_are_those_of_hf(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Logits, logprobs, every gradient and three steps agree with HF, with one process, and with
    the dry plan, for tensor and sequence parallelism and for a pipeline.
    """
    hf = {"delta": write_model(tmp_path, layers=4)}
    check_layouts({1: ALONE, 2: TWO_PROCESSES}, tmp_path, hf, tmp_path, torchrun)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Data parallelism, interleaved pipelines, tp 4, small buckets and recomputation agree as well."""
    hf = {"delta": write_model(tmp_path, layers=8)}
    check_layouts({1: ALONE, **LONG}, tmp_path, hf, tmp_path, torchrun)
