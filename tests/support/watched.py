"""Run as a world by test_watch.py: ranks that gather under a watch, of which rank 1 does something else.

usage: watched.py OUT lags|ends LIMIT_S      OUT/began_N appears when rank N comes to the gathering that rank 1 does not come to
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.types import Parted
from megatron_rl.watch import Watch
from megatron_rl.world import connect, disconnect, gather, place


def dawdle() -> None:
    time.sleep(60)


def main(out: Path, how: str, limit_s: float) -> None:
    world = place()
    watch = Watch(world, folder=out, timeout_s=limit_s)
    connect(world, timeout_s=limit_s)
    with ExitStack() as closing, watch:
        closing.callback(disconnect)
        for _ in range(3):
            gather(world.rank)
        (out / f"began_{world.rank}").touch()
        if world.rank == 1:
            if how == "ends":
                raise ValueError("key=value: remedy")
            dawdle()
        gather(world.rank)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    except Parted:
        sys.exit(1)
    except ValueError:  # what a process does that waits before it says why
        time.sleep(60)
