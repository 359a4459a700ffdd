"""Step traces with a fake clock: rows, names and microseconds, and no more steps than requested."""

import asyncio
import json
from contextlib import suppress
from itertools import count
from pathlib import Path

from megatron_rl.observe.metrics import StepTimer
from megatron_rl.observe.trace import STEP_ROW, StepTrace, write_trace


def test_what_is_traced(tmp_path: Path) -> None:
    """The traces of two ranks are compared with expected events. An inner span lies within its
    outer span, a block that raises still ends its span, and each episode has a row of its own.
    """
    ticks = count(10)
    trace = StepTrace(1, clock=lambda: float(next(ticks)))
    with trace(STEP_ROW, "environment"), trace.episode_tracer(3, 1)("reply"):
        pass
    with suppress(ZeroDivisionError), trace(STEP_ROW, "update"):
        _ = 1 / 0
    assert trace.is_enabled
    events = trace.pop_events()
    assert events == [("episode 3#1", "reply", 11.0, 12.0), (STEP_ROW, "environment", 10.0, 13.0), (STEP_ROW, "update", 14.0, 15.0)]
    with trace(STEP_ROW, "sync"):
        pass
    assert not trace.is_enabled and trace.pop_events() == []
    write_trace(tmp_path, 7, [events, events[1:2]])
    told = json.loads((tmp_path / "trace" / "step_000007.json").read_text())["traceEvents"]
    named = [(event["pid"], event["args"]["name"]) for event in told if event["ph"] == "M"]
    assert named == [(0, "rank 0"), (0, "step"), (0, "episode 3#1"), (1, "rank 1"), (1, "step")]
    timed = [(event["pid"], event["tid"], event["name"], event["cat"], event["ts"], event["dur"]) for event in told if event["ph"] == "X"]
    assert timed == [
        (0, 1, "reply", "episode", 11_000_000, 1_000_000), (0, 0, "environment", "step", 10_000_000, 3_000_000),
        (0, 0, "update", "step", 14_000_000, 1_000_000), (1, 0, "environment", "step", 10_000_000, 3_000_000),
    ]  # fmt: skip


def test_episodes_side_by_side() -> None:
    """Concurrent episodes each get their own row, although they run alternately."""
    trace = StepTrace(1)

    async def episode(sample: int) -> None:
        for name in ("reply", "environment"):
            with trace.episode_tracer(0, sample)(name):
                await asyncio.sleep(0.001)

    async def play() -> None:
        await asyncio.gather(*(episode(sample) for sample in range(3)))

    asyncio.run(play())
    events = trace.pop_events()
    expected = [(f"episode 0#{sample}", name) for sample in range(3) for name in ("environment", "reply")]
    assert sorted((row, name) for row, name, *_ in events) == expected
    assert all(begin < end for *_, begin, end in events)


def test_spans_are_traced() -> None:
    trace = StepTrace(1)
    spans = StepTimer(trace=lambda name: trace(STEP_ROW, name))
    with spans("update"), spans("checkpoint"):
        pass
    assert [name for _, name, *_ in trace.pop_events()] == ["checkpoint", "update"] and spans.collect().keys() >= {
        "time/update",
        "time/checkpoint",
    }
