"""Plots many runs: mean return per step, and final success with its confidence interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_rl.observe.plot import moving_average


@dataclass(slots=True, frozen=True, kw_only=True)
class SweepCurve:
    """Data plotted for one run."""

    label: str
    steps: Sequence[int]
    returns: Sequence[float]
    success: float | None = None
    """Success rate with greedy decoding in the last evaluation."""
    interval: tuple[float, float] | None = None


def plot_sweep(curves: Sequence[SweepCurve], out_png: Path, *, window: int = 5) -> None:
    """Plot mean returns on the left and success with confidence intervals on the right."""
    figure = Figure(figsize=(11, max(3.6, 1.2 + 0.28 * len(curves))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    returns, reached = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, curve in enumerate(curves):
        color = f"C{number % 10}"
        if curve.steps:
            returns.plot(curve.steps, moving_average(curve.returns, window=window), color=color, linestyle="-" if number < 10 else "--")
        if curve.success is not None:
            reached.plot(curve.success, number, color=color, marker="D", linestyle="none")
        if curve.interval is not None:
            reached.hlines(number, *curve.interval, color=color)
    returns.set_xlabel("step")
    returns.set_ylabel(f"mean return, averaged over {window} steps")
    reached.set_yticks(range(len(curves)), [curve.label for curve in curves])
    reached.set_ylim(len(curves) - 0.5, -0.5)
    reached.set_xlim(-0.02, 1.02)
    reached.set_xlabel("greedy success, with 95% confidence interval")
    reached.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes in (returns, reached):
        axes.grid(alpha=0.3)
    partial = out_png.with_name(f".{out_png.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(out_png)
