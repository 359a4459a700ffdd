"""Timer for a call that counts only the time during which the box was able to run.

A stall of the host must not be reported as a timeout of the code. Therefore, the timer checks the
box about CHECKS_PER_LIMIT times within the time limit of a call. A check reads the states and
scheduling statistics of the box's processes from /proc (proc(5): state, schedstat). The following
rules apply:

- Time during which the box was stopped from outside, or was runnable but had no core to run on, is
  not counted.
- If a check runs late, only the planned interval is counted, because the pool's event loop or the
  whole machine was blocked.
- A reply is on time if it arrived before the last check, even if the pool reads it later.

Under load, the wall time of a call can exceed the time limit. The call times out at the latest when
its wall time reaches about MAX_WALL_FACTOR times the limit. The timeout is attributed to
the host if, in total, the box could not run for at least as long as the limit. Otherwise, the
timeout is attributed to the code.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_rl_sandbox.process_control import list_process_tree

if TYPE_CHECKING:
    from megatron_rl_sandbox.cgroups import ControlGroup

CHECKS_PER_LIMIT = 20
MIN_CHECK_INTERVAL_S = 0.2
"""Minimum interval between two checks, in seconds.

The interval is two CPU periods of a control group, because a box that has used up its CPU
quota does not run for the rest of the period.
"""
CHECK_GRACE_S = 0.05
"""Maximum delay in seconds of a punctual check, and minimum time until the next check.

A call times out at the first punctual check after its time is used up. At a punctual check, the
event loop has already read every reply that arrived before the check.
"""
MAX_WALL_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """State of a box's processes at one point in time."""

    is_stopped: bool
    is_runnable: bool
    """True if the first process of the box is running or ready to run."""
    thread_times_ns: dict[str, tuple[int, int]]
    """Nanoseconds that each thread has run and waited, keyed by the thread's directory in /proc.

    A thread is waiting if it is ready to run but has no core.
    """


def take_snapshot(pid: int, group: "ControlGroup | None") -> ProcessSnapshot:
    """Take a snapshot of all processes of a box.

    The processes are `pid` and all processes in `group`, or `pid` and its descendants if `group` is
    None. Processes that have exited or cannot be read are left out.
    """
    state, threads = "", {}
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # contains a name that the code may have chosen
        state = stat.rpartition(b")")[2].split()[0].decode()
    processes = {pid}
    with contextlib.suppress(OSError):  # the group is gone, or this process is out of descriptors
        processes |= set(list_process_tree(pid) if group is None else group.list_processes())
    for process in processes:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{process}/task").iterdir():
                running, waiting, _ = (task / "schedstat").read_text().split()
                threads[str(task)] = (int(running), int(waiting))
    return ProcessSnapshot(is_stopped=state == "T", is_runnable=state == "R", thread_times_ns=threads)


def runnable_fraction(before: ProcessSnapshot, now: ProcessSnapshot, *, span_s: float, cpus: float) -> float:
    """Return the fraction of the time between two snapshots during which the box was able to run.

    Time during which a thread waited for a core counts as time in which the box was unable to run.
    However, threads also wait if they compete with other threads of the same box. Therefore, the
    time in which the box was able to run is at least its CPU time divided by `min(1, cpus)`. If the
    box is stopped, the fraction is 0.
    """
    if now.is_stopped:
        return 0.0
    if not any(running for running, _ in now.thread_times_ns.values()):  # the kernel keeps no scheduling statistics (CONFIG_SCHED_INFO)
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
    """Async context manager that limits the time during which a box is able to run.

    TimeoutError is raised once the box has been able to run for `seconds`, or once the wall time
    reaches about MAX_WALL_FACTOR * `seconds`. After a timeout, `was_starved` is True if the host
    prevented the box from running.
    """

    def __init__(self, seconds: float, *, pid: int, group: "ControlGroup | None", cpus: float, is_unstoppable: bool) -> None:
        """Create a timer.

        Args:
            seconds: Time limit in seconds.
            pid: Process id of the first process of the box.
            group: Control group of the box, if any.
            cpus: Number of cores that the box may use.
            is_unstoppable: True if no code in the box can stop the box's first process. If False,
                time during which the process is stopped is counted, because otherwise the code
                could stop its own timer.
        """
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
        # The first check only takes a snapshot to compare with. A call that ends earlier needs no
        # snapshot.
        self._schedule_check(min(self._step / 4, self._seconds))
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
        share = 1.0  # in case the check fails
        try:
            share = self._runnable_fraction(passed)
        finally:  # always reschedule: a failed check must not disable the limit
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
