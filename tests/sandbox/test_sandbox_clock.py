"""Tests the clock of a call against hand-computed numbers, and 32 boxes on a busy machine with a
stalled event loop."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl_sandbox import BoxLimits, CallResult, Fault, SandboxPool, clock
from megatron_rl_sandbox.clock import BoxTimer, ProcessSnapshot, runnable_fraction
from megatron_rl_sandbox.layers import choose_layers, detect_layers
from megatron_rl_sandbox.process_control import kill_process_tree
from tests.support.sandbox_pool import start_pool

S = 1_000_000_000
NUM_BOXES = 32
MOST_LOOKS = 4 * 2 + 3
"""Maximum number of snapshots that a clock of 0.4 s takes, however late they come."""


def sight(*threads: tuple[float, float], stopped: bool = False, waiting: bool = False) -> ProcessSnapshot:
    """Return a snapshot. Each pair in `threads` holds the seconds on a core and the seconds spent
    waiting for one."""
    times = {str(number): (int(ran * S), int(stood * S)) for number, (ran, stood) in enumerate(threads)}
    return ProcessSnapshot(is_stopped=stopped, is_runnable=waiting, thread_times_ns=times)


@pytest.mark.parametrize(
    ("before", "now", "cpus", "share"),
    [
        (sight((1, 1)), sight((1, 1)), 1.0, 1.0),  # asleep
        (sight((1, 1)), sight((3, 1)), 1.0, 1.0),  # two seconds on a core
        (sight((1, 1)), sight((1.5, 2.5)), 1.0, 0.25),  # half a second on a core, the rest waiting
        (sight((1, 1)), sight((1, 1), waiting=True), 1.0, 0.0),  # runnable all the time, never on a core
        (sight((1, 1)), sight((1, 1), stopped=True), 1.0, 0.0),
        (sight((0, 0), (0, 0)), sight((1, 1), (1, 1)), 1.0, 1.0),  # the box's own threads wait for each other
        (sight((1, 1), (0, 0)), sight((1, 3), (2, 0), waiting=True), 1.0, 1.0),  # the box's own child has the core
        (sight((0, 0)), sight((0, 0), (0.5, 1.5)), 1.0, 1.0),  # a new thread: its waiting time before the first snapshot is unknown
        (sight((0, 0)), sight((0.5, 1.5)), 0.5, 0.5),  # half of the half core that it may use
        (sight((0, 0)), sight((0.5, 9)), 1.0, 0.25),
        (sight((0, 0)), sight((0, 0), waiting=True), 1.0, 1.0),  # a kernel without these statistics
        (sight((0, 0)), sight(), 1.0, 1.0),  # the process has ended or is not visible
    ],
)
def test_the_own_part_of_two_seconds(before: ProcessSnapshot, now: ProcessSnapshot, cpus: float, share: float):
    """`runnable_fraction` returns the hand-computed share of two seconds that a box had for
    itself."""
    assert runnable_fraction(before, now, span_s=2.0, cpus=cpus) == pytest.approx(share)


PARENT = """
import subprocess, sys, threading, time
burn = [sys.executable, "-c", "import os; os.fork(); print(flush=True)\\nwhile True: pass"]
thread = threading.Thread(target=lambda: subprocess.run(burn), daemon=True)
thread.start()
time.sleep(60)
"""


def test_without_a_control_group_all_below_the_first_process_are_looked_at():
    """Without a control group, a snapshot covers all descendants of the first process: here a child
    and a grandchild of a thread, which use the core. A box that starves its own first process is
    therefore not counted as starved."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        try:
            parent.stdout.read(2)  # both print a line once they run
            before = clock.take_snapshot(parent.pid, None)
            time.sleep(0.5)
            now = clock.take_snapshot(parent.pid, None)
        finally:
            kill_process_tree(parent.pid)
            parent.kill()
    below = {name for name in now.thread_times_ns if not name.startswith(f"/proc/{parent.pid}/")}
    assert len(below) == 2, now
    assert sum(now.thread_times_ns[name][0] - before.thread_times_ns[name][0] for name in below) > 0


def test_code_that_starves_its_own_first_process_is_late():
    """Code that starves its own first process exceeds its time limit. Without a control group, and
    on the one core of its slot, the first process is never scheduled."""
    starve = "import os\nif all(os.fork() for _ in range(30)): os.nice(19)\nwhile True: pass"

    async def call() -> CallResult:
        layers = replace(choose_layers(detect_layers()), cgroup=False, watchdog=True)
        async with (
            SandboxPool(size=1, limits=BoxLimits(call_timeout_s=1.0, open_timeout_s=120.0, processes=64), layers=layers) as pool,
            await pool.open() as box,
        ):
            return await box.run(starve)

    result = asyncio.run(call())
    assert (result.fault, result.limit) == (Fault.CODE, "time"), result


