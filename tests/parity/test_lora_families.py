"""LoRA adapters of Qwen2-VL and of Qwen3-VL, dense and with experts, vision tower and merger
included, against PEFT in both directions.

Runs the checks of test_lora.py: Qwen3-VL with two processes, Qwen2-VL, whose layers have the form
of Qwen2.5-VL's, with one.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl.models.hf_config import read_spec
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.parity import test_lora as checks
from tests.support.hf_reference import HfReference, relative_error, write_adapter

pytestmark = pytest.mark.timeout(600)
TWO_PROCESSES = "2,1,1,1,full,tied"
EXPERT_LAYOUTS = {1: ["1,1,1,0,none,tied"], 2: ["2,1,1,1,none,tied", "1,2,1,0,full,tied", "1,1,1,0,none,ep2,tied"]}
FURTHER = {
    "qwen3_5": {1: ["1,1,1,0,none,tied"], 2: ["2,1,1,1,selective,tied", "1,2,1,0,full,tied", "2,1,1,1,none,tied"]},
    "qwen3_vl_moe": {
        **EXPERT_LAYOUTS,
        4: ["2,1,1,1,full,ep2,tied", "1,2,1,0,full,ep2,tied", "2,2,1,1,none,tied", "4,1,1,1,selective,tied", "1,1,1,0,none,ep4,tied"],
    },
    "qwen3_5_moe": {**EXPERT_LAYOUTS, 4: ["2,1,1,1,full,ep2,tied", "4,1,1,1,selective,tied"]},
}
"""Layouts of the test marked long by number of processes. Each number resumes the state of its first
layout."""
CASES = [
    ("qwen2_vl", 1, "1,1,1,0,full,tied"),
    ("qwen3_vl", 2, TWO_PROCESSES),
    ("qwen3_5", 2, TWO_PROCESSES),
    pytest.param("qwen2_vl", 2, TWO_PROCESSES, marks=pytest.mark.long),
    pytest.param("qwen3_5_moe", 2, TWO_PROCESSES, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "num_processes", "layout"), CASES)
def test_adapters_are_those_of_peft(family: str, num_processes: int, layout: str, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Adapters of the family pass the checks of test_lora.py.

    With seed 1, the logits of Qwen3.5 with experts differ by more than 2e-5 between transformers'
    own float32 and float64.
    """
    make_checkpoint(tmp_path / "tied", family=family, init="random", seed=2 if family == "qwen3_5_moe" else 1, vision_depth=3)
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


def run_layouts(family: str, layouts_of: dict[int, list[str]], folder: Path, torchrun) -> tuple[dict[str, dict], HfReference]:  # noqa: ANN001
    """Run the layouts, and check each result; return the results by world and layout."""
    sizes = {"heads": 8, "kv_heads": 4, "vision_depth": 2}  # for tp 4, and DeepStack fits into one of two stages
    make_checkpoint(folder / "tied", family=family, init="random", seed=10 if family == "qwen3_5_moe" else 1, **sizes)
    adapter = write_adapter(folder / "tied", folder / "adapter")
    peft, results = HfReference(folder / "tied", adapter), {}
    for world, layouts in layouts_of.items():
        (folder / str(world)).mkdir()
        torchrun(world, SUPPORT / "lora_layouts.py", folder, adapter, folder / str(world), *layouts)
        results |= {f"{world}/{layout}": checks.read_result(folder, f"{world}/{layout}") for layout in layouts}
    for file in results:
        check_layout(file, results, folder, adapter, peft)
    return results, peft


def test_adapters_of_experts_are_those_of_peft(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Adapters of experts pass the checks, on one process, with tensor and sequence parallelism, with
    two stages and with divided experts. The merger's weights are those that the run exports, bit for
    bit.
    """
    results, peft = run_layouts("qwen3_vl_moe", EXPERT_LAYOUTS, tmp_path, torchrun)
    base = open_source(tmp_path / "tied", read_spec(tmp_path / "tied"), key="model.path")
    for file, result in results.items():
        assert (result["logits"] - peft.logits).abs().max() <= 1e-5
        assert sum(".mlp.experts." in name for name in result["gradients"]) == 3 * 4
        check_same_steps(result, results[next(iter(results))], file)
        merged = MergedTensors(base, result["folder"], key="--lora")
        assert sum(".mlp.experts." in name for name in merged.pairs) == 3 * 2
        assert all(torch.equal(merged.read(name), result["merged"][name]) for name in merged.pairs), file


@pytest.mark.long
def test_adapters_of_shared_experts_are_those_of_peft(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Adapters of Qwen3.5's experts and shared experts pass the same checks in these layouts."""
    results, _ = run_layouts("qwen3_5_moe", EXPERT_LAYOUTS, tmp_path, torchrun)
    base = open_source(tmp_path / "tied", read_spec(tmp_path / "tied"), key="model.path")
    for file, result in results.items():
        check_same_steps(result, results[next(iter(results))], file)
        merged = MergedTensors(base, result["folder"], key="--lora")
        assert sum(".mlp.shared_expert." in name for name in merged.pairs) == 4 * 3
        assert all(torch.equal(merged.read(name), result["merged"][name]) for name in merged.pairs), file


def check_same_steps(result: dict, one: dict, file: str) -> None:
    """Check that three steps changed adapters only, as they did in another layout."""
    found, expected = result["three_steps"], one["three_steps"]
    assert all(tensor.abs().max() > 1e-3 for tensor in found["adapters"].values())
    assert found["base_unchanged"] and found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    worst = max((relative_error(tensor, expected["adapters"][name]), name) for name, tensor in found["adapters"].items())
    assert worst[0] <= 1e-3, (file, worst)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", list(FURTHER))
def test_further_layouts(family: str, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Other layouts pass the checks as well. Three steps are the same in every layout, and a
    training state is resumed with another layout.
    """
    results, _ = run_layouts(family, FURTHER[family], tmp_path, torchrun)
    one = next(iter(results.values()))
    for world, layouts in FURTHER[family].items():
        written = results[f"{world}/{layouts[0]}"]
        for file in (f"{world}/{layout}" for layout in layouts):
            result = results[file]
            check_same_steps(result, one, file)
            assert all(torch.equal(x, written["three_steps"]["adapters"][name]) for name, x in result["resumed"]["adapters"].items())
            assert len(result["resumed"]["keys"]) == len(one["three_steps"]["adapters"])
            fourth = result["resumed"]["step"]["adapters"]
            assert all(relative_error(x, fourth[name]) <= 1e-3 for name, x in written["fourth_step"]["adapters"].items())
