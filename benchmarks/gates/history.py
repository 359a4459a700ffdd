"""Histories of recipes: one JSON file each, with the figures of every recorded run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from benchmarks.gates.figures import FIGURES, Band, compute_band, compute_figures
from benchmarks.gates.recipes import RECIPES
from megatron_rl.config import require, require_choice
from megatron_rl.io.jsonl import read_json, write_bytes_atomically
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics

FOLDER = Path(__file__).resolve().parent


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedRun:
    """Figures of one run, and where they come from."""

    date: str
    machine: str
    commit: str
    seed: int
    figures: dict[str, float]


@dataclass(slots=True, frozen=True, kw_only=True)
class Finding:
    """A figure of a run with its band."""

    name: str
    value: float
    band: Band

    @property
    def is_inside(self) -> bool:
        """True if the figure lies in its band."""
        return self.band.contains(self.value)


def history_path(recipe: str, folder: Path = FOLDER) -> Path:
    """Return the path of a recipe's history.

    Raises:
        ValueError: there is no such recipe.
    """
    require_choice("RECIPE", recipe, tuple(RECIPES))
    return folder / f"{recipe}.json"


def load_history(path: Path) -> list[RecordedRun]:
    """Return the recorded runs; none if the file does not exist.

    Raises:
        ValueError: a run lacks a field or a figure, or has an unknown one.
    """
    if not path.exists():
        return []
    runs = []
    for number, entry in enumerate(read_json(path)["runs"]):
        try:
            run = RecordedRun(**entry)
        except TypeError as error:
            raise ValueError(f"{path} run {number}: {error}") from error
        if set(run.figures) != set(FIGURES):
            raise ValueError(f"{path} run {number}: figures {sorted(run.figures)} must be {sorted(FIGURES)}; record the run again")
        runs.append(run)
    return runs


def append_run(path: Path, run: RecordedRun) -> int:
    """Add a run to a history and return the number of its runs.

    Raises:
        ValueError: a figure is not finite, or the same run is in the history.
    """
    for name, value in run.figures.items():
        require(math.isfinite(value), name, value, "not finite: a run that failed is not an example of the recipe")
    runs = load_history(path)
    for known in runs:
        require(known != run, "run", f"{run.commit} seed {run.seed}", "already in the history")
    rows = [asdict(each) for each in (*runs, run)]
    write_bytes_atomically(path, (json.dumps({"recipe": path.stem, "runs": rows}, indent=1) + "\n").encode())
    return len(rows)


def read_run_figures(run: Path, recipe: str) -> dict[str, float]:
    """Return the figures of a run directory.

    Raises:
        ValueError: the run has not the recipe's number of steps, or its metrics cannot be used.
    """
    steps = read_metrics(run / METRICS_FILE)
    num_steps = sum("reward/mean" in line for line in steps)
    expected = RECIPES[recipe].num_steps
    require(num_steps == expected, str(run), f"{num_steps} steps", f"a run of {recipe} has {expected} steps")
    return compute_figures(steps)


def read_seed(run: Path) -> int:
    """Return the seed in a run's resolved settings."""
    return int(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["run"]["seed"])


def compare(figures: Mapping[str, float], history: list[RecordedRun]) -> list[Finding]:
    """Return every figure of a run with its band."""
    return [
        Finding(name=name, value=value, band=compute_band(name, [run.figures[name] for run in history])) for name, value in figures.items()
    ]
