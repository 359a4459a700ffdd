"""Qwen3-VL with experts against Hugging Face and at several layouts, with the tests of
test_policy.py.

Tensor parallelism requires sequence parallelism here. Layer 1 of the model is dense.
"""

import shutil
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.parity.test_policy import check_layouts
from tests.support.checkpoint_world import DIVIDED, DIVIDED_TWICE, EXPERTS
from tests.support.hf_reference import HfReference, relative_error
from tests.support.merge_checks import run_merge

pytestmark = pytest.mark.timeout(900)
ALONE = ["1,1,1,0,none,moe"]
TWO_PROCESSES = ["2,1,1,1,none,moe", "1,2,1,0,full,moe", "1,1,1,0,none,ep2,moe"]
LONG = {
    2: ["1,1,1,0,selective,moe", "2,1,1,1,selective,0.1,moe"],
    4: ["4,1,1,1,full,moe", "2,2,1,1,none,moe", "2,1,1,1,full,moe", "1,2,2,0,selective,moe", "2,2,2,1,full,moe",
        "2,1,1,1,none,ep2,moe", "1,2,1,0,full,ep2,moe", "1,2,2,0,selective,ep2,moe", "1,1,1,0,selective,ep2,0.1,moe",
        "1,1,1,0,full,ep4,moe"],
}  # fmt: skip
"""Layouts of the test marked long. Four processes with tp 1 and pp 1 are four replicas."""


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


READ = {EXPERTS: ("dp2", "ep2"), DIVIDED: ("ep2", "tp2_sp", "pp2")}
"""Layouts of two processes that read the checkpoints written with tp 2 and with ep 2."""


def test_a_checkpoint_is_read_with_another_layout(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Weights and optimizer state written with tp 2 or ep 2 are read bit for bit with other layouts,
    and the next update is that of the unbroken run. They are what Megatron's own gather collects.
    The merger writes the weights as a Hugging Face folder.
    """
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    out = tmp_path / "out"
    out.mkdir()
    reads = [f"read:{name}:{layout}" for name, layouts in READ.items() for layout in layouts]
    torchrun(2, SUPPORT / "checkpoint_world.py", tmp_path / "moe", out, f"write:{EXPERTS}", f"write:{DIVIDED}", *reads)
    check_checkpoints(out, READ)
    shutil.copytree(tmp_path / "moe", out / DIVIDED / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    assert run_merge(out / DIVIDED, tmp_path / "merged") == 0
    merged, weights = HfTensors(tmp_path / "merged"), load_result(out, DIVIDED)["weights"]
    assert merged.specs.keys() == weights.keys() and all(torch.equal(merged.read(name), tensor) for name, tensor in weights.items())
    exact, unbroken = load_result(out, f"{DIVIDED}_at_ep2"), load_result(out, DIVIDED)
    assert all(torch.equal(change, exact["change"][key]) for key, change in unbroken["change"].items())
    assert (exact["loss"], exact["grad_norm"], exact["noise"]) == (unbroken["loss"], unbroken["grad_norm"], unbroken["noise"])


@pytest.mark.long
def test_a_checkpoint_of_both_parallelisms_is_read(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """The same with tp 2 and ep 2 at once, in four processes."""
    make_checkpoint(tmp_path / "moe", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    read, out = {DIVIDED_TWICE: ("tp2_ep2", "ep2", "tp2_sp", "pp2")}, tmp_path / "out"
    out.mkdir()
    reads = [f"read:{DIVIDED_TWICE}:{layout}" for layout in read[DIVIDED_TWICE]]
    torchrun(4, SUPPORT / "checkpoint_world.py", tmp_path / "moe", out, f"write:{DIVIDED_TWICE}", *reads)
    check_checkpoints(out, read)


def load_result(out: Path, name: str) -> dict:
    return torch.load(out / f"{name}.pt", weights_only=True)


def check_checkpoints(out: Path, read: dict[str, tuple[str, ...]]) -> None:
    """Check checkpoints, keyed by variant, that were read with the given layouts."""
    for name, layouts in read.items():
        unbroken = load_result(out, name)
        assert not any(unbroken["unlike"]) and max(unbroken["gathered"]) > 30
        for layout in layouts:
            again = load_result(out, f"{name}_at_{layout}")
            assert not again["different"]
            num_keys = sum("mlp.experts.linear_fc" in key for key in again["keys"])
            assert num_keys == 3 * 2 * 4, "weights and three states in three sparse layers"
            assert max(relative_error(again["change"][key], change) for key, change in unbroken["change"].items()) <= 1e-5


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Data parallelism, interleaved pipelines, tp 4, small buckets and recomputation agree as well."""
    hf = {"moe": write_model(tmp_path, layers=8)}
    check_layouts({1: ALONE, **LONG}, tmp_path, hf, tmp_path, torchrun)
