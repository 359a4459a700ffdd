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
from tests.support.hf_reference import HfReference, relative_error, write_adapter

pytestmark = pytest.mark.timeout(600)
TWO_PROCESSES = "2,1,1,1,full,tied"
ALL_LAYOUTS = [(1, ["1,1,1,0,none,tied"]), (2, ["2,1,1,1,selective,tied", "1,2,1,0,full,tied", "2,1,1,1,none,tied"])]
"""Worlds and layouts of the test marked long. Each world resumes the state of its first layout."""
CASES = [
    ("qwen2_vl", 1, "1,1,1,0,full,tied"),
    ("qwen3_vl", 2, TWO_PROCESSES),
    ("qwen3_5", 2, TWO_PROCESSES),
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
    check_layout(layout, {layout: checks.read_result(tmp_path, layout)}, tmp_path, adapter, peft)


def check_layout(layout: str, results: dict[str, dict], models: Path, adapter: Path, peft: HfReference) -> None:
    checks.test_an_adapter_made_by_peft_gives_pefts_logits(layout, results, peft)
    checks.test_its_gradients_are_those_of_peft(layout, results, peft)
    checks.test_merged_weights_are_those_of_peft(layout, results, models, adapter)
    checks.test_peft_loads_our_export(layout, results, models, adapter, peft)
    checks.test_without_its_adapter_the_model_is_the_base(layout, results)
    checks.test_copies_of_an_adapter_stay_bitwise_equal(layout, results)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5"])
def test_further_layouts(family: str, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Other layouts pass the checks as well. Three steps are the same in every layout, and a
    training state is resumed with another layout.
    """
    make_checkpoint(tmp_path / "tied", family=family, init="random", seed=1, vision_depth=3)
    adapter = write_adapter(tmp_path / "tied", tmp_path / "adapter")
    peft, results = HfReference(tmp_path / "tied", adapter), {}
    for world, layouts in ALL_LAYOUTS:
        (tmp_path / str(world)).mkdir()
        torchrun(world, SUPPORT / "lora_layouts.py", tmp_path, adapter, tmp_path / str(world), *layouts)
        results |= {f"{world}/{layout}": checks.read_result(tmp_path, f"{world}/{layout}") for layout in layouts}
    one = next(iter(results.values()))["three_steps"]
    for world, layouts in ALL_LAYOUTS:
        written = results[f"{world}/{layouts[0]}"]
        for file in (f"{world}/{layout}" for layout in layouts):
            check_layout(file, results, tmp_path, adapter, peft)
            result = results[file]
            assert result["three_steps"]["base_unchanged"]
            assert all(relative_error(tensor, one["adapters"][name]) <= 1e-3 for name, tensor in result["three_steps"]["adapters"].items())
            assert all(torch.equal(x, written["three_steps"]["adapters"][name]) for name, x in result["resumed"]["adapters"].items())
            assert len(result["resumed"]["keys"]) == len(one["adapters"])
            fourth = result["resumed"]["step"]["adapters"]
            assert all(relative_error(x, fourth[name]) <= 1e-3 for name, x in written["fourth_step"]["adapters"].items())
