"""Tests the choice of a run's model. tests/e2e/test_agent_run.py loads models of a real run."""

from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_rl.run.checkpoint_state import CheckpointState, write_state
from megatron_rl.run.saved_model import find_saved_model


def make_run(folder: Path, scores: dict[int, float | None], *, has_final: bool) -> Path:
    (folder / "config.yaml").write_text("{run: {steps: 9}}")
    for step, success in scores.items():
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        for name in ("hf", "run"):
            (checkpoint / name).mkdir(parents=True)
        (checkpoint / "hf" / "config.json").write_text("{}")
        write_state(checkpoint / "run" / "state.json", asdict(CheckpointState(step=step, success=success, settings={"of": step})))
    if has_final:
        (folder / "final").mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / "final" / name).write_text("{}")
    return folder


def test_which_model_is_found(tmp_path: Path) -> None:
    """The final model is the default. Of two equally good checkpoints, the later one is the best.
    A checkpoint has settings of its own."""
    run = make_run(tmp_path, {1: 0.9, 2: 0.9, 4: None, 7: 0.1}, has_final=True)
    found = {name: find_saved_model(run, checkpoint=name) for name in ("", "final", "last", "best", "1")}
    assert [model.weights.name for model in found.values()] == ["final", "final", "step_00000007", "step_00000002", "step_00000001"]
    assert [model.settings for model in found.values()] == [{"run": {"steps": 9}}] * 2 + [{"of": step} for step in (7, 2, 1)]
    assert [model.hf_folder.name for model in found.values()] == ["final", "final", "hf", "hf", "hf"]
    assert find_saved_model(run / "final") == found["final"]
    assert find_saved_model(found["best"].weights) == found["best"]


def test_the_newest_checkpoint_of_an_unfinished_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, {1: None, 2: None}, has_final=False)
    assert find_saved_model(run).weights.name == "step_00000002"
    with pytest.raises(ValueError, match=r"^--checkpoint=best: no checkpoint was evaluated"):
        find_saved_model(run, checkpoint="best")
    with pytest.raises(ValueError, match=r"^--checkpoint=final: .*final/config.json is missing; use --checkpoint last$"):
        find_saved_model(run, checkpoint="final")
    (run / "checkpoints" / "step_00000002" / "run" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step_00000002: damaged: "):
        find_saved_model(run)
    (run / "checkpoints" / "step_00000001" / "hf" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"step_00000001: damaged: hf/config.json is missing"):
        find_saved_model(run, checkpoint="1")


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, {}, has_final=True)
    (run / "config.yaml").write_text("[")
    with pytest.raises(ValueError, match=r"config.yaml: ") as raised:
        find_saved_model(run)
    assert "\n" not in str(raised.value)
