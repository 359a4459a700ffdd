"""LoRA adapters of Qwen2-VL and of Qwen3-VL, dense and with experts, vision tower and merger
included, against PEFT in both directions.

Runs the checks of test_lora.py: Qwen3-VL with two processes, Qwen2-VL, whose layers have the form
of Qwen2.5-VL's, with one.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.parity import test_lora as checks
from tests.support.hf_reference import HfReference, write_adapter

pytestmark = pytest.mark.timeout(600)
TWO_PROCESSES = "2,1,1,1,full,tied"
CASES = [
    ("qwen2_vl", 1, "1,1,1,0,full,tied"),
    ("qwen3_vl", 2, TWO_PROCESSES),
    pytest.param("qwen2_vl", 2, TWO_PROCESSES, marks=pytest.mark.long),
    pytest.param("qwen3_vl_moe", 2, TWO_PROCESSES, marks=pytest.mark.long),
    pytest.param("qwen3_vl_moe", 2, "1,1,1,0,full,ep2,tied", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "num_processes", "layout"), CASES)
def test_adapters_are_those_of_peft(family: str, num_processes: int, layout: str, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Adapters of the family pass the checks of test_lora.py."""
    make_checkpoint(tmp_path / "tied", family=family, init="random", seed=1, vision_depth=3)
    adapter = write_adapter(tmp_path / "tied", tmp_path / "adapter")
    peft = HfReference(tmp_path / "tied", adapter)
    torchrun(num_processes, SUPPORT / "lora_layouts.py", tmp_path, adapter, tmp_path, layout)
    results = {layout: {**torch.load(tmp_path / f"{layout}.pt", weights_only=True), "folder": tmp_path / f"adapter {layout}"}}
    checks.test_an_adapter_made_by_peft_gives_pefts_logits(layout, results, peft)
    checks.test_its_gradients_are_those_of_peft(layout, results, peft)
    checks.test_merged_weights_are_those_of_peft(layout, results, tmp_path, adapter)
    checks.test_peft_loads_our_export(layout, results, tmp_path, adapter, peft)
    checks.test_without_its_adapter_the_model_is_the_base(layout, results)
    checks.test_copies_of_an_adapter_stay_bitwise_equal(layout, results)
