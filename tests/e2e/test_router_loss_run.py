"""Short supervised runs of a model with experts, with losses of its routers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT

NAMES = ("router/aux_loss", "router/z_loss")


def run_steps(torchrun: Callable[..., str], folder: Path, aux: float, z: float) -> list[dict[str, float]]:
    torchrun(1, SUPPORT / "router_loss_run.py", folder / "model", folder / f"{aux}_{z}", aux, z)
    return [step for step in read_metrics(folder / f"{aux}_{z}" / "metrics.jsonl") if "grad_norm" in step]


@pytest.mark.long
def test_the_losses_of_routers_fall(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """In a run in which both losses dominate, the z loss falls in every step. The load-balancing loss
    loses half of its distance from its smallest value, the number of experts of a token.
    """
    make_checkpoint(tmp_path / "model", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    steps = run_steps(torchrun, tmp_path, 10.0, 1.0)
    balance, z = ([step[name] for step in steps] for name in NAMES)
    assert len(steps) == 4 and z == sorted(set(z), reverse=True)
    assert 2 < balance[-1] < 2 + (balance[0] - 2) / 2
    assert steps[0]["loss"] < 20 < 10.0 * balance[0], "the loss of the tokens is reported without them"


@pytest.mark.long
def test_a_run_without_them_has_no_such_metrics(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """Without coefficients, neither loss is computed; with one of them, the other is not."""
    make_checkpoint(tmp_path / "model", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    for coefs in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.1)):
        steps = run_steps(torchrun, tmp_path, *coefs)
        assert len(steps) == 4 and all([name in step for name in NAMES] == [coef > 0 for coef in coefs] for step in steps)
