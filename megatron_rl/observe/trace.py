"""When what happened, in a file that Perfetto and chrome://tracing open: spans of every rank, its episodes, and what these waited for.

    RUN/trace/step_000003.json      Chrome's trace event format, complete events (ph X), microseconds of this host's clock
A process is a rank. Its first row has the spans of a step, each further row an episode: replies of the engine, steps of the environment
(with the name of a tool that was called, and the wait for one), scoring (judges). Clocks of several nodes are not brought together.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from megatron_rl.io.jsonl import write_bytes_atomically

TRACE_FOLDER = "trace"
STEP_ROW = "step"
"""The row of the spans."""
TraceEvent = tuple[str, str, float, float]
"""Row, name, begin and end in seconds of the clock."""


class StepTrace:
    """Of one rank, for the first `num_steps` steps of a run's life."""

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.time) -> None:
        self._left, self._clock = num_steps, clock
        self._events: list[TraceEvent] = []

    @property
    def is_enabled(self) -> bool:
        return self._left > 0

    @contextmanager
    def __call__(self, row: str, name: str) -> Iterator[list[str]]:
        """Time the block, which may add words to its name."""
        begin, words = self._clock(), [name]
        try:
            yield words
        finally:
            if self.is_enabled:
                self._events.append((row, " ".join(words), begin, self._clock()))

    def episode_tracer(self, group: int, sample: int) -> Callable[[str], AbstractContextManager[list[str]]]:
        """Times the parts of an episode, which have a row of their own."""
        return partial(self, f"episode {group}#{sample}")

    def pop_events(self) -> list[TraceEvent]:
        """What happened in a step that is over."""
        self._left -= 1
        events, self._events = self._events, []
        return events


def write_trace(run_dir: Path, step: int, ranks: Sequence[Sequence[TraceEvent]]) -> None:
    """A step's events, by rank."""
    path = run_dir / TRACE_FOLDER / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [event for rank, events in enumerate(ranks) for event in _rank_events(rank, events)]
    write_bytes_atomically(path, json.dumps({"traceEvents": told, "displayTimeUnit": "ms"}).encode())


def _rank_events(rank: int, events: Sequence[TraceEvent]) -> Iterator[dict[str, object]]:
    rows = {row: number for number, row in enumerate(dict.fromkeys([STEP_ROW, *sorted(row for row, *_ in events)]))}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for row, number in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": row}}
    for row, name, begin, end in events:
        times = {"ts": round(begin * 1e6), "dur": round((end - begin) * 1e6)}
        yield {"ph": "X", "name": name, "cat": row.split()[0], "pid": rank, "tid": rows[row], **times}
