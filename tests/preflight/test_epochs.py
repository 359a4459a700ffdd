"""The number of steps that run.epochs results in."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest

from megatron_rl.config import BatchSettings, CriticSettings, RunSettings, Settings
from megatron_rl.preflight.check_report import CheckReport
from megatron_rl.preflight.doctor import check_epochs
from megatron_rl.preflight.run_checks import resolve_epochs
from megatron_rl.types import Example


class Questions:
    """Task with a given number of training examples and no other examples."""

    def __init__(self, num: int) -> None:
        self.num = num

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"train/{index}", payload={}) for index in range(self.num)] if split == "train" else []


@pytest.mark.parametrize(
    ("epochs", "examples", "prompts", "steps"),
    [(1.0, 100, 16, 7), (2.0, 80, 16, 10), (0.5, 100, 16, 4), (0.1, 30, 1, 3), (0.3, 10, 1, 3), (0.001, 10, 4, 1), (3.0, 7, 7, 3)],
)
def test_steps_by_hand(epochs: float, examples: int, prompts: int, steps: int) -> None:
    """The steps have at least as many prompts as the epochs, and one step less has fewer."""
    settings = Settings(run=RunSettings(dir="r", epochs=epochs, steps=9), batch=BatchSettings(prompts_per_step=prompts))
    found = resolve_epochs(settings, Questions(examples)).run
    assert (found.steps, found.epochs) == (steps, epochs)
    assert found.steps == max(1, ceil(Fraction(str(epochs)) * examples / prompts))


def test_the_doctor_reports_the_steps() -> None:
    """The doctor names the number of steps, or why the run is too short."""
    settings = Settings(run=RunSettings(dir="r", epochs=2), batch=BatchSettings(prompts_per_step=16))
    report = CheckReport()
    check_epochs(settings, report, task=Questions(80))
    assert report.findings == [("run.epochs", "2: 10 steps")]
    check_epochs(replace(settings, critic=CriticSettings(warmup_steps=10)), report, task=Questions(80))
    assert report.errors == ["critic.warmup_steps=10: leaves no training steps for the policy (run.steps=10)"]


def test_without_epochs_the_steps_stay() -> None:
    settings = Settings(run=RunSettings(dir="r", steps=9))
    assert resolve_epochs(settings, Questions(100)) is settings


def test_a_run_that_becomes_too_short_is_refused() -> None:
    """The checks of the number of steps apply to the steps that the epochs result in."""
    settings = Settings(run=RunSettings(dir="r", epochs=2, require_improvement=True), batch=BatchSettings(prompts_per_step=16))
    with pytest.raises(ValueError, match=r"run.steps=10: run.require_improvement"):
        resolve_epochs(settings, Questions(80))
    with pytest.raises(ValueError, match=r"critic.warmup_steps=10: leaves no training steps for the policy \(run.steps=10\)"):
        resolve_epochs(replace(settings, critic=CriticSettings(warmup_steps=10)), Questions(80))


def test_a_replay_has_no_epochs() -> None:
    with pytest.raises(ValueError, match=r"run.epochs=2: requires training examples"):
        RunSettings(dir="r", mode="replay", epochs=2)
