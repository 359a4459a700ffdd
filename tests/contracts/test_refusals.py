"""Settings that do not fit the model, the machine or the number of processes are refused before any process talks to another."""

import re
from pathlib import Path

import pytest

from megatron_rl.choices import build_task, check
from tests.contracts.test_configs import settings_of

MISFITS = {  # override: (processes, remedy); the random nano has 4 heads, 2 key/value heads, 4 layers
    "parallel.tp=3": (3, "does not divide the model's 4 attention heads; use one of 1, 2"),
    "parallel.tp=4": (4, "does not divide the model's 2 key/value heads; use one of 1, 2"),
    "parallel.pp=3": (3, "must divide the model's 4 layers"),
    "engine.tp=2": (3, "must divide the 3 processes"),
    "engine.tp=4": (4, "does not divide the model's 2 key/value heads"),
    "engine.device=cuda": (1, "this machine has no usable GPU; use engine.device=auto"),
}


@pytest.mark.parametrize("override", MISFITS)
def test_a_misfit_is_told_with_its_key_and_what_to_do(override: str, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    num_processes, remedy = MISFITS[override]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{override}: {remedy}')}$"):
        check(settings_of(f"model.path={random_model}", "run.dir=there", override), num_processes)


def test_a_frozen_part_beside_adapters(random_model: Path) -> None:
    remedy = r"^model.frozen=\['vision'\]: with lora.rank the whole base is frozen; choose what is trained by lora.targets$"
    with pytest.raises(ValueError, match=remedy):
        check(settings_of(f"model.path={random_model}", "run.dir=there", "model.frozen=[vision]", "lora.rank=8"), 1)


def test_what_fits_is_not_refused(random_model: Path) -> None:
    check(settings_of(f"model.path={random_model}", "run.dir=there", "parallel.tp=2", "parallel.pp=2", "engine.tp=2"), 8)


def test_a_layout_needs_its_processes(random_model: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel.tp\*parallel.pp=4: must divide the 6 processes; start torchrun with --nproc_per_node"):
        check(settings_of(f"model.path={random_model}", "run.dir=there", "parallel.tp=2", "parallel.pp=2"), 6)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model.path={tmp_path}: .*give a Hugging Face model folder"):
        check(settings_of(f"model.path={tmp_path}", "run.dir=there"), 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^model.path={tmp_path}: config.json is damaged"):
        check(settings_of(f"model.path={tmp_path}", "run.dir=there"), 1)


def test_a_task_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"^task.name=chess: no such task; choose one of .*number_line"):
        build_task(settings_of("model.path=here", "run.dir=there", "task.name=chess").task)
