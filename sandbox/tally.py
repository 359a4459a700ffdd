"""What all processes of a box hold together, read from /proc: the watchdog's count, where no control group keeps one.

Charged are memory without a file (in swap too), page tables, and what the kernel keeps for them: sockets and pipes with all that they can
hold, and mappings. Not charged: pages of files and of a tmpfs, which a fork does not map and which are bounded elsewhere.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.types import BoxLimits

SOCKET_BYTES = 256 << 10
"""Bytes that one end of a socket may have on its way: net.core.wmem_default, which only setsockopt(2) raises, and one buffer more."""
PIPE_BYTES = 64 << 10
"""16 pages, which only fcntl(2) raises."""
MAPPING_BYTES = 1 << 10
"""struct vm_area_struct (256 bytes in Linux 6.18), its node in the tree, and a link to each of a few forebears (64)."""
HIDDEN_BYTES = 64 << 20
"""For the descriptors, and for the mappings, of a process that does not show them: it runs a file that it may not read."""
GROWTH_STEPS = 8
"""Mappings are counted when the kernel's own memory grew by one part of so many of a box's limit: to count them costs milliseconds."""


@dataclass(frozen=True, slots=True)
class BoxUsage:
    memory_bytes: int
    """Bytes; of memory without a file what goes beyond the zygote's."""
    num_tasks: int
    """Processes and threads."""


class KernelMemoryMonitor:
    """The host's memory that the kernel keeps for itself: says when it grew."""

    def __init__(self, limits: BoxLimits) -> None:
        self.step_bytes = limits.memory // GROWTH_STEPS
        self.level_bytes = read_unreclaimable_bytes()

    def has_grown(self) -> bool:
        """By more than a step since it was last told or lower."""
        now = read_unreclaimable_bytes()
        grown = now > self.level_bytes + self.step_bytes
        self.level_bytes = now if grown else min(now, self.level_bytes)
        return grown


def read_unreclaimable_bytes() -> int:
    return _parse_numbers(Path("/proc/meminfo"))["SUnreclaim"]


def find_exceeded_limit(pid: int, *, limits: BoxLimits, shared_bytes: int, count_mappings: bool) -> str | None:
    """The limit that the tree below `pid` is over. None too where it is gone, or cannot be seen just now."""
    try:
        held = measure_usage(pid, shared_bytes=shared_bytes, count_mappings=count_mappings)
    except OSError:
        return None
    return "processes" if held.num_tasks > limits.processes else "memory" if held.memory_bytes > limits.memory else None


def measure_usage(pid: int, *, shared_bytes: int = 0, count_mappings: bool = False) -> BoxUsage:
    """Of the tree below `pid`. Raises OSError where its first process cannot be seen.

    The kernel's own lists of children are followed: a walk over /proc takes milliseconds, in which a process can have forked and died.
    """
    memory = tasks = 0
    buffers: dict[str, int] = {}
    _list_children(f"/proc/{pid}/task/{pid}")
    waiting = [str(pid)]
    while waiting:
        threads, largest = _list_threads(waiting.pop()), 0
        for thread in threads:  # any of them may be the one that is left, have children, or descriptors of its own
            with contextlib.suppress(OSError):  # it ended meanwhile
                waiting += _list_children(thread)
                largest = largest or _memory_bytes(
                    thread, shared_bytes=shared_bytes, count_mappings=count_mappings
                )  # which all of a process share
                buffers |= _kernel_buffers(thread)
        memory += largest
        tasks += len(threads)
    return BoxUsage(memory + sum(buffers.values()), tasks)


def _list_threads(process: str) -> list[str]:
    try:
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    except OSError:  # it is gone
        return []


def _list_children(thread: str) -> list[str]:
    return Path(thread, "children").read_text().split()


def _memory_bytes(thread: str, *, shared_bytes: int, count_mappings: bool) -> int:
    """Bytes of the process; 0 by a thread that has ended."""
    status = _parse_numbers(Path(thread, "status"))
    own = max(0, status.get("RssAnon", 0) + status.get("VmSwap", 0) - shared_bytes) + status.get("VmPTE", 0)
    return own + _mapping_bytes(thread) if count_mappings else own


def _parse_numbers(file: Path) -> dict[str, int]:
    """Lines `name: number`, and `name: number kB` in bytes."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << (10 if words[-1] == "kB" else 0)
    return found


def _kernel_buffers(thread: str) -> dict[str, int]:
    """The kernel's name of each socket and pipe that is open -> bytes: what two processes share is one."""
    found = {}
    try:
        for descriptor in os.listdir(f"{thread}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed just now
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
    """A process that has ended and was not waited for belongs to root, shows nothing and has nothing."""
    return HIDDEN_BYTES if "VmPTE" in _parse_numbers(Path(thread, "status")) else 0
