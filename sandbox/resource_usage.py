"""Resource usage of all processes of a box, read from /proc by the watchdog.

Used if no control group counts it. Charged are anonymous memory (also in swap), page tables, and
kernel memory: sockets and pipes with all that they can hold, and mappings. Not charged are pages of
files and of a tmpfs, which a fork does not map and which are bounded elsewhere.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.records import BoxLimits

SOCKET_BYTES = 256 << 10
"""Bytes that one end of a socket may have in flight.

They are net.core.wmem_default, which only setsockopt(2) raises, and one more buffer.
"""
PIPE_BYTES = 64 << 10
"""Capacity of a pipe: 16 pages, which only fcntl(2) raises."""
MAPPING_BYTES = 1 << 10
"""Kernel memory per mapping.

It is a struct vm_area_struct (256 bytes in Linux 6.18), its node in the tree, and links to a few
ancestors (64 bytes each).
"""
HIDDEN_BYTES = 64 << 20
"""Bytes charged for the descriptors, and again for the mappings, of a process that hides them.

Such a process runs a file that it may not read.
"""
GROWTH_STEPS = 8
"""Divisor of a box's memory limit that gives the step of kernel memory growth.

Mappings are counted only after such growth, because counting takes milliseconds.
"""


@dataclass(frozen=True, slots=True)
class BoxUsage:
    """Memory and tasks of a box."""

    memory_bytes: int
    """Bytes charged; anonymous memory counts only beyond the zygote's."""
    num_tasks: int
    """Number of processes and threads."""


class KernelMemoryMonitor:
    """Detects growth of the host's unreclaimable kernel memory."""

    def __init__(self, limits: BoxLimits) -> None:
        self.step_bytes = limits.memory // GROWTH_STEPS
        self.level_bytes = read_unreclaimable_bytes()

    def has_grown(self) -> bool:
        """Return True if the memory grew by more than a step.

        The reference is the value at the last growth, or a lower value seen since.
        """
        now = read_unreclaimable_bytes()
        grown = now > self.level_bytes + self.step_bytes
        self.level_bytes = now if grown else min(now, self.level_bytes)
        return grown


def read_unreclaimable_bytes() -> int:
    """Return the host's unreclaimable kernel memory in bytes."""
    return _parse_numbers(Path("/proc/meminfo"))["SUnreclaim"]


def find_exceeded_limit(pid: int, *, limits: BoxLimits, shared_bytes: int, count_mappings: bool) -> str | None:
    """Return the limit exceeded by the process tree of `pid`, or None.

    It is also None if the tree is gone or cannot be read at the moment.
    """
    try:
        held = measure_usage(pid, shared_bytes=shared_bytes, count_mappings=count_mappings)
    except OSError:
        return None
    return "processes" if held.num_tasks > limits.processes else "memory" if held.memory_bytes > limits.memory else None


def measure_usage(pid: int, *, shared_bytes: int = 0, count_mappings: bool = False) -> BoxUsage:
    """Measure the process tree of `pid`. Raises OSError if its first process cannot be read.

    The kernel's own lists of children are used: a walk over /proc takes milliseconds, in which a
    process could fork and exit unnoticed.
    """
    memory = tasks = 0
    buffers: dict[str, int] = {}
    _list_children(f"/proc/{pid}/task/{pid}")
    waiting = [str(pid)]
    while waiting:
        threads, largest = _list_threads(waiting.pop()), 0
        # Any thread may be the only one left, have children, or have descriptors of its own.
        for thread in threads:
            with contextlib.suppress(OSError):  # it has ended meanwhile
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
    """Return the bytes of the process, read through one thread; 0 if that thread has ended."""
    status = _parse_numbers(Path(thread, "status"))
    own = max(0, status.get("RssAnon", 0) + status.get("VmSwap", 0) - shared_bytes) + status.get("VmPTE", 0)
    return own + _mapping_bytes(thread) if count_mappings else own


def _parse_numbers(file: Path) -> dict[str, int]:
    """Parse lines `name: number` and `name: number kB`; the latter are converted to bytes."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << (10 if words[-1] == "kB" else 0)
    return found


def _kernel_buffers(thread: str) -> dict[str, int]:
    """Return bytes by the kernel's name of each open socket and pipe.

    The name makes sockets and pipes shared by several processes count once.
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
    """Return HIDDEN_BYTES, or 0 for a process that has exited but was not waited for.

    The latter belongs to root, so its files are hidden too, but it holds nothing.
    """
    return HIDDEN_BYTES if "VmPTE" in _parse_numbers(Path(thread, "status")) else 0
