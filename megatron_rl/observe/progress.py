"""Progress display of a run.

On a terminal, the display is a bar. If the output is not a terminal, one aligned line is printed
for each step, suitable for grep and cut.
"""

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

PROGRESS_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("return", ("reward/mean",), "+8.3f"),
    ("success", ("eval/greedy_success",), "6.1%"),
    ("loss", ("loss",), "9.4f"),
    ("gap", ("rollout_mismatch/logprob_abs_diff_max",), "8.1e"),
    ("rollouts", ("time/engine", "time/environment"), "7.2f"),
    ("update", ("time/update",), "6.2f"),
    ("sync", ("time/sync",), "6.3f"),
)
"""Label, metrics to sum, and format of each column.

A column is displayed for the steps that have its metrics. Times are in seconds.
"""


class ProgressDisplay:
    """Progress display of the main rank.

    `step` is zero-based, as in the run; the displayed number starts at 1.
    """

    def __init__(
        self, total: int, *, title: str, first_step: int = 0, stream: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._title, self._first_step = total, title, first_step
        self._stream, self._clock = stream, clock
        self._start = clock()
        self._bar = _make_bar(stream) if stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, completed=first_step, phase="", values="", left="")
            self._bar.start()

    def set_phase(self, name: str) -> None:
        """Display the current phase (engine, update or sync) if the output is a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, phase=name, refresh=True)

    def log_step(self, step: int, metrics: Mapping[str, float], *, note: str = "") -> None:
        """Display a completed step.

        `note` is a remark for the user, which is displayed after the step's values.
        """
        values = "  ".join(
            f"{label} {sum(metrics[name] for name in names if name in metrics):{form}}"
            for label, names, form in PROGRESS_COLUMNS
            if any(name in metrics for name in names)
        )
        values += f"  {note}" if note else ""
        left = str(timedelta(seconds=round(self._left_s(step))))
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, values=values, left=left, refresh=True)
            return
        width = len(str(self._total))
        print(f"{self._title} step {step + 1:>{width}}/{self._total}  {values}  left {left}", file=self._stream, flush=True)

    def print_line(self, line: str) -> None:
        """Print a message line without disturbing the progress display."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def _left_s(self, step: int) -> float:
        """Estimate the remaining seconds from the mean time of the steps in this attempt."""
        done = max(step + 1 - self._first_step, 1)
        return (self._clock() - self._start) / done * (self._total - step - 1)


def _make_bar(stream: TextIO) -> Bar:
    """Create a progress bar that is redrawn only on changes.

    A progress bar with a refresh thread would slow down the engine.
    """
    return Bar(
        TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[phase]:<11}"), TextColumn("{task.fields[values]}"), TextColumn("left {task.fields[left]}"),
        console=Console(file=stream), auto_refresh=False,
    )  # fmt: skip
