"""Number of times the host waits for the device, counted on a fake device: never in a layer, never
in a micro-batch, six times per update.

Also tests that a planted wait is detected.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT

UPDATE = {
    "item in finalize_model_grads.py": 1,
    "tolist in loss_metrics.py": 1,
    "item in network.py": 2,
    "to meta in utils.py": 1,
    "item in clip_grads.py": 1,
}
"""Waits of an update: whether there were tokens, all loss metrics, whether gradients and weights
are finite, and the gradient norm in both directions."""
PARAMETERS = "item in utils.py"
"""Without Transformer Engine and apex, Megatron's gradient norm waits for each parameter's norm
(0.16.1, local_multi_tensor_l2_norm), once per update after the backward pass."""
CASES = [
    # layers of decoder and vision tower, tp, recomputation, LoRA rank, micro-batches, planted bug
    pytest.param(["2,1,none,0,3,none", "4,2,full,4,1,none"], id="layers, micro-batches"),
    pytest.param(["2,1,none,0,1,none", "4,1,none,0,1,none", "4,2,none,0,1,none"], marks=pytest.mark.long, id="one at a time"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for blocks in (2, 4):
        make_checkpoint(folder / str(blocks), preset="nano", init="random", seed=1, layers=blocks, vision_depth=blocks)
    return folder


def waits(models: Path, out: Path, torchrun, *cases: str) -> dict[str, Counter[str]]:  # noqa: ANN001
    """Return for each case how often the host waited, by operation and calling file."""
    torchrun(1, SUPPORT / "fake_device.py", models, out, *cases)
    found = json.loads((out / "waits.json").read_text())
    counted = {case: Counter() for case in cases}
    for case, seen in found.items():
        for place, count in seen.items():
            what, *frames = place.split(" < ")
            counted[case][f"{what} in {frames[0].split(':')[0]}"] += count
    return counted


@pytest.mark.parametrize("cases", CASES)
def test_the_host_waits_in_no_micro_batch_and_in_no_layer(cases: list[str], models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """The host waits only for an update, whatever the number of micro-batches and layers: with
    images, a shared prompt, adapters, recomputation, a value head and sequence parallelism."""
    for case, counted in waits(models, tmp_path, torchrun, *cases).items():
        assert counted.pop(PARAMETERS) > 10
        assert counted == Counter(UPDATE), case


def test_a_wait_in_a_layer_is_seen(models: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """A planted wait in a layer is counted at least once for each of four layers.

    The bugs are a norm that reads its input on the host and an index that stays on the host.
    """
    allowed = sum(UPDATE.values())
    for case, counted in waits(models, tmp_path, torchrun, "4,1,none,0,1,norm", "4,1,none,0,1,index").items():
        assert sum(counted.values()) - counted[PARAMETERS] >= allowed + 4, (case, counted)
