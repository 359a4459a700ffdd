"""Fraction of a speaker's training step in which the run only waits for scores.

    python launch/train.py experiment=lewis_cpu run.trace=25
    .venv/bin/python benchmarks/lewis_waits.py runs/lewis/speaker

The fraction is computed from traces (run.trace=N). Time counts as waiting if a request to the
listener is open and nothing else is in progress: the policy generates no response, no environment
step runs, and the trainer has no open span except spans in which it waits for episodes.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.observe.trace import STEP_ROW, TRACE_FOLDER

WAITS = {"environment"}
"""Spans of a step in which the trainer waits for its episodes."""
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals as a sorted list of disjoint intervals."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of the intervals."""
    return sum(end - begin for begin, end in union(intervals))


def waits(file: Path) -> tuple[float, float]:
    """Return the waiting time and the total time of a traced step, in seconds.

    The waiting time is the time in which the step only waits for scores.
    """
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == STEP_ROW]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)  # an episode may have started in the previous step
    scoring, busy = [], []
    for event in events:
        interval = (max(first, event["ts"]), min(last, event["ts"] + event["dur"]))
        if event["name"] == "scoring":
            scoring.append(interval)
        elif event["cat"] != STEP_ROW or event["name"] not in WAITS:
            busy.append(interval)
    return (length([*scoring, *busy]) - length(busy)) / 1e6, (last - first) / 1e6


def main() -> None:
    """Print the waiting fraction over the traced steps of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--skip", type=int, default=2, help="number of initial steps to skip (default %(default)s)")
    given = parser.parse_args()
    steps = [waits(file) for file in sorted((given.run / TRACE_FOLDER).glob("step_*.json"))[given.skip :]]
    if not steps:
        parser.error(f"{given.run} has traces of at most {given.skip} steps; set run.trace=25 for the run")
    alone, whole = (sum(column) for column in zip(*steps, strict=True))
    print(f"{len(steps)} steps, {whole / len(steps):.2f} s on average; fraction spent only waiting for scores: {alone / whole:.1%}")


if __name__ == "__main__":
    main()
