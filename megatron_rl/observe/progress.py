"""Progress display of a run.

One line is printed for each completed step. On a terminal, the line leaves out the columns that do
not fit, and a bar below it displays the step, the phase, the mean return and the time left. If the
output is not a terminal, the lines have all columns, suitable for grep and cut.
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
    ("epoch", ("epoch",), ".2f"),
    ("loss", ("loss",), "9.4f"),
    ("gap", ("rollout_mismatch/logprob_abs_diff_max",), "8.1e"),
    ("rollouts", ("time/engine", "time/environment"), "7.2f"),
    ("update", ("time/update",), "6.2f"),
    ("sync", ("time/sync",), "6.3f"),
)
"""Label, metrics to sum, and format of each column.

A column is displayed for the steps that have its metrics. Times are in seconds. On a narrow
terminal, the last columns are left out first.
"""
MIN_BAR_WIDTH = 80
"""Minimum width in columns of a terminal that also gets the phase and the bar."""
EPISODE_LINE_S = 30.0
"""Minimum time in seconds between two lines about the episodes of an evaluation, if the output is
not a terminal.
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
        self._start = self._last_line = clock()
        self._first_step_end: float | None = None
        self._bar = _make_bar(stream) if stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, completed=first_step, phase="", reward="", left="")
            self._bar.start()

    def set_phase(self, name: str) -> None:
        """Display the current phase (engine, update or sync) if the output is a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, phase=name, refresh=True)

    def log_step(self, step: int, metrics: Mapping[str, float], *, note: str = "") -> None:
        """Display a completed step.

        `note` is a remark for the user, which is displayed after the step's values.
        """
        values = [
            f"{label} {sum(metrics[name] for name in names if name in metrics):{form}}"
            for label, names, form in PROGRESS_COLUMNS
            if any(name in metrics for name in names)
        ]
        left = str(timedelta(seconds=round(self._left_s(step, metrics))))
        number = f"{self._title} step {step + 1:>{len(str(self._total))}}/{self._total}"
        if self._bar is None:
            print("  ".join([number, *values, *([note] if note else []), f"left {left}"]), file=self._stream, flush=True)
            return
        width = self._bar.console.width
        while len(values) > 1 and len("  ".join([number, *values, f"left {left}"])) > width:
            values.pop()
        self.print_line("  ".join([number, *values, f"left {left}"]))
        if note:
            self.print_line(f"{number}  {note}")
        self._bar.update(self._task, completed=step + 1, reward=values[0] if values else "", left=f"left {left}", refresh=True)

    def log_episodes(self, done: int, total: int) -> None:
        """Display how many episodes of an evaluation have ended."""
        if self._bar is not None:
            self.set_phase(f"evaluate {done}/{total}")
        elif self._clock() - self._last_line >= EPISODE_LINE_S:
            self.print_line(f"evaluate: {done}/{total} episodes")

    def print_line(self, line: str) -> None:
        """Print a message line without disturbing the progress display."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        print(line, file=self._stream, flush=True)
        self._last_line = self._clock()

    def close(self) -> None:
        """Stop the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def _left_s(self, step: int, metrics: Mapping[str, float]) -> float:
        """Estimate the remaining seconds from the mean time of the steps in this attempt.

        The first step also contains the start of the run. It only counts while it is the only one,
        and then by the displayed times, if there are any.
        """
        now, remaining = self._clock(), self._total - step - 1
        if self._first_step_end is None:
            self._first_step_end = now
            times = [metrics[name] for _, names, _ in PROGRESS_COLUMNS for name in names if name.startswith("time/") and name in metrics]
            return (sum(times) if times else now - self._start) * remaining
        return (now - self._first_step_end) / max(step - self._first_step, 1) * remaining


def _make_bar(stream: TextIO) -> Bar:
    """Create a progress bar that is redrawn only on changes.

    A progress bar with a refresh thread would slow down the engine.
    """
    console = Console(file=stream)
    columns = [
        TextColumn("{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.fields[reward]}"),
    ]  # fmt: skip
    if console.width >= MIN_BAR_WIDTH:
        columns += [TextColumn("{task.fields[phase]:<11}"), BarColumn(bar_width=10), TaskProgressColumn()]
    return Bar(*columns, console=console, auto_refresh=False)
