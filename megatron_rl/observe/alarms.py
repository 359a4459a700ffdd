"""Alarms: rules over the metrics of a run that warn of reward hacks and collapses.

    python -m megatron_rl.observe.alarms runs/mine     # the alarms of a run, from its metrics.jsonl

A rule compares medians over a window of steps; docs/alarms.md explains the rules and their limits.
Rules read nothing but lines of metrics.jsonl, so a resumed run rebuilds its state from this file,
and a finished run can be checked again. A metric that is missing or NaN is left out of a window.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import AlarmSettings
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.observe.alarm_rules import RULES, Line
from megatron_rl.observe.metrics import METRICS_FILE, read_metrics

METRIC_PREFIX = "alarms/"
NUM_TAIL_WINDOWS = 4
"""Rules compare the last window with the first of the run, and with the first of this many."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that began to hold at a step (zero-based, as in metrics.jsonl)."""

    step: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}; see docs/alarms.md#{self.name}"


class AlarmMonitor:
    """Applies the rules after each step, and raises an alarm once, when its rule begins to hold.

    An alarm stays active until its rule has not held for a whole window of steps. Only then can it
    be raised again.
    """

    def __init__(self, settings: AlarmSettings, past: Sequence[Line] = ()) -> None:
        """Create a monitor. Alarms of the steps in `past` were raised before."""
        self._window = settings.window
        self._rules = {name: rule for name, rule in RULES.items() if name not in settings.disable}
        self._lines: list[Line] = []
        self._quiet = dict.fromkeys(self._rules, self._window)
        """Number of steps since the rule held."""
        for line in past:
            self.update(line)

    def update(self, line: Line) -> list[Alarm]:
        """Add the metrics of a step, with the key `step`, and return the alarms that begin here."""
        self._lines.append(line)
        tail = self._lines[-NUM_TAIL_WINDOWS * self._window :]
        histories = [self._lines, tail] if len(tail) < len(self._lines) else [tail]
        found = []
        for name, rule in self._rules.items():
            text = next(filter(None, (rule(lines, self._window) for lines in histories)), "")
            if text and self._quiet[name] >= self._window:
                found.append(Alarm(int(line["step"]), name, text))
            self._quiet[name] = 0 if text else self._quiet[name] + 1
        return found

    def metrics(self) -> dict[str, float]:
        """Return alarms/NAME of each rule: 1 while the alarm is active, else 0."""
        return {f"{METRIC_PREFIX}{name}": float(quiet < self._window) for name, quiet in self._quiet.items()}


def find_alarms(lines: Sequence[Line], settings: AlarmSettings | None = None) -> list[Alarm]:
    """Return the alarms of a run, in the order of its steps."""
    monitor = AlarmMonitor(settings or AlarmSettings())
    return [alarm for line in lines for alarm in monitor.update(line)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the alarms of runs and return the exit code: 0, or 1 if a run cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.observe.alarms", description="Print the alarms of runs, one a line, from their metrics.jsonl.",
        epilog="Example: python -m megatron_rl.observe.alarms runs/quickstart/grpo --window 8",
    )  # fmt: skip
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--window", type=int, default=AlarmSettings().window, help="steps of a window (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        settings = AlarmSettings(window=options.window)
        for run in options.runs:
            lines = read_metrics(run / METRICS_FILE)
            alarms = find_alarms(lines, settings)
            for alarm in alarms:
                print(to_printable(f"{run}: step {alarm.step}: {alarm}"))
            if not alarms:
                print(to_printable(f"{run}: no alarms in {len(lines)} lines"))
    except (OSError, ValueError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
