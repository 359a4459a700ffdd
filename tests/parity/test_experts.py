"""Qwen3-VL with experts against Hugging Face and at several layouts, with the tests of
test_policy.py.

Tensor parallelism requires sequence parallelism here. Layer 1 of the model is dense.
"""

from pathlib import Path

import pytest

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.parity.test_policy import check_layouts
from tests.support.hf_reference import HfReference

pytestmark = pytest.mark.timeout(900)
ALONE = ["1,1,1,0,none,moe"]
TWO_PROCESSES = ["2,1,1,1,none,moe", "1,2,1,0,full,moe"]
LONG = {
    2: ["1,1,1,0,selective,moe", "2,1,1,1,selective,0.1,moe", "1,2,1,0,none,moe"],
    4: ["4,1,1,1,full,moe", "2,2,1,1,none,moe", "2,1,1,1,full,moe", "1,2,2,0,selective,moe", "2,2,2,1,full,moe"],
}


def write_model(folder: Path, *, layers: int) -> HfReference:
    """Write a model whose DeepStack features fit into the first of two stages (or of four chunks)."""
    make_checkpoint(folder / "moe", family="qwen3_vl_moe", init="random", seed=1, heads=8, kv_heads=4, vision_depth=2, layers=layers)
    return HfReference(folder / "moe")


def test_two_layouts_are_those_of_hf(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Logits, logprobs, every gradient and three steps agree with HF, with one process, and with the
    dry plan, for tensor and sequence parallelism and for a pipeline.
    """
    hf = {"moe": write_model(tmp_path, layers=4)}
    check_layouts({1: ALONE, 2: TWO_PROCESSES}, tmp_path, hf, tmp_path, torchrun)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Data parallelism, interleaved pipelines, tp 4, small buckets and recomputation agree as well."""
    hf = {"moe": write_model(tmp_path, layers=8)}
    check_layouts({1: ALONE, **LONG}, tmp_path, hf, tmp_path, torchrun)
