"""Table and plot of all runs in a sweep or a directory (launch/sweep_report.py)."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.launcher.sweep_file import read_sweep
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics
from megatron_rl.observe.plot import RETURN_METRIC
from megatron_rl.observe.sweep_plot import SweepCurve, plot_sweep
from megatron_rl.run.status import RunState, RunStatus, read_status

HIDDEN_KEYS = ("run.dir",)
TABLE_WIDTH = 200
"""Width of the table in columns when the output is not a terminal."""


@dataclass(slots=True, frozen=True)
class SweepRow:
    """Name, parameters and status of one run."""

    name: str
    parameters: Mapping[str, str]
    status: RunStatus


def success_interval(evaluation: Mapping[str, float], kind: str) -> tuple[float, float] | None:
    """Return the confidence interval of the success rate, or None if it cannot be computed.

    `kind` is "greedy" or "sampled". There is no interval if the examples are not a random sample
    (evaluation/in_run.py).
    """
    num = evaluation.get(f"{kind}_episodes")
    return None if num is None else wilson_interval(evaluation[f"{kind}_success"], int(num))


def load_rows(place: Path) -> list[SweepRow]:
    """Return one row per task of a sweep's YAML file, or per run in a directory of runs.

    Raises:
        ValueError: `place` does not exist or contains no runs.
    """
    if place.is_file():
        return [SweepRow(str(task.index), task.parameters, read_status(task.folder)) for task in read_sweep(place).tasks]
    if not place.is_dir():
        raise ValueError(f"{place}: no such file or folder; give the YAML file of a sweep, or a folder of runs")
    runs = [read_status(folder) for folder in sorted(place.iterdir()) if folder.is_dir()]
    runs = [seen for seen in runs if seen.state is not RunState.WAITING]
    if not runs:
        raise ValueError(f"{place}: contains no run; give the YAML file of a sweep, or the folder that contains its run directories")
    differing = [key for key in runs[0].settings if key not in HIDDEN_KEYS and len({str(seen.settings.get(key)) for seen in runs}) > 1]
    return [SweepRow(seen.folder.name, {key: str(seen.settings.get(key, "")) for key in differing}, seen) for seen in runs]


def format_cells(row: SweepRow, keys: Sequence[str]) -> list[str]:
    """Return the table cells of one run."""
    seen = row.status
    shares = [format_success(seen.evaluation, kind) for kind in ("greedy", "sampled")]
    steps = f"{seen.step}/{seen.num_steps}" if seen.num_steps else ""
    return [row.name, *(row.parameters.get(key, "") for key in keys), *shares, steps, f"{seen.train_hours:.2f}", seen.state.value]


def format_success(evaluation: Mapping[str, float], kind: str) -> str:
    """Return the success rate with its confidence interval. Example: `83.3% (66.4-92.7)`."""
    if f"{kind}_success" not in evaluation:
        return ""
    found = success_interval(evaluation, kind)
    return f"{evaluation[f'{kind}_success']:.1%}" + (f" ({100 * found[0]:.1f}-{100 * found[1]:.1f})" if found else "")


def print_table(rows: Sequence[SweepRow], console: Console) -> None:
    """Print the table, the error of each failed run, and the number of runs in each state."""
    keys = list(dict.fromkeys(key for row in rows for key in row.parameters))
    table = Table()
    for header in ("run", *keys, "greedy", "sampled", "steps", "hours", "state"):
        table.add_column(to_printable(header), overflow="fold")
    for row in rows:
        table.add_row(*map(to_printable, format_cells(row, keys)))
    console.print(table, markup=False)
    for row in rows:
        if row.status.error:
            line = f"{to_printable(f'{row.name}: {row.status.error}')}  ({to_printable(str(row.status.folder))})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = {state: sum(row.status.state is state for row in rows) for state in RunState}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count), highlight=False)


def make_curve(row: SweepRow) -> SweepCurve:
    """Return a run's curve for the plot: the mean return per step, and the final success rate."""
    path, evaluation = row.status.folder / METRICS_FILE, row.status.evaluation
    steps = [line for line in read_metrics(path) if RETURN_METRIC in line and math.isfinite(line[RETURN_METRIC])] if path.is_file() else []
    told = " ".join(f"{key}={value}" for key, value in row.parameters.items())
    return SweepCurve(
        label=f"{row.name}: {told}" if told else row.name, steps=[int(line["step"]) + 1 for line in steps],
        returns=[line[RETURN_METRIC] for line in steps], success=evaluation.get("greedy_success"), interval=success_interval(evaluation,
        "greedy"),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="sweep_report.py", description="Print and plot all runs of a sweep.")
    parser.add_argument("place", type=Path, metavar="SWEEP.YAML", help="YAML file of a sweep, or folder of run directories")
    parser.add_argument("--out", type=Path, metavar="PNG", help="file for the plot (default: sweep.png in the folder of the runs)")
    options = parser.parse_args(arguments)
    try:
        rows = load_rows(options.place)
        print_table(rows, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
        if any(row.status.step for row in rows):
            out = options.out or rows[0].status.folder.parent / "sweep.png"
            plot_sweep([make_curve(row) for row in rows], out)
            print(out)
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
