"""A run whose numbers overflow ends with one error line and exit code 1.

The micro-batch that it trained on and the last checkpoint are kept.
"""

import re
from pathlib import Path

import torch

from megatron_rl.run.checkpoints import list_checkpoints, read_state
from tests.conftest import ROOT
from tests.support import fork_server

SMALL = (
    "task=number_line", "model.min_pixels=12000", "model.max_pixels=13000", "engine.kv_cache_mib=16", "task.max_turns=1",
    "task.max_new_tokens=16", "task.eval_samples=0", "batch.prompts_per_step=2", "batch.group_size=2", "algo.entropy_coef=0.1",
)  # fmt: skip


def test_a_learning_rate_of_a_million(random_model: Path, tmp_path: Path) -> None:
    """With a learning rate of 1e6 the run fails within 6 steps and names the step and the saved
    micro-batch. The checkpoint of the last successful step is complete.
    """
    folder = tmp_path / "run"
    own = (f"model.path={random_model}", f"run.dir={folder}", "optim.lr=1e6", "run.steps=6", "checkpoint.every=1", "checkpoint.keep_last=1")
    result = fork_server.run_script(ROOT / "launch" / "train.py", *SMALL, *own, timeout_s=240)
    assert result.returncode == 1, result.stdout
    (line,) = re.findall(r"^error: (.*)$", result.stdout, flags=re.MULTILINE)
    step = int(re.match(r"step (\d+), ", line)[1])
    assert 1 <= step < 6 and "not finite" in line and str(folder / "not_finite") in line, line
    kept = torch.load(folder / "not_finite" / f"step_{step:08d}_rank_0_micro_batch_0.pt", weights_only=True)
    assert kept["mask_T"].any() and kept["token_T"].shape == kept["advantage_T"].shape
    (newest,) = list_checkpoints(folder / "checkpoints")
    assert read_state(newest).step == step, "the last step that ended well is there, whole"
    assert not (folder / "final").exists() and not (folder / "eval.json").exists()
