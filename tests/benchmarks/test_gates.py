"""Learning gates. Oracles: bands computed by hand with a quantile from a printed table, the
coverage of simulated histories, planted faults, and the figures of a recorded run computed with
pandas.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

from benchmarks.gates import history
from benchmarks.gates.__main__ import main
from benchmarks.gates.figures import FIGURES, compute_band, compute_figures
from benchmarks.gates.recipes import RECIPES
from megatron_rl.config import Settings
from megatron_rl.io.jsonl import to_json_line
from megatron_rl.observe.metrics import read_metrics
from tests.conftest import ROOT
from tests.contracts.test_configs import settings_of

RECORDED = ROOT / "benchmarks" / "recorded_runs" / "numberline_grpo_cpu"
T_995_2, T_995_4 = 9.925, 4.604
"""Quantiles 0.995 of Student's t for 2 and 4 degrees of freedom, from a printed table."""
NUM_STEPS = RECIPES["quickstart"].num_steps
Steps = list[dict[str, float]]


def steps_like(seed: int) -> Steps:
    """Return metrics of a run that learns, with noise."""
    dice = np.random.default_rng(seed)
    return [
        {
            "step": step,
            "reward/mean": -1 + 2 * step / NUM_STEPS + dice.normal(0, 0.02),
            "policy/entropy": 0.4 * math.exp(-step / 30) * math.exp(dice.normal(0, 0.05)),
            "rollout_mismatch/logprob_abs_diff_max": 3e-6 * math.exp(dice.normal(0, 0.1)),
            "time/total": 2.0 * math.exp(dice.normal(0, 0.1)),
        }
        for step in range(NUM_STEPS)
    ]


