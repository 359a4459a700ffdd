"""Ranks that gather objects under a watchdog, while rank 1 does something else. Run as a world by
test_hang_watchdog.py.

    hang_watchdog_world.py OUT lags|asks|ends|memory|stops|writes LIMIT_S

OUT/began_N appears when rank N reaches the collective that rank 1 does not join.
- lags: rank 1 sleeps.
- asks: rank 1 sleeps, is the first to send a request, and still writes its stacks when the other
  ranks send theirs.
- ends: rank 1 raises an error.
- memory: rank 1 has no memory left.
- stops: rank 1 receives SIGSTOP.
- writes: rank 1 joins after replying to more requests than a rank may miss.

For the last two, the ranks wait in a group with a timeout far above LIMIT_S.
"""

import os
import resource
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.distributed import hang_watchdog as watch_module
from megatron_rl.distributed.hang_watchdog import MAX_MISSED_REPLIES, HangWatchdog, _request_number
from megatron_rl.distributed.world import all_gather_object, connect, disconnect, long_timeout_group, read_world
from megatron_rl.errors import PeerLost


def sleep_long() -> None:
    time.sleep(60)


def use_all_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(bytearray(1 << 20))


def answer_slowly(watch: HangWatchdog) -> None:
    while _request_number(watch._last_request) <= MAX_MISSED_REPLIES:
        time.sleep(0.05)


def main(out: Path, scenario: str, limit_s: float) -> None:
    world = read_world()
    watch = HangWatchdog(world, folder=out, timeout_s=limit_s)
    waits_long = scenario in ("stops", "writes")
    connect(world, timeout_s=100.0 if waits_long else limit_s)
    with ExitStack() as closing, watch:
        closing.callback(disconnect)
        for _ in range(3):
            all_gather_object(world.rank)
        group = long_timeout_group(timeout_s=100.0) if waits_long else None
        if waits_long:
            watch_module.REPLY_TIMEOUT_S = 0.5  # the connection to the store already has its own timeout
        if scenario == "asks" and world.rank == 1:
            watch_module.NEAR_TIMEOUT, watch_module.STACK_WRITE_TIMEOUT_S = 0.6, 0.6 * limit_s
        (out / f"began_{world.rank}").touch()
        if world.rank == 1:
            acts = {"ends": fail, "lags": sleep_long, "asks": sleep_long, "memory": use_all_memory, "stops": suspend_process}
            acts["writes"] = partial(answer_slowly, watch)
            acts[scenario]()
        all_gather_object(world.rank, group=group)


def fail() -> None:
    raise ValueError("key=value: remedy")


def suspend_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    except PeerLost:
        sys.exit(1)
    except ValueError:  # a process that waits before it reports its error
        time.sleep(60)
