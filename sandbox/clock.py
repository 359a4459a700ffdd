"""A call's clock: it counts the time that a box had for itself, so that nobody else's stall is told as the code's limit.

It is looked at some twenty times a limit, never once. A look that comes late counts as if it had come in time: the pool's loop was held up,
or the whole machine. In a look's span in which the box was stopped from outside, or ready to run without a core to run on, its clock
stood still. Both come from /proc (proc(5): state, schedstat). What has arrived by the last look was there in time, however late it is read.
Under load a call has up to PATIENCE times its limit on the wall; then it has had its time, unless it did not run at all.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sandbox.processes import list_process_tree

if TYPE_CHECKING:
    from sandbox.cgroups import ControlGroup

CHECKS_PER_LIMIT = 20
MIN_CHECK_INTERVAL_S = 0.2
"""Between two looks, at least: two periods of a control group, in one of which a box that used its cores up does not run."""
CHECK_GRACE_S = 0.05
"""The last look comes no later than this after it is due: the loop has turned meanwhile, and read what had arrived."""
MAX_WALL_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """Of a box's processes at one moment. Nanoseconds of each thread since its start."""

    is_stopped: bool
    is_runnable: bool
    """The first process is ready to run, or runs."""
    thread_times_ns: dict[str, tuple[int, int]]
    """Directory below /proc -> (on a core, ready but without one)"""


def take_snapshot(pid: int, group: "ControlGroup | None") -> ProcessSnapshot:
    """All of its processes: without a control group those below the first. What is gone, or cannot be read, is left out."""
    state, threads = "", {}
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # with a name in it that the code may have chosen
        state = stat.rpartition(b")")[2].split()[0].decode()
    processes = {pid}
    with contextlib.suppress(OSError):  # the group is gone, or this process has no descriptor left
        processes |= set(list_process_tree(pid) if group is None else group.list_processes())
    for process in processes:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                running, waiting, _ = (task / "schedstat").read_text().split()
                threads[str(task)] = (int(running), int(waiting))
    return ProcessSnapshot(is_stopped=state == "T", is_runnable=state == "R", thread_times_ns=threads)


def runnable_fraction(before: ProcessSnapshot, now: ProcessSnapshot, *, span_s: float, cpus: float) -> float:
    """Of a span of time, the part in which the box could go on, 0 to 1.

    It could not while it waited for a core. That its own threads wait for one another is its own doing: time in which it used what it may
    use, `cpus` cores but one at most, is never taken off.
    """
    if now.is_stopped:
        return 0.0
    if not any(running for running, _ in now.thread_times_ns.values()):  # this kernel does not count (CONFIG_SCHED_INFO)
        return 1.0
    used = delayed = 0.0
    for name, (running, waiting) in now.thread_times_ns.items():
        ran, stood = before.thread_times_ns.get(name, (0, waiting))
        used += 1e-9 * (running - ran)
        delayed = max(delayed, 1e-9 * (waiting - stood))
    if now.is_runnable and used <= 0:
        return 0.0
    denied = min(delayed, span_s - used / min(1.0, cpus))
    return min(1.0, 1 - denied / span_s)


class BoxTimer:
    """`async with`: raises TimeoutError after `seconds` of the box's own time; `held` then tells whether it was kept from using them."""

    def __init__(self, seconds: float, *, pid: int, group: "ControlGroup | None", cpus: float, is_unstoppable: bool) -> None:
        """`is_unstoppable`: nothing inside can stop the box's first process, or it would stop its own clock."""
        self.was_starved = False
        self._seconds, self._pid, self._group, self._cpus, self._is_unstoppable = seconds, pid, group, cpus, is_unstoppable
        self._step = max(seconds / CHECKS_PER_LIMIT, MIN_CHECK_INTERVAL_S)
        self._own_s = self._starved_s = 0.0
        self._checks_left = MAX_WALL_FACTOR * max(1, int(min(CHECKS_PER_LIMIT, seconds / MIN_CHECK_INTERVAL_S))) + 3
        self._snapshot: ProcessSnapshot | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        await self._timer.__aenter__()
        self._last_check = self._loop.time()
        self._schedule_check(min(self._step / 4, self._seconds))  # the first has nothing to compare with; what is over by then has no look
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.cancel()
        await self._timer.__aexit__(kind, error, trace)

    def _schedule_check(self, span_s: float) -> None:
        self._span_s = span_s
        self._handle = self._loop.call_at(self._last_check + span_s, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        passed, self._last_check = now - self._last_check, now
        late = passed > self._span_s + CHECK_GRACE_S
        over = self._own_s >= self._seconds
        share = 1.0  # of a look that fails
        try:
            share = self._runnable_fraction(passed)
        finally:  # a clock that stopped would be no limit
            self._own_s += min(passed, self._span_s) * share
            self._checks_left -= 1
            if (over and not late) or self._checks_left <= 0:
                self.was_starved = self._own_s < self._seconds and self._starved_s >= self._seconds
                self._timer.reschedule(now)
            else:
                left = self._seconds - self._own_s
                self._schedule_check(min(self._step, max(left, CHECK_GRACE_S)))

    def _runnable_fraction(self, passed: float) -> float:
        before, self._snapshot = self._snapshot, take_snapshot(self._pid, self._group)
        if before is None:
            return 1.0
        if self._snapshot.is_stopped and not self._is_unstoppable:
            return 1.0
        share = runnable_fraction(before, self._snapshot, span_s=passed, cpus=self._cpus)
        self._starved_s += self._span_s if share == 0 and passed >= MIN_CHECK_INTERVAL_S else 0
        return share
