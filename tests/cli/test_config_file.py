"""`--config FILE`, configs/ in the current directory, and `--cfg diff`."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cli.config_file import expand_config_flags, format_override_value, read_config_file
from megatron_rl.cli.help import render_difference
from megatron_rl.config.task_options import NumberLineOptions
from megatron_rl.launcher.compose import compose_settings

FILE = """
experiment: numberline_grpo_cpu
algo: ppo
optim: {lr: 1e-4, schedule: cosine}
model.path: a b
task:
  data:
    train: [mine.jsonl, "it's"]
run: {dir: out, steps: 7}
task.stop_on_tool_error: true
"""


def test_a_file_sets_what_its_overrides_set(tmp_path: Path) -> None:
    """The file gives the settings of the same overrides on the command line, which wins."""
    (tmp_path / "mine.yaml").write_text(FILE)
    by_hand = compose_settings([
        "experiment=numberline_grpo_cpu", "algo=ppo", "optim.lr=1e-4", "optim.schedule=cosine", "model.path='a b'",
        """task.data.train=[mine.jsonl,"it's"]""", "run.dir=out", "run.steps=7", "task.stop_on_tool_error=true",
    ])  # fmt: skip
    assert compose_settings(read_config_file(tmp_path / "mine.yaml")) == by_hand
    assert by_hand.task.data.train == ["mine.jsonl", "it's"] and by_hand.optim.lr == 1e-4 and by_hand.algo.lam == 0.95
    for flags in (["--config", f"{tmp_path}/mine.yaml"], [f"--config={tmp_path}/mine.yaml"]):
        assert compose_settings(expand_config_flags(["run.steps=9", *flags])).run.steps == 9


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda each: st.lists(each, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(value=VALUES)
def test_every_value_is_read_back(value: object) -> None:
    """Hydra's parser reads the value of every override as the value in the file."""
    (override,) = OverridesParser.create().parse_overrides([f"run.dir={format_override_value(value)}"])
    assert override.value() == value and type(override.value()) is type(value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("- 1\n", "must contain a mapping of settings"),
        ("a: [\n", "is not a YAML file of settings"),
        ("defaults: [x]\n", "defaults: is not read; write groups as keys"),
        ("1: 2\n", "must contain a mapping of settings"),
    ],
)
def test_other_files_are_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ValueError, match=told):
        read_config_file(tmp_path / "mine.yaml")


@pytest.mark.parametrize("program", ["-c", "", "mine.py"])
def test_own_experiments_are_found_in_the_current_directory(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """configs/experiment/mine.yaml is experiment=mine. A file with the name of a built-in one does
    not replace it. `python -c` and notebooks have no script whose folder is searched first.
    """
    monkeypatch.setattr(sys, "argv", [program])
    folder = tmp_path / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [override /task: vqa]\nrun: {steps: 7}\n")
    (folder.parent / "train.yaml").write_text("run: {steps: 3}\n")
    monkeypatch.chdir(tmp_path)
    assert compose_settings(["experiment=mine", "model.path=x", "run.dir=y"]).run.steps == 7
    assert compose_settings(["model.path=x", "run.dir=y", "task=number_line"]).run.steps == 40


def test_steps_replace_the_epochs_of_a_recipe() -> None:
    """The command line wins over the recipe, and cannot have both."""
    assert compose_settings(["experiment=vqa_grpo_cpu"]).run.epochs == 8
    run = compose_settings(["experiment=vqa_grpo_cpu", "run.steps=3"]).run
    assert (run.steps, run.epochs) == (3, 0)
    assert compose_settings(["experiment=numberline_grpo_cpu", "run.epochs=2"]).run.epochs == 2
    with pytest.raises(ValueError, match=r"run.epochs=2: run.steps=3 is given, too"):
        compose_settings(["experiment=vqa_grpo_cpu", "run.steps=3", "run.epochs=2"])


def test_the_difference_names_what_was_changed() -> None:
    """Each line is a setting and its default; values that equal their defaults are left out."""
    lines = render_difference(["experiment=numberline_grpo_cpu", "run.steps=40", "optim.lr=1e-3"]).splitlines()
    found = dict(line.split("    # default ") for line in lines)
    assert {key.strip(): default for key, default in found.items()} == {
        "model.path=runs/quickstart/sft/final": "???", "model.min_pixels=19600": "3136", "model.max_pixels=20000": "1003520",
        "optim.lr=0.001": "1e-06", "batch.prompts_per_step=24": "32", "run.dir=runs/quickstart/grpo": "???",
        "task.name=number_line": "???", "task.max_new_tokens=48": "512", "task.eval_samples=8": "0",
    } | {f"task.options.{key}={value}": "none" for key, value in asdict(NumberLineOptions()).items()}  # fmt: skip
    assert render_difference([]) == ""
