"""A process that is blocked in C code, so that no Python signal handler runs when it receives a
signal.

    python blocked_process.py store PORT
    python blocked_process.py collective PORT
    python blocked_process.py forked PORT

`store`: rank 0 of two waits in the rendezvous for a rank that never starts. `collective`: a started
run waits in a collective for rank 1, which sleeps. `forked`: a forked child receives SIGTERM, and
the process itself must not be affected.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from megatron_rl.distributed.world import connect, read_world
from megatron_rl.run import shutdown

shutdown.STARTUP_TIMEOUT_S, shutdown.SECOND_SIGNAL_S, shutdown.IMMEDIATE_S, shutdown.CLOSE_TIMEOUT_S = 1.0, 1.0, 0.5, 0.5
how, port = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2")


def block_in_c(stop: shutdown.StopSignal) -> None:
    if how == "store":
        print("waits", flush=True)
    connect(read_world(), timeout_s=100)
    if read_world().rank == 1:
        time.sleep(100)
    stop.mark_started()
    print("waits", flush=True)
    dist.all_reduce(torch.zeros(1))


with shutdown.StopSignal(grace_s=1.0, close_timeout_s=90.0) as asked:
    if how == "forked":
        child = os.fork()
        if not child:
            time.sleep(100)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        time.sleep(1.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("well", asked.is_requested)
    else:
        block_in_c(asked)
