"""What the pool sees of a box's processes, and does to them, from outside: by /proc and signals."""

import contextlib
import os
import signal
from pathlib import Path

import psutil

PF_EXITING = 4  # linux/sched.h
KILL_ROUNDS = 50


def is_dying(pid: int) -> bool:
    """Whether it is on its way out, or gone; its files are closed on that way, before anybody is told of its end."""
    try:
        flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6]
    except OSError:  # it is gone
        return True
    return bool(int(flags) & PF_EXITING)


def list_threads(process: int) -> list[str]:
    """Their directories below /proc; none of a process that is gone."""
    try:
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return []


def list_children(thread: str) -> list[int]:
    """Raises OSError where it has ended. A list of the kernel's: a walk over /proc takes milliseconds, in which a process can have forked
    and died."""
    return [int(pid) for pid in Path(thread, "children").read_text().split()]


def list_process_tree(pid: int) -> list[int]:
    """`pid` and all below it."""
    found = [pid]
    for process in found:
        for thread in list_threads(process):  # any of them may have children
            with contextlib.suppress(OSError):
                found += list_children(thread)
    return found


def kill_process_tree(pid: int) -> None:
    """Everything below `pid`, which adopts the orphans of its tree and is left for the zygote. For boxes without a pid namespace: what
    forks faster than it is found, or outlives a root that ended by itself, is not caught."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the root is gone
        root = psutil.Process(pid)
        root.suspend()
        for _ in range(KILL_ROUNDS):
            found = False
            for child in root.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE:
                        child.send_signal(signal.SIGKILL)
                        found = True
            if not found:
                return
