"""An outage during the final evaluation costs only the evaluation.

The trained weights are saved, and the same command runs the evaluation again.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.checkpoints import list_checkpoints, read_state
from tests.conftest import SUPPORT
from tests.support import fork_server


def test_what_was_trained_is_saved(random_model: Path, tmp_path: Path) -> None:
    """The interrupted run saves its checkpoint and final model without an evaluation.

    Repeating the command adds the evaluation to both.
    """
    result = fork_server.run_script(SUPPORT / "failed_evaluation.py", random_model, tmp_path / "run", "down", timeout_s=240)
    told = "evaluation: 1 of 1 episodes failed, run.max_failed_fraction=0.1; first reason: the world is down"
    assert f"stopped at step 2 of 2; {told}; the same command resumes the run" in result.stdout, result.stdout
    run = tmp_path / "run"
    assert [step["step"] for step in read_metrics(run / "metrics.jsonl")] == [0, 1] and not (run / "eval.json").exists()
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    memory = read_state(checkpoint)
    assert (memory.step, memory.success) == (2, None)
    (trained,) = (run / "final").glob("*.safetensors")
    before, after = load_file(random_model / "model.safetensors"), load_file(trained)
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    again = fork_server.run_script(SUPPORT / "failed_evaluation.py", random_model, run, "up", timeout_s=240)
    assert again.returncode == 0, again.stdout
    memory, said = read_state(checkpoint), json.loads((run / "eval.json").read_text())
    assert (memory.step, memory.success) == (2, said["greedy_success"]), "the evaluation that was owed reaches its checkpoint"
