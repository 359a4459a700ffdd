"""Inspection and killing of a box's processes from outside, through /proc and signals."""

import contextlib
import os
import signal
from pathlib import Path

import psutil

PF_EXITING = 4  # linux/sched.h
KILL_ROUNDS = 50


def is_dying(pid: int) -> bool:
    """Return True if the process is exiting or gone.

    An exiting process closes its files before its parent is notified.
    """
    try:
        flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6]
    except OSError:  # already gone
        return True
    return bool(int(flags) & PF_EXITING)


def list_threads(process: int) -> list[str]:
    """Return the directories of the threads in /proc, or none if the process is gone."""
    try:
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return []


def list_children(thread: str) -> list[int]:
    """Return the children of a thread, from the kernel's own list. Raises OSError if it has ended.

    A walk over /proc takes milliseconds, in which a process could fork and exit unnoticed.
    """
    return [int(pid) for pid in Path(thread, "children").read_text().split()]


def list_process_tree(pid: int) -> list[int]:
    """Return `pid` and all its descendants."""
    found = [pid]
    for process in found:
        for thread in list_threads(process):  # each thread has children of its own
            with contextlib.suppress(OSError):
                found += list_children(thread)
    return found


def kill_process_tree(pid: int) -> None:
    """Kill all descendants of `pid`, but not `pid` itself, which the zygote ends.

    `pid` adopts the orphans of its tree. For boxes without a pid namespace. Processes that fork
    faster than they are found, or outlive a root that has exited by itself, are not killed.
    """
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
