"""Finds the model of a run: the final one, or that of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import require
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.checkpoint_state import read_state
from megatron_rl.run.paths import CHECKPOINTS_FOLDER, CONFIG_FILE, FINAL_FOLDER, list_checkpoints, step_name, step_of
from megatron_rl.weights.formats.digests import STATE
from megatron_rl.weights.formats.open_checkpoint import find_hf_folder
from megatron_rl.weights.formats.safetensors_folder import find_missing_file

FINAL, LAST, BEST = "final", "last", "best"


@dataclass(slots=True, frozen=True, kw_only=True)
class SavedModel:
    """Model of a run."""

    weights: Path
    """Folder with the weights, in any format."""
    hf_folder: Path
    """Folder with config, tokenizer and processor."""
    settings: Mapping[str, Any]
    """Settings of the run, as in config.yaml."""


def find_saved_model(folder: Path, *, checkpoint: str = "") -> SavedModel:
    """Return the model of a run.

    Args:
        folder: Run directory, its folder final/, or one of its checkpoints.
        checkpoint: Model of a run directory: `final`, `last` (the newest checkpoint), `best` (the
            checkpoint with the highest greedy success) or a number of steps; "" for the final
            model, or the newest checkpoint if there is none.

    Raises:
        ValueError: There is no such run, or no such model.
    """
    require(folder.is_dir(), "RUN", folder, "no such folder; give the run.dir of a run, or one of its checkpoints")
    is_checkpoint = (folder / STATE).is_file()
    is_final = folder.name == FINAL_FOLDER and (folder.parent / CONFIG_FILE).is_file()
    if not (is_checkpoint or is_final):
        return _find_in_run(folder, checkpoint)
    remedy = f"selects a model of a run directory, but {folder} is a model itself; remove this option"
    require(not checkpoint, "--checkpoint", checkpoint, remedy)
    return _open_checkpoint(folder) if is_checkpoint else _open_final(folder.parent)


def _find_in_run(run: Path, wanted: str) -> SavedModel:
    require((run / CONFIG_FILE).is_file(), "RUN", run, f"contains no run: {CONFIG_FILE} is missing; give the run.dir of a run")
    checkpoints = list_checkpoints(run / CHECKPOINTS_FOLDER)
    missing = find_missing_file(run / FINAL_FOLDER)
    if wanted == FINAL or (not wanted and not missing):
        require(not missing, "--checkpoint", FINAL, f"{run / FINAL_FOLDER / missing} is missing; use --checkpoint last")
        return _open_final(run)
    remedy = f"has no model yet: neither {FINAL_FOLDER}/ nor {CHECKPOINTS_FOLDER}/; the run saves one every checkpoint.every steps"
    require(bool(checkpoints), "RUN", run, remedy)
    if wanted in ("", LAST):
        return _open_checkpoint(checkpoints[-1])
    if wanted == BEST:
        scores = [(success, step_of(each), each) for each in checkpoints if (success := read_state(each).success) is not None]
        require(bool(scores), "--checkpoint", BEST, "no checkpoint was evaluated (run.eval_every); use final, last or a number of steps")
        return _open_checkpoint(max(scores)[2])
    found = {step_of(each): each for each in checkpoints}
    known = ", ".join(map(str, found))
    require(wanted.isdecimal(), "--checkpoint", wanted, f"choose one of {FINAL}, {LAST}, {BEST}, or a number of steps ({known})")
    remedy = f"{run / CHECKPOINTS_FOLDER / step_name(int(wanted))} does not exist; choose one of {known}"
    require(int(wanted) in found, "--checkpoint", wanted, remedy)
    return _open_checkpoint(found[int(wanted)])


def _open_checkpoint(folder: Path) -> SavedModel:
    hf = find_hf_folder(folder)
    if hf is None:
        raise ValueError(f"{folder}: damaged: hf/config.json is missing; copy the whole checkpoint")
    return SavedModel(weights=folder, hf_folder=hf, settings=read_state(folder).settings)


def _open_final(run: Path) -> SavedModel:
    try:
        settings = read_settings(run / CONFIG_FILE)
    except ValueError as error:
        raise ValueError(f"{run / CONFIG_FILE}: {' '.join(str(error).split())[:300]}") from error
    return SavedModel(weights=run / FINAL_FOLDER, hf_folder=run / FINAL_FOLDER, settings=settings)