def write_run(folder: Path, steps: Steps, *, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(to_json_line(line) + "\n" for line in steps))
    (folder / "config.yaml").write_text(f"run:\n  seed: {seed}\n")
    return folder


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Record three runs of the quickstart into an empty history and return its folder."""
    folder = tmp_path / "histories"
    folder.mkdir()
    monkeypatch.setattr("benchmarks.gates.__main__.history_path", lambda recipe: history.history_path(recipe, folder))
    for seed in range(3):
        run = write_run(tmp_path / f"run{seed}", steps_like(seed), seed=seed)
        assert main(["record", str(run), "quickstart", "--commit", f"0123456{seed}"]) == 0
    assert capsys.readouterr().out.splitlines() == ["quickstart: 1 runs", "quickstart: 2 runs", "quickstart: 3 runs"]
    return folder


def test_a_band_is_a_prediction_interval() -> None:
    """Rewards 0, 1 and 2 have the mean 1 and the standard deviation 1, so the half-width is t times
    the root of 4/3. For equal runs, it is the floor. Logarithms make factors of it. Times and
    mismatches have fixed factors."""
    half = T_995_2 * math.sqrt(4 / 3)
    band = compute_band("reward_last", [0.0, 1.0, 2.0])
    assert (band.low, band.high) == pytest.approx((1 - half, 1 + half), rel=1e-3)
    band = compute_band("reward_last", [0.5, 0.5, 0.5])
    assert (band.low, band.high) == pytest.approx((0.4, 0.6), abs=1e-12)
    logs = [0.0, 0.06, 0.12, 0.18, 0.24]
    half = T_995_4 * 0.06 * math.sqrt(2.5) * math.sqrt(1.2)
    band = compute_band("entropy_first", [math.exp(each) for each in logs])
    assert (math.log(band.low), math.log(band.high)) == pytest.approx((0.12 - half, 0.12 + half), rel=1e-3)
    band = compute_band("entropy_first", [0.01, 1.0, 100.0])
    assert (band.low, band.high) == pytest.approx((1 / 3, 3)), "the cap"
    for times in ([2.0, 2.0, 2.0], [0.02, 2.0, 200.0]):
        band = compute_band("step_seconds", times)
        assert (band.low, band.high) == pytest.approx((2 / 8, 2 * 8))
    band = compute_band("mismatch_max", [1e-6, 1e-6, 1e-6])
    assert band.low == -math.inf and band.high == pytest.approx(1e-5)


def test_bands_cover_as_often_as_they_claim() -> None:
    """99% of new runs of the same normal distribution lie inside, with histories of 3 and of 8
    runs, if the deviation is large compared with the floor. The tolerance is four standard errors.
    """
    dice, num_trials = np.random.default_rng(0), 4000
    for num in (3, 8):
        drawn = dice.normal(0, 50, size=(num_trials, num + 1))
        inside = sum(compute_band("reward_last", row[:-1].tolist()).contains(row[-1]) for row in drawn)
        assert inside / num_trials == pytest.approx(0.99, abs=4 * math.sqrt(0.99 * 0.01 / num_trials))


def test_figures_are_those_of_pandas() -> None:
    """The lines of a recorded run, of which the last has an evaluation and no rewards."""
    steps = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text().splitlines()]
    table = pandas.DataFrame(steps).dropna(subset=["reward/mean"])
    assert len(table) == NUM_STEPS == len(steps) - 1
    assert compute_figures(steps) == pytest.approx(
        {
            "reward_first": table["reward/mean"].head(12).mean(),
            "reward_last": table["reward/mean"].tail(12).mean(),
            "entropy_first": table["policy/entropy"].head(12).mean(),
            "entropy_last": table["policy/entropy"].tail(12).mean(),
            "mismatch_max": table["rollout_mismatch/logprob_abs_diff_max"].max(),
            "step_seconds": table["time/total"].median(),
        },
        rel=1e-12,
    )


FAULTS: dict[str, tuple[Callable[[dict[str, float]], dict[str, float]], set[str]]] = {
    "does not learn": (lambda line: {"reward/mean": -0.78}, {"reward_last"}),
    "starts from another warm start": (lambda line: {"reward/mean": 0.9 if line["step"] < 12 else line["reward/mean"]}, {"reward_first"}),
    "collapses": (lambda line: {"policy/entropy": line["policy/entropy"] / (1 + line["step"])}, {"entropy_first", "entropy_last"}),
    "explores without end": (lambda line: {"policy/entropy": 3.0}, {"entropy_first", "entropy_last"}),
    "differs from the engine in one step": (
        lambda line: {"rollout_mismatch/logprob_abs_diff_max": 1e-3 if line["step"] == 7 else 1e-6}, {"mismatch_max"},
    ),
    "is slow": (lambda line: {"time/total": 40.0}, {"step_seconds"}),
    "skips the work": (lambda line: {"time/total": 0.1}, {"step_seconds"}),
    "has one reward that is not a number": (lambda line: {"reward/mean": math.nan} if line["step"] == 49 else {}, {"reward_last"}),
    "has one mismatch that is not a number": (
        lambda line: {"rollout_mismatch/logprob_abs_diff_max": math.nan} if line["step"] == 3 else {}, {"mismatch_max"},
    ),
    "has one time that is not a number": (lambda line: {"time/total": math.nan} if line["step"] == 3 else {}, {"step_seconds"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_figure_and_band(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    """A run of another seed lies inside of all bands. With a planted fault, it lies outside of the
    bands that the fault concerns, and of no others."""
    change, named = FAULTS[fault]
    steps = steps_like(9)
    assert main(["check", str(write_run(tmp_path / "good", steps)), "quickstart"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "quickstart: inside of all bands"
    assert main(["check", str(write_run(tmp_path / "bad", [{**line, **change(line)} for line in steps])), "quickstart"]) == 1
    said = capsys.readouterr().out.splitlines()
    outside = {line.split()[1].rstrip(":") for line in said[:-1] if line.endswith(": OUTSIDE")}
    assert outside == named and all(" band " in line for line in said[:-1]) and len(said) == len(FIGURES) + 1
    assert set(said[-1].removeprefix("quickstart: outside of the band: ").split(", ")) == named


def test_small_mismatches_and_evaluation_lines_are_inside(recorded: Path, tmp_path: Path) -> None:
    steps = [{**line, "rollout_mismatch/logprob_abs_diff_max": 0.0} for line in steps_like(4)]
    run = write_run(tmp_path / "exact", [*steps, {"step": NUM_STEPS, "eval/greedy_success": 1.0}])
    assert main(["check", str(run), "quickstart"]) == 0


def said_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that ends with an error of one line, and return the line."""
    assert main([str(each) for each in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_errors_are_one_line(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "short", steps_like(0)[:-1])
    assert f"{run}=49 steps: a run of quickstart has 50 steps" in said_error(capsys, "check", run, "quickstart")
    few = write_run(tmp_path / "few", steps_like(0)[: RECIPES["numberline_short"].num_steps])
    assert "the history has 0 runs; record at least 3" in said_error(capsys, "check", few, "numberline_short")
    assert "RECIPE=chess: choose one of" in said_error(capsys, "check", run, "chess")
    assert "No such file" in said_error(capsys, "check", tmp_path / "nothing", "quickstart")
    without = [{name: value for name, value in line.items() if name != "policy/entropy"} for line in steps_like(0)]
    assert "step 0 has no policy/entropy" in said_error(capsys, "check", write_run(tmp_path / "without", without), "quickstart")


def test_a_failed_or_known_run_is_not_recorded(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (recorded / "quickstart.json").read_bytes()
    steps = [{**line, "reward/mean": math.nan} for line in steps_like(0)]
    assert "reward_first=nan: not finite" in said_error(
        capsys, "record", write_run(tmp_path / "failed", steps), "quickstart", "--commit", "01234560"
    )
    assert "already in the history" in said_error(capsys, "record", tmp_path / "run1", "quickstart", "--commit", "01234561")
    assert (recorded / "quickstart.json").read_bytes() == before


def test_a_history_has_date_machine_commit_and_seed(recorded: Path) -> None:
    runs = history.load_history(recorded / "quickstart.json")
    assert [run.seed for run in runs] == [0, 1, 2]
    for run in runs:
        assert len(run.date) == 10 and run.commit == f"0123456{run.seed}" and "cores" in run.machine
        assert run.figures == compute_figures(steps_like(run.seed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_histories_in_the_repository(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each recipe has at least three runs of different seeds, and they lie in their own bands."""
    runs = history.load_history(history.history_path(recipe))
    assert len({run.seed for run in runs}) == len(runs) >= 3
    for run in runs:
        assert all(finding.is_inside for finding in history.compare(run.figures, runs))
    assert main(["show"]) == 0
    assert f"{recipe}: {len(runs)} runs, {RECIPES[recipe].num_steps} steps" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_compose_and_have_their_number_of_steps(recipe: str) -> None:
    def composed(overrides: tuple[str, ...]) -> Settings:
        return settings_of(*[each.format(home="runs") for each in overrides])

    chosen = RECIPES[recipe]
    assert composed(chosen.overrides).run.steps == chosen.num_steps
    assert composed(chosen.warm_start).stage == "sft"


def test_ci_checks_the_quickstart() -> None:
    assert "python -m benchmarks.gates check runs/quickstart/grpo quickstart" in (ROOT / ".ci" / "run").read_text()


def test_the_recorded_quickstart_is_inside_unless_it_does_not_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run of 2026-11-27 that the documentation site shows is not in the history. The same run
    with the reward of its first step in every step lies outside."""
    assert main(["check", str(RECORDED), "quickstart"]) == 0, capsys.readouterr().out
    steps = read_metrics(RECORDED / "metrics.jsonl")
    frozen = [{**line, "reward/mean": steps[0]["reward/mean"]} if "reward/mean" in line else line for line in steps]
    assert main(["check", str(write_run(tmp_path / "frozen", frozen)), "quickstart"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "quickstart: outside of the band: reward_first, reward_last"
