"""The model folder at model.path is replaced between two starts of a run, which would change the
reference model of its KL term.
"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.run.checkpoint_state import read_state
from tests.conftest import ROOT
from tests.support import fork_server

RUN = (
    "task=number_line",
    "model.min_pixels=12000", "model.max_pixels=13000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.eval_samples=0",
    "batch.prompts_per_step=2", "batch.group_size=2", "algo.kl_coef=0.05", "checkpoint.every=1",
)  # fmt: skip


@pytest.mark.timeout(400)
def test_a_run_does_not_go_on_with_another_base(random_model: Path, tmp_path: Path) -> None:
    """The second start is refused before an engine is built, and the error contains both digests.

    Once the first model is back in place, the run resumes.
    """
    model, first, folder = tmp_path / "model", tmp_path / "first", tmp_path / "run"
    shutil.copytree(random_model, model)
    overrides = (*RUN, f"model.path={model}", f"run.dir={folder}")
    begun = fork_server.run_script(ROOT / "launch" / "train.py", *overrides, "run.steps=1", timeout_s=200)
    assert begun.returncode == 0, begun.stdout[-6000:]
    base = read_state(folder / "checkpoints" / "step_00000001").inputs.model
    shutil.copytree(model, first)
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    save_file({**tensors, name: -tensors[name]}, model / "model.safetensors", metadata={"format": "pt"})

    refused = fork_server.run_script(ROOT / "launch" / "train.py", *overrides, "run.steps=2", timeout_s=200)
    told = f"error: model.path={model}: contains a different model than at the start of the run: the digest of model.safetensors is "
    assert refused.returncode == 1 and told in refused.stdout, refused.stdout[-6000:]
    assert f", and was {base['model.safetensors']}; restore the original model, or choose another run.dir\n" in refused.stdout
    assert "resume: " not in refused.stdout, "that is said when it does"
    shutil.rmtree(model)
    first.rename(model)
    resumed = fork_server.run_script(ROOT / "launch" / "train.py", *overrides, "run.steps=2", timeout_s=200)
    assert resumed.returncode == 0, resumed.stdout[-6000:]
    assert f"resume: {folder}/checkpoints/step_00000001; changed since: run.steps=2 (was 1)\n" in resumed.stdout
