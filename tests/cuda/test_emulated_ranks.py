"""Two ranks, each with an emulated device, against the same layouts on a CPU: tensor and pipeline
parallelism, waits and the order of collectives.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.support.cuda import launch
from tests.support.cuda.build import has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no g++: the code for GPUs was NOT tested on emulated devices"),
    pytest.mark.timeout(1000),  # half a minute on two idle cores
]
LAYOUTS = ["2,1,1,1,full,untied", "1,2,1,0,none,tied", "2,1,1,1,selective,qwen3_5", "1,1,1,0,full,ep2,qwen3_vl_moe"]
"""tp, pp, vpp, sequence parallelism, recomputation, model."""
LONG_LAYOUTS = [
    "1,1,1,0,full,untied", "1,2,2,0,none,untied", "2,1,1,1,none,qwen2_vl", "2,1,1,1,full,qwen3_vl", "1,2,1,0,none,qwen3_vl",
    "1,1,1,0,none,qwen3_5", "1,2,2,0,full,qwen3_5", "2,1,1,1,none,qwen3_vl_moe", "1,2,1,0,full,qwen3_vl_moe",
]  # fmt: skip
"""Two data-parallel ranks, an interleaved pipeline and other families."""
SIZES = {
    "qwen2_vl": {"vision_depth": 3}, "qwen3_vl": {"vision_depth": 3, "layers": 12}, "qwen3_5": {"seed": 3},
    "qwen3_vl_moe": {"vision_depth": 2},
}  # fmt: skip
"""Sizes of the models of other families, by family."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        make_checkpoint(folder / name, preset="nano", init="random", seed=1, heads=8, kv_heads=4, tied=name == "tied")
    for family, sizes in SIZES.items():
        make_checkpoint(folder / family, family=family, init="random", **{"seed": 1, "heads": 8, "kv_heads": 4, **sizes})
    return folder


def run_layouts(models: Path, out: Path, layouts: list[str], torchrun) -> tuple[dict[str, dict], dict[str, dict]]:  # noqa: ANN001
    """Return the results on a CPU and on emulated devices, by layout."""
    for where in ("cpu", "cuda"):
        (out / where).mkdir()
    launch.run_world(2, SUPPORT / "emulated_ranks_world.py", models, out / "cuda", *layouts, timeout_s=600)
    torchrun(2, SUPPORT / "parallel_layouts.py", models, out / "cpu", *layouts, timeout_s=300)
    return tuple({name: torch.load(out / where / f"{name}.pt", weights_only=True) for name in layouts} for where in ("cpu", "cuda"))


@pytest.fixture(scope="module")
def world(models: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> tuple[Path, dict, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("out")
    return out, *run_layouts(models, out, LAYOUTS, torchrun)


def relative_errors(truth: object, ours: object) -> list[float]:
    """Return the relative L2 error of each tensor and number in nested results."""
    if isinstance(truth, torch.Tensor):
        return [float((ours.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))]
    if isinstance(truth, dict):
        assert truth.keys() == ours.keys()
        return [error for name in truth for error in relative_errors(truth[name], ours[name])]
    if isinstance(truth, list):
        return [error for a, b in zip(truth, ours, strict=True) for error in relative_errors(a, b)]
    return [abs(ours - truth) / abs(truth)]


def assert_equal_results(truth: dict, ours: dict) -> None:
    """Compare logits, logprobs, gradients and the first step in float32."""
    assert max(relative_errors(truth["logits"], ours["logits"])) <= 1e-6
    assert max(relative_errors(truth["logprobs"], ours["logprobs"])) <= 1e-6
    for cut in ("one", "each"):
        assert max(relative_errors(truth[f"gradients_{cut}"], ours[f"gradients_{cut}"])) <= 1e-5
    for name in ("loss", "grad_norm"):
        assert max(relative_errors(truth["first_step"][name], ours["first_step"][name])) <= 1e-5
    assert max(relative_errors(truth["first_step"]["change"], ours["first_step"]["change"])) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_devices_compute_what_two_cpus_compute(layout: str, world: tuple[Path, dict, dict]) -> None:
    _, truth, ours = world
    assert_equal_results(truth[layout], ours[layout])


def test_tensor_parallel_ranks_wait_as_one_does(world: tuple[Path, dict, dict]) -> None:
    """With sequence parallelism, adapters and recomputation. Device tensors are sent by NCCL."""
    found = json.loads((world[0] / "cuda" / "world.json").read_text())
    assert found["waits"] == found["expected_waits"]
    assert {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} <= found["collectives"].keys()


def test_collectives_that_differ_raise_on_every_rank(world: tuple[Path, dict, dict]) -> None:
    """A collective that is left out on one rank, other sizes, another source, and tensors that NCCL
    cannot send."""
    found = json.loads((world[0] / "cuda" / "world.json").read_text())["mistakes"]
    for mistake in ("reduce_on_rank_zero_only", "reduce_different_sizes", "broadcast_from_itself"):
        assert all("ranks of a group call different collectives" in error for error in found[mistake]), mistake
    assert all("must be contiguous" in error for error in found["reduce_a_transposed_tensor"])
    assert all(f"the tensor is on cuda:{1 - rank}" in error for rank, error in enumerate(found["reduce_on_another_device"]))


@pytest.mark.long
def test_other_layouts_and_families(models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    truth, ours = run_layouts(models, tmp_path, LONG_LAYOUTS, torchrun)
    for layout in LONG_LAYOUTS:
        assert_equal_results(truth[layout], ours[layout])
