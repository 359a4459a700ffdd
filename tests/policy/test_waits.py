"""Where the host waits for the device: nowhere in a layer, once a micro-batch, six times an update, counted on a device that is not there.

And that a wait which somebody brings back is seen.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import SUPPORT
from tools.data.make_tiny_qwen2_5_vl import make_checkpoint

MICRO_BATCH = {"nonzero in network.py": 1}
"""Which rows were sampled. The pictures' patches are pinned and take their turn."""
UPDATE = {
    "item in finalize_model_grads.py": 1,
    "tolist in loss_metrics.py": 1,
    "item in network.py": 2,
    "to meta in utils.py": 1,
    "item in clip_grads.py": 1,
}
"""Whether there were tokens, all numbers of the loss, whether gradient and weights are finite, and the norm, there and back."""
PARAMETERS = "item in utils.py"
"""Megatron's norm asks for each parameter's where neither Transformer Engine nor apex is installed (0.16.1, local_multi_tensor_l2_norm):
after the backward pass, once an update."""
CASES = [
    # blocks of each tower, tensor-parallel size, recomputation, rank of adapters, micro-batches, a planted mistake
    "2,1,none,0,1,none", "4,1,none,0,1,none", "2,1,none,0,3,none", "4,2,none,0,1,none", "4,2,full,4,1,none",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for blocks in (2, 4):
        make_checkpoint(folder / str(blocks), preset="nano", init="random", seed=1, layers=blocks, vision_depth=blocks)
    return folder


def waits(models: Path, out: Path, torchrun, *cases: str) -> dict[str, Counter[str]]:  # noqa: ANN001
    """By case: how often, by what and by the file that asked."""
    torchrun(1, SUPPORT / "fake_device.py", models, out, *cases)
    found = json.loads((out / "waits.json").read_text())
    counted = {case: Counter() for case in cases}
    for case, seen in found.items():
        for place, count in seen.items():
            what, *frames = place.split(" < ")
            counted[case][f"{what} in {frames[0].split(':')[0]}"] += count
    return counted


def test_the_host_waits_once_a_micro_batch_and_in_no_layer(models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """With pictures, a shared prompt, adapters, recomputation, a value head and sequence parallelism."""
    for case, counted in waits(models, tmp_path, torchrun, *CASES).items():
        assert counted.pop(PARAMETERS) > 10
        micro_batches = int(case.split(",")[4])
        assert counted == Counter(UPDATE) + Counter({place: micro_batches for place in MICRO_BATCH}), case


def test_a_wait_in_a_layer_is_seen(models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Of a norm that looks at its input, and of an index that stayed on the host: at least one for each of four layers."""
    allowed = sum(UPDATE.values()) + sum(MICRO_BATCH.values())
    for case, counted in waits(models, tmp_path, torchrun, "4,1,none,0,1,norm", "4,1,none,0,1,index").items():
        assert sum(counted.values()) - counted[PARAMETERS] >= allowed + 4, (case, counted)
