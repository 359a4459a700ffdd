"""Resource usage of all processes of a box, read from /proc by the watchdog.

This module is used on hosts where no control group counts the resources. The following memory is
charged to a box:

- anonymous memory, including memory in swap
- page tables
- kernel memory: sockets and pipes, each with its full capacity, and mappings

Pages of files and of a tmpfs are not charged, because other limits restrict these pages and a fork
does not copy their page table entries.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_sandbox.records import BoxLimits

SOCKET_BYTES = 256 << 10
"""Maximum number of bytes that can be queued at one end of a socket.

The value is the limit net.core.wmem_default plus the size of one more buffer. A process can exceed
net.core.wmem_default only with setsockopt(2).
"""
PIPE_BYTES = 64 << 10
"""Capacity of a pipe in bytes: 16 pages, which a process can raise only with fcntl(2)."""
MAPPING_BYTES = 1 << 10
"""Kernel memory per mapping, in bytes.

The value covers a struct vm_area_struct (256 bytes in Linux 6.18), its node in the tree of
mappings, and links to the mappings of a few ancestor processes (64 bytes each).
"""
HIDDEN_BYTES = 64 << 20
"""Bytes charged for a process if the kernel hides the list of its file descriptors.

The same number of bytes is charged if the kernel hides the list of the process's mappings. The
kernel hides both lists if the process executes a file that it has no permission to read.
"""
GROWTH_STEPS = 8
"""Number of steps into which a box's memory limit is divided.

Mappings are counted only after the host's kernel memory has grown by more than one step, because
counting takes milliseconds.
"""


@dataclass(frozen=True, slots=True)
class BoxUsage:
    """Memory usage and task count of a box."""

    memory_bytes: int
    """Number of charged bytes. Anonymous memory shared with the zygote is not charged."""
    num_tasks: int
    """Number of processes and threads."""


class KernelMemoryMonitor:
    """Detects growth of the host's unreclaimable kernel memory."""

    def __init__(self, limits: BoxLimits) -> None:
        self.step_bytes = limits.memory // GROWTH_STEPS
        self.level_bytes = read_unreclaimable_bytes()

    def has_grown(self) -> bool:
        """Return True if the memory has grown by more than `step_bytes`.

        The growth is measured from the lowest value since the last detected growth.
        """
        now = read_unreclaimable_bytes()
        grown = now > self.level_bytes + self.step_bytes
        self.level_bytes = now if grown else min(now, self.level_bytes)
        return grown


def read_unreclaimable_bytes() -> int:
    """Return the host's unreclaimable kernel memory in bytes."""
    return _parse_numbers(Path("/proc/meminfo"))["SUnreclaim"]


def find_exceeded_limit(pid: int, *, limits: BoxLimits, shared_bytes: int, count_mappings: bool) -> str | None:
    """Return the limit that the process tree of `pid` exceeds, or None.

    The result is also None if the processes have exited or cannot be read.
    """
    try:
        held = measure_usage(pid, shared_bytes=shared_bytes, count_mappings=count_mappings)
    except OSError:
        return None
    return "processes" if held.num_tasks > limits.processes else "memory" if held.memory_bytes > limits.memory else None


def measure_usage(pid: int, *, shared_bytes: int = 0, count_mappings: bool = False) -> BoxUsage:
    """Measure the process tree of `pid`. Raises OSError if `pid` itself cannot be read.

    The tree is read from the kernel's lists of children. A walk over all of /proc would take
    milliseconds, during which a process could fork and exit unnoticed.
    """
    memory = tasks = 0
    buffers: dict[str, int] = {}
    _list_children(f"/proc/{pid}/task/{pid}")
    waiting = [str(pid)]
    while waiting:
        threads, largest = _list_threads(waiting.pop()), 0
        # All threads are read, because any of them may be the last remaining thread, have children
        # or have its own descriptor table.
        for thread in threads:
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                waiting += _list_children(thread)
                largest = largest or _memory_bytes(
                    thread, shared_bytes=shared_bytes, count_mappings=count_mappings
                )  # shared by all threads of a process, so counted once
                buffers |= _kernel_buffers(thread)
        memory += largest
        tasks += len(threads)
    return BoxUsage(memory + sum(buffers.values()), tasks)


def _list_threads(process: str) -> list[str]:
    try:
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    except OSError:  # already gone
        return []


def _list_children(thread: str) -> list[str]:
    return Path(thread, "children").read_text().split()


def _memory_bytes(thread: str, *, shared_bytes: int, count_mappings: bool) -> int:
    """Return the charged memory of a process, read through one of its threads.

    The result is 0 if the thread has exited.
    """
    status = _parse_numbers(Path(thread, "status"))
    own = max(0, status.get("RssAnon", 0) + status.get("VmSwap", 0) - shared_bytes) + status.get("VmPTE", 0)
    return own + _mapping_bytes(thread) if count_mappings else own


def _parse_numbers(file: Path) -> dict[str, int]:
    """Parse lines of the form `name: number`. Numbers followed by `kB` are converted to bytes."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << (10 if words[-1] == "kB" else 0)
    return found


def _kernel_buffers(thread: str) -> dict[str, int]:
    """Map the kernel's name of each open socket and pipe to the bytes charged for it.

    Because of these keys, a socket or pipe shared by several processes is counted only once.
    """
    found = {}
    try:
        for descriptor in os.listdir(f"{thread}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                name = os.readlink(f"{thread}/fd/{descriptor}")
                if name.startswith(("socket:", "pipe:")):
                    found[name] = SOCKET_BYTES if name.startswith("socket:") else PIPE_BYTES
    except PermissionError:
        return {f"hidden:{thread}": _hidden_bytes(thread)}
    return found


def _mapping_bytes(thread: str) -> int:
    try:
        with open(f"{thread}/maps", "rb") as lines:
            return sum(block.count(b"\n") for block in iter(lambda: lines.read(1 << 16), b"")) * MAPPING_BYTES
    except PermissionError:
        return _hidden_bytes(thread)


def _hidden_bytes(thread: str) -> int:
    """Return HIDDEN_BYTES, or 0 for a zombie process.

    The /proc files of a zombie are owned by root and cannot be read, but a zombie uses no memory.
    """
    return HIDDEN_BYTES if "VmPTE" in _parse_numbers(Path(thread, "status")) else 0
