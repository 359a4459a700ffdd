"""Functions that use /proc and signals to inspect and kill the processes of a box from outside."""

import contextlib
import os
import signal
from pathlib import Path

import psutil

PF_EXITING = 4  # linux/sched.h
KILL_ROUNDS = 50


def is_dying(pid: int) -> bool:
    """Return True if the process is exiting or gone.

    An exiting process closes its files, and thus its channel to the pool, before its parent is
    notified.
    """
    try:
        flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6]
    except OSError:  # already gone
        return True
    return bool(int(flags) & PF_EXITING)


def list_threads(process: int) -> list[str]:
    """Return the /proc directories of a process's threads, or [] if the process is gone."""
    try:
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return []


def list_children(thread: str) -> list[int]:
    """Return the pids of the children of a thread, given its /proc directory.

    The pids are read from the kernel's list of children. A walk over all of /proc would take
    milliseconds, during which a process could fork and exit unnoticed.

    Raises:
        OSError: The thread has ended.
    """
    return [int(pid) for pid in Path(thread, "children").read_text().split()]


def list_process_tree(pid: int) -> list[int]:
    """Return `pid` and the pids of all its descendants."""
    found = [pid]
    for process in found:
        for thread in list_threads(process):  # each thread has its own list of children
            with contextlib.suppress(OSError):
                found += list_children(thread)
    return found


def kill_process_tree(pid: int) -> None:
    """Stop `pid` and kill all its descendants, for boxes without a PID namespace.

    `pid` itself is not killed here; the zygote kills it. `pid` is a subreaper, so it adopts the
    orphans among its descendants. Two kinds of processes survive: processes that fork faster than
    this function finds them, and processes that remain after `pid` has exited by itself.
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
