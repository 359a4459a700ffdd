"""Short runs with images and two turns, in which the engine chooses experts by other logits than
the trainer.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.rollout_store import read_rollouts, step_path
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT

GAP, SHARES = "rollout_mismatch/logprob_abs_diff_max", ("routing_replay/token_layer_diff_fraction", "routing_replay/token_diff_fraction")


def write_model(folder: Path) -> Path:
    make_checkpoint(folder / "model", family="qwen3_vl_moe", init="random", seed=1, vision_depth=2)
    return folder / "model"


def run_steps(torchrun: Callable[..., str], model: Path, folder: Path, *arguments: object, ranks: int = 1) -> list[dict[str, float]]:
    torchrun(ranks, SUPPORT / "routing_run.py", model, folder, *arguments)
    return [step for step in read_metrics(folder / "metrics.jsonl") if "grad_norm" in step]


def test_replayed_experts_are_those_of_the_engine(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With algo.routing_replay=rollout, the logprobs of engine and trainer agree in both
    steps, with
    old logprobs and two updates in each. A replay of the recorded rollouts has the same metrics.
    """
    model = write_model(tmp_path)
    steps = run_steps(torchrun, model, tmp_path / "run", "rollout", 1)
    assert len(steps) == 2 and all(step[GAP] <= 1e-4 and step["grad_norm"] > 0 and step["rollout/failed"] == 0 for step in steps)
    assert all(step[SHARES[1]] > 0.9 and 0.5 < step[SHARES[0]] < step[SHARES[1]] for step in steps)
    recorded = read_rollouts(step_path(tmp_path / "run" / "rollouts", 1))
    assert all(len(context.routed_experts) >= context.loss_mask.index(1) for rollout in recorded for context in rollout.sequences)
    again = run_steps(torchrun, model, tmp_path / "again", "rollout", 1, tmp_path / "run" / "rollouts")
    names = ("loss", "grad_norm", "policy/kl_ref", GAP, *SHARES)
    assert len(again) == 2
    for one, other in zip(steps, again, strict=True):
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("replay", "ranks", "engine_tp"), [("rollout", 2, 1), ("rollout", 2, 2), ("policy", 1, 1), ("policy", 2, 1), ("none", 1, 1)]
)
def test_other_settings(replay: str, ranks: int, engine_tp: int, torchrun: Callable[..., str], tmp_path: Path) -> None:
    """With tensor and sequence parallelism, the experts of two engines, and those of one engine on
    both ranks, are replayed as well. Without them, the logprobs differ by more than 0.1. The
    experts of the trainer's own pass differ from those of the second of two updates only.
    """
    steps = run_steps(torchrun, write_model(tmp_path), tmp_path / "run", replay, engine_tp, ranks=ranks)
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert all(step[GAP] <= 1e-4 if replay == "rollout" else step[GAP] >= 0.1 for step in steps)
    assert all((SHARES[0] in step) == (replay != "none") for step in steps)
    if replay == "policy":
        assert all(0 < step[SHARES[0]] <= step[SHARES[1]] <= 0.5 for step in steps)
        assert all(step["policy/first_ratio"] == pytest.approx(1, abs=1e-5) for step in steps)
