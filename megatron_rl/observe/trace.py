"""Execution trace for Perfetto and chrome://tracing, with the spans of all ranks and episodes.

RUN/trace/step_000003.json is in Chrome's trace event format. The file contains complete events (ph
X) with timestamps in microseconds since the Unix epoch, read from the host's clock.

Each rank is a process in the trace. The first row of a process contains the spans of the step. Each
further row contains the spans of one episode: responses of the engine, steps of the environment
(with the name of the called tool and the wait for the tool), and scoring (judges). The clocks of
different nodes are not synchronized.
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
"""Name of the row that contains a step's spans."""
TraceEvent = tuple[str, str, float, float]
"""Row, name, start and end of an event; times are in seconds and read from the trace's clock."""


class StepTrace:
    """Trace of one rank, for the first `num_steps` steps of an attempt."""

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.time) -> None:
        self._left, self._clock = num_steps, clock
        self._events: list[TraceEvent] = []

    @property
    def is_enabled(self) -> bool:
        """True while there are more steps to trace."""
        return self._left > 0

    @contextmanager
    def __call__(self, row: str, name: str) -> Iterator[list[str]]:
        """Time the enclosed block.

        The yielded list contains the words of the event's name; the block may append words.
        """
        begin, words = self._clock(), [name]
        try:
            yield words
        finally:
            if self.is_enabled:
                self._events.append((row, " ".join(words), begin, self._clock()))

    def episode_tracer(self, group: int, sample: int) -> Callable[[str], AbstractContextManager[list[str]]]:
        """Return a function that records the parts of an episode as spans in the episode's row."""
        return partial(self, f"episode {group}#{sample}")

    def pop_events(self) -> list[TraceEvent]:
        """Return the events of the completed step and start recording the next step."""
        self._left -= 1
        events, self._events = self._events, []
        return events


def write_trace(run_dir: Path, step: int, ranks: Sequence[Sequence[TraceEvent]]) -> None:
    """Write a step's events; `ranks` contains the events of each rank."""
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