def timed(
    monkeypatch: pytest.MonkeyPatch, sights: list[ProcessSnapshot], *, seconds: float, sealed: bool = True
) -> tuple[float, bool, int]:
    """Return when the clock ends an endless wait, whether it counts the box as starved, and the
    number of snapshots. The clock reads `sights` in order and repeats the last one."""
    looks = 0

    def look(*_: object) -> ProcessSnapshot:
        nonlocal looks
        looks += 1
        return sights.pop(0) if len(sights) > 1 else sights[0]

    monkeypatch.setattr(clock, "take_snapshot", look)

    async def wait() -> tuple[float, bool, int]:
        timer = BoxTimer(seconds, pid=1, group=None, cpus=1.0, is_unstoppable=sealed)
        began = time.perf_counter()
        with pytest.raises(TimeoutError):
            async with timer:
                await asyncio.sleep(60)
        return time.perf_counter() - began, timer.was_starved, looks

    return asyncio.run(wait())


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_look_that_fails_does_not_stop_the_clock(error: type[Exception]):
    """The call still ends at its limit if the first snapshot fails. An error other than OSError is
    reported to the loop's exception handler."""
    failures = [error("once")]

    class Sightless:
        def list_processes(self) -> list[int]:
            if failures:
                raise failures.pop()
            return []

    async def wait() -> tuple[bool, list[type]]:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        timer = BoxTimer(0.4, pid=os.getpid(), group=Sightless(), cpus=1.0, is_unstoppable=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30) as bound, timer:
                await asyncio.sleep(60)
        assert not bound.expired()
        return timer.was_starved, [type(context["exception"]) for context in told]

    assert asyncio.run(wait()) == (False, [] if error is OSError else [error])
    assert not failures


def test_a_box_that_had_its_time_is_late(monkeypatch: pytest.MonkeyPatch):
    """A box that was never stopped or starved ends at its limit, as its own timeout."""
    spent, held, looks = timed(monkeypatch, [sight((0, 0))], seconds=0.4)
    assert not held
    assert spent >= 0.4
    assert looks < MOST_LOOKS


def test_a_stopped_box_is_held_after_four_times_its_limit(monkeypatch: pytest.MonkeyPatch):
    """A box that stays stopped ends at four times its limit and counts as starved by the host."""
    spent, held, looks = timed(monkeypatch, [sight((0, 0), stopped=True)], seconds=0.4)
    assert held
    assert spent >= 1.4
    assert looks == MOST_LOOKS


def test_one_that_can_stop_itself_is_not_held(monkeypatch: pytest.MonkeyPatch):
    """A stopped box that could have stopped itself (without isolation) ends at its limit, as its
    own timeout."""
    _, held, looks = timed(monkeypatch, [sight((0, 0), stopped=True)], seconds=0.4, sealed=False)
    assert (held, looks < MOST_LOOKS) == (False, True)


def test_a_stop_that_ends_costs_no_time(monkeypatch: pytest.MonkeyPatch):
    """Time in which the box is stopped does not count toward its limit. Snapshots are 0.2 s apart;
    three of them, besides the first, see the box stopped."""
    spent, held, _ = timed(monkeypatch, [sight((0, 0), stopped=True)] * 4 + [sight((0, 0))], seconds=0.4)
    assert not held
    assert spent >= 0.4 + 3 * 0.2


def test_code_that_starves_among_others_is_late_in_the_end(monkeypatch: pytest.MonkeyPatch):
    """Code that gets a hundredth of a core ends at four times its limit, as its own timeout."""
    looks = [sight((0.002 * (k + 1), 0.198 * k)) for k in range(200)]
    spent, held, _ = timed(monkeypatch, looks, seconds=0.4)
    assert not held
    assert spent >= 1.4


def burn() -> None:
    while True:
        pass


@pytest.mark.long
def test_no_verdict_of_32_honest_boxes_changes_under_load_and_a_held_up_loop():
    """All of 32 honest boxes finish in time, and all of four endless calls exceed their limit. An
    honest call needs 0.05 s on a core; four processes burn the cores, and the event loop stalls
    twice for two limits."""
    honest = "import time\nend = time.process_time() + 0.05\nwhile time.process_time() < end: pass\ntime.sleep(0.2)\nprint({k}, flush=True)"

    async def calls(pool: SandboxPool) -> list[CallResult]:
        boxes = [await pool.open() for _ in range(NUM_BOXES)]
        running = [asyncio.create_task(box.run(honest.format(k=k), timeout_s=4.0)) for k, box in enumerate(boxes)]
        for _ in range(2):
            await asyncio.sleep(0.1)
            time.sleep(8.0)
        done = await asyncio.gather(*running)
        endless = await asyncio.gather(*(box.run("while True: pass", timeout_s=0.5) for box in boxes[:4]))
        await asyncio.gather(*(box.close() for box in boxes))
        return [*done, *endless]

    burners = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(4)]
    for room in start_pool(BoxLimits(call_timeout_s=1.0), size=NUM_BOXES):
        for burner in burners:
            burner.start()
        results = room.run_coroutine(calls(room.pool))
        for burner in burners:
            burner.kill()
    assert [(result.fault, result.text) for result in results[:NUM_BOXES]] == [(Fault.NONE, f"{k}\n") for k in range(NUM_BOXES)]
    assert [(result.fault, result.limit) for result in results[NUM_BOXES:]] == [(Fault.CODE, "time")] * 4
