"""Plots learning curves from metrics.jsonl: smoothed return per step, and success in evaluations.

    python -m megatron_rl.observe.plot RUN_DIR... [--out PNG]

With one run, the plot is saved as reward_curve.png in the run directory. With several runs, one
plot contains a labeled curve for each run.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_rl.io.bounded_files import to_printable
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics

CURVE_FILE = "reward_curve.png"
RETURN_METRIC = "reward/mean"
SUCCESS_METRIC = "eval/greedy_success"


def moving_average(values: Sequence[float], *, window: int) -> list[float]:
    """Return the centered moving average over an odd number (`window`) of values.

    Near both ends, fewer values are averaged. Example: [0, 3, 6] with window 3 -> [1.5, 3, 4.5].
    """
    assert window % 2 == 1, f"window {window} is not odd"
    half = window // 2
    slices = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in slices]


def plot_reward_curves(runs: Mapping[str, Path], out_png: Path, *, window: int = 5) -> None:
    """Plot several runs with return on the left axis and success on the right axis.

    Args:
        runs: maps the label of a run to the path of its metrics.jsonl.
        out_png: path of the plot.
        window: number of steps to average over.
    """
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    returns = figure.add_subplot()
    successes = returns.twinx()
    for number, (label, path) in enumerate(runs.items()):
        _plot_run(path, label=label, color=f"C{number}", returns=returns, successes=successes, window=window)
    returns.set_xlabel("step")
    returns.set_ylabel("mean return of the step's episodes")
    returns.grid(alpha=0.3)
    (handles, labels), (more_handles, more_labels) = returns.get_legend_handles_labels(), successes.get_legend_handles_labels()
    if successes.lines:
        successes.set_ylabel("greedy success")
        successes.set_ylim(-0.02, 1.04)
        successes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    else:
        successes.set_axis_off()
    returns.legend(handles + more_handles, labels + more_labels, loc="lower right", framealpha=0.9)
    partial = out_png.with_name(f".{out_png.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(out_png)


def _plot_run(path: Path, *, label: str, color: str, returns: Axes, successes: Axes, window: int) -> None:
    steps = read_metrics(path)
    points = [(line["step"] + 1, line[RETURN_METRIC]) for line in steps if RETURN_METRIC in line and math.isfinite(line[RETURN_METRIC])]
    if not points:
        raise ValueError(f"{path}: contains no {RETURN_METRIC}; give the directory of a run that generated rollouts")
    x, y = zip(*points, strict=True)
    returns.plot(x, y, color=color, alpha=0.3, linewidth=1)
    returns.plot(x, moving_average(y, window=window), color=color, linewidth=2, label=f"{label}: return, mean of {window} steps")
    evaluated = [(line["step"] + (RETURN_METRIC in line), line[SUCCESS_METRIC]) for line in steps if SUCCESS_METRIC in line]
    if evaluated:
        x, y = zip(*evaluated, strict=True)
        label = f"{label}: greedy success"
        successes.plot(x, y, color=color, linestyle="none", marker="D", markersize=6, markeredgecolor="black", label=label)


def main(arguments: list[str] | None = None) -> int:
    """Plot the runs named on the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.observe.plot", description="Plot the learning curves of runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help=f"run directories, each with a {METRICS_FILE}")
    parser.add_argument("--out", type=Path, metavar="PNG", help=f"default: {CURVE_FILE} in the first run directory")
    parser.add_argument("--window", type=int, default=5, metavar="STEPS", help="odd number of steps to average over (default 5)")
    options = parser.parse_args(arguments)
    if options.window < 1 or options.window % 2 == 0:
        parser.error(f"--window={options.window}: use an odd number of steps")
    labels = [run.name for run in options.runs]
    if len(set(labels)) < len(labels):
        labels = [str(run) for run in options.runs]
    out = options.out or options.runs[0] / CURVE_FILE
    try:
        plot_reward_curves({label: run / METRICS_FILE for label, run in zip(labels, options.runs, strict=True)}, out, window=options.window)
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
