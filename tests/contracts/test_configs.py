"""Tests of configs/: every shipped YAML file composes into valid settings, every key in it takes
effect, and unknown keys are refused by name.
"""

import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm
from megatron_rl.cli.app import resolve_settings
from megatron_rl.config import Settings
from tests.conftest import ROOT

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
GIVEN = ["model.path=here", "run.dir=there", "task=number_line"]


def settings_of(*overrides: str) -> Settings:
    """Return the settings that launch/train.py composes from these overrides."""
    return deepcopy(compose_once(overrides))


@cache
def compose_once(overrides: tuple[str, ...]) -> Settings:
    """Compose settings, once per process for each list of overrides."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return resolve_settings(compose("train", overrides=list(overrides)))


def leaves(values: dict, prefix: str = "") -> dict[str, object]:
    """Flatten nested dicts to dotted keys: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def train(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes_and_its_values_arrive(experiment: str) -> None:
    chosen = leaves(asdict(settings_of(f"experiment={experiment}")))
    stored = yaml.safe_load((CONFIGS / "experiment" / f"{experiment}.yaml").read_text())
    own = OmegaConf.create({key: value for key, value in stored.items() if key != "defaults"})
    picked = leaves(OmegaConf.to_container(own, resolve=True))  # ${run.dir} refers to a key of the file itself
    assert picked
    for key, value in picked.items():
        assert chosen[key] == (float(value) if isinstance(chosen[key], float) else value), key


@pytest.mark.parametrize("task", [path.stem for path in (CONFIGS / "task").glob("*.yaml")])
def test_a_task_composes(task: str) -> None:
    """A file is named as its task, except for files that choose a gymnasium environment."""
    assert settings_of(*GIVEN, f"task={task}").task.name == {"sokoban": "gymnasium", "frozen_lake": "gymnasium"}.get(task, task)


@pytest.mark.parametrize("algo", [path.stem for path in (CONFIGS / "algo").glob("*.yaml")])
def test_an_algorithm_composes_and_its_values_arrive(algo: str) -> None:
    settings = settings_of(f"algo={algo}", *GIVEN)
    check_algorithm(settings.algo)
    chosen = leaves(asdict(settings))
    for key, value in leaves(yaml.safe_load((CONFIGS / "algo" / f"{algo}.yaml").read_text())).items():
        assert chosen[key] == (float(value) if isinstance(chosen[key], float) else value), key


def test_every_algorithm_has_a_preset() -> None:
    presets = {settings_of(f"algo={path.stem}", *GIVEN).algo.name for path in (CONFIGS / "algo").glob("*.yaml")}
    assert presets == set(ALGORITHMS)


def test_defaults_live_in_the_dataclasses() -> None:
    """Without an experiment, only the task's YAML sets values; every other group has the defaults
    of the dataclasses in megatron_rl/config.
    """
    plain = Settings()
    chosen = settings_of(*GIVEN)
    for room in ("parallel", "engine", "optim", "batch", "filter", "algo", "critic", "sft", "wandb"):
        assert asdict(chosen)[room] == asdict(plain)[room]
    assert (chosen.model.path, chosen.run.dir) == ("here", "there")


@pytest.mark.known_failure("flag-without-effect")
@pytest.mark.parametrize(
    "override", ["algo.groop_size=4", "+algo.groop_size=4", "+models.path=here", "optim.lr=fast", "experiment=nowhere"]
)
def test_what_is_no_key_or_no_value_is_refused_by_name(override: str) -> None:
    named = re.search(r"groop_size|models|fast|nowhere", override)[0]
    with pytest.raises((HydraException, ValueError), match=named):
        settings_of(*GIVEN, override)


def test_a_key_in_a_yaml_that_is_no_key_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "experiment"
    own.mkdir()
    (own / "mine.yaml").write_text("# @package _global_\nalgo:\n  groop_size: 4\n")
    with pytest.raises(HydraException, match="groop_size"):
        settings_of(*GIVEN, f"hydra.searchpath=[{tmp_path}]", "experiment=mine")


def test_cfg_job_shows_what_a_run_would_use() -> None:
    experiment = EXPERIMENTS[0]
    shown = leaves(yaml.safe_load(train(f"experiment={experiment}", "algo.clip_ratio_high=0.28", "--cfg", "job")))
    used = leaves(asdict(settings_of(f"experiment={experiment}", "algo.clip_ratio_high=0.28")))
    assert shown["algo.clip_ratio_high"] == 0.28
    assert shown.keys() == used.keys()
    for key, value in used.items():
        assert value == (float(shown[key]) if isinstance(value, float) else shown[key]), key  # YAML 1.1 reads 1e-06 as text
