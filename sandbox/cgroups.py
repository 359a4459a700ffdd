"""Control groups (v1 or v2) that limit the memory, processes and cores of a whole box.

Each slot of a pool has one group, which is created once and reused. The groups are created below
the group of this process, so limits on this process apply to the boxes too. The files of control
groups are documented in the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl_sandbox.records import BoxLimits

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
CHARGE_BATCH_BYTES = 1 << 20
"""Granularity at which the kernel charges memory, in bytes.

When a charge fails, the memory charged to a group may be below its limit by up to this amount.
"""


@dataclass(slots=True)
class ControlGroup:
    """Control group of one slot.

    The group has one directory for each controller in v1, and a single directory in v2.
    """

    paths: tuple[Path, ...]
    _events_fd: int | None = None
    """Descriptor for reading the kernel's OOM counters, which are read during each call."""
    _peak_fd: int | None = None
    """Descriptor of the v1 file that contains the peak memory usage; None in v2.

    The peak shows whether the group reached its limit. The v1 counter of failed charges (failcnt)
    is not used, because it stays 0 in Linux 6.18.
    """
    _counts_before: dict[str, int] = field(default_factory=dict)

    def add_process(self, pid: int) -> None:
        """Move a process into the group. Raises OSError if the kernel refuses the move."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))
        if self._events_fd is None:
            self._events_fd = _open_first(self.paths[0] / name for name in ("memory.events", "memory.oom_control"))
            self._peak_fd = _open_first(self._peak_files())
        self.reset_oom_counter()

    def reset_oom_counter(self) -> None:
        """Reset the OOM counters, so that `was_oom_killed` only considers later kills."""
        self._counts_before = self._counts()
        for path in self._peak_files() if self._peak_fd is not None else ():
            # The file is opened for each reset. A file that stays open for writing would prevent
            # its mount from becoming read-only (attack/outer_bounds.py).
            path.write_text("0")

    def was_oom_killed(self) -> bool:
        """Return True if a process was killed since the reset because the group reached its limit.

        The kernel's counter includes kills for other reasons, such as a host that is out of memory.
        Therefore, the result is True only if the group has reached its own memory limit too.
        """
        now = self._counts()
        if now.get("oom_kill", 0) <= self._counts_before.get("oom_kill", 0):
            return False
        if self._peak_fd is None:
            return now["oom"] > self._counts_before["oom"]
        return int(os.pread(self._peak_fd, 64, 0)) >= int((self.paths[0] / "memory.limit_in_bytes").read_text()) - CHARGE_BATCH_BYTES

    def list_processes(self) -> list[int]:
        """Return the pids of all processes in the group.

        Raises OSError if the list cannot be read.
        """
        return [int(pid) for pid in (self.paths[0] / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """Close the open files of the group."""
        for descriptor in {self._events_fd, self._peak_fd} - {None}:
            os.close(descriptor)
        self._events_fd = self._peak_fd = None

    def _counts(self) -> dict[str, int]:
        if self._events_fd is None:
            return {}
        return {name: int(number) for name, number in map(str.split, os.pread(self._events_fd, 4096, 0).decode().splitlines())}

    def _peak_files(self) -> list[Path]:
        """Return a list with the v1 file that contains the peak memory usage, or [] in v2.

        If the kernel counts swap, the peak in the returned file includes swap.
        """
        files = (self.paths[0] / name for name in ("memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes"))
        return [file for file in files if file.exists()][:1]


def _open_first(files: Iterable[Path]) -> int | None:
    """Open the first of `files` that exists, because the names differ between v1 and v2."""
    found = next((file for file in files if file.exists()), None)
    return None if found is None else os.open(found, os.O_RDONLY | os.O_CLOEXEC)


class ControlGroups:
    """Control groups of all slots of a pool.

    If this process may not create the groups, the constructor raises an OSError.
    """

    def __init__(self, *, size: int, limits: BoxLimits, parents: dict[str, Path] | None = None) -> None:
        """Create the groups.

        `parents` maps each controller to the directory of this process's group; in v2, all
        controllers have the same directory. If `parents` is None, the directories are read from
        /proc.
        """
        self.parents = find_own_groups() if parents is None else parents
        missing = set(CONTROLLERS) - self.parents.keys()
        if missing:
            raise OSError(errno.ENOENT, f"this process has no control group for {', '.join(sorted(missing))}")
        self.parent_dirs = list(dict.fromkeys(self.parents[name] for name in CONTROLLERS))
        self.is_unified = (self.parent_dirs[0] / "cgroup.controllers").exists()
        self._remove_stale_groups()
        name = f"sandbox-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.pool_dirs = [place / name for place in self.parent_dirs]
        self.slots: list[ControlGroup] = []
        self._locks: list[int] = []
        try:
            for place in self.parent_dirs:
                self._delegate_controllers(place)
                (place / name).mkdir()
                self._locks.append(_lock(place / name))
                self._delegate_controllers(place / name)
            for slot in range(size):
                paths = tuple(top / str(slot) for top in self.pool_dirs)
                self.slots.append(ControlGroup(paths))
                for path in paths:
                    path.mkdir()
                self._write_limits(limits, slot=slot)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the groups.

        Each removal is retried, because the kernel may refuse to remove a group until shortly after
        its processes have died.
        """
        for group in self.slots:
            group.close()
        for path in [path for group in self.slots for path in group.paths] + self.pool_dirs:
            for _ in range(100):
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
        while self._locks:
            os.close(self._locks.pop())

    def _delegate_controllers(self, place: Path) -> None:
        """Enable the controllers for child groups of `place`.

        Does nothing in v1, where child groups always have the controllers. In v2, the kernel
        permits enabling controllers only if `place` is the root group or has no processes.
        """
        if self.is_unified:
            given = (place / "cgroup.subtree_control").read_text().split()
            if set(CONTROLLERS) - set(given):
                (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))

    def _write_limits(self, limits: BoxLimits, *, slot: int) -> None:
        folder = {name: self.parents[name] / self.pool_dirs[0].name / str(slot) for name in CONTROLLERS}
        memory = str(limits.memory + limits.disk + 2 * limits.file)  # the tmpfs and the printed output count as memory
        quota = int(limits.cpus * CPU_PERIOD_US)
        if self.is_unified:
            values = {
                ("memory", "memory.max"): memory,
                ("memory", "memory.swap.max"): "0",
                ("pids", "pids.max"): str(limits.processes),
                ("cpu", "cpu.max"): f"{quota} {CPU_PERIOD_US}",
            }
        else:
            values = {
                ("memory", "memory.limit_in_bytes"): memory,
                ("memory", "memory.memsw.limit_in_bytes"): memory,
                ("pids", "pids.max"): str(limits.processes),
                ("cpu", "cpu.cfs_period_us"): str(CPU_PERIOD_US),
                ("cpu", "cpu.cfs_quota_us"): str(quota),
            }
        for (controller, name), value in values.items():
            if "sw" not in name or (folder[controller] / name).exists():  # without swap accounting there is nothing to limit
                (folder[controller] / name).write_text(value)

    def _remove_stale_groups(self) -> None:
        """Remove the groups of pools that were killed before they could remove their groups.

        A running pool may be in another PID namespace, such as that of a container, so the groups
        of a process that is not found here are removed only if nobody holds their lock.
        """
        for top in [top for place in self.parent_dirs for top in place.glob("sandbox-*-*")]:
            if not Path("/proc", top.name.split("-")[1]).exists():
                try:
                    lock = _lock(top)
                except OSError:  # a running pool holds it, or another pool has just removed the group
                    continue
                for path in [*(entry for entry in top.iterdir() if entry.is_dir()), top]:
                    try:
                        path.rmdir()
                    except OSError:  # owned by another user, or being removed by another pool
                        break
                os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a directory, without waiting, until the returned descriptor is closed.

    The kernel releases the lock when the process dies. Raises BlockingIOError if another process
    holds the lock, and other OSErrors if the directory cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def find_own_groups(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Map each mounted controller to the directory of this process's control group."""
    inside: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        inside |= dict.fromkeys(names.split(",") if names else ["unified"], path)
    found: dict[str, Path] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        front, back = line.split(" - ", 1)
        _, _, _, root, target = front.split()[:5]
        kind, _, options = back.split()[:3]
        for name in options.split(",") if kind == "cgroup" else ["unified"] if kind == "cgroup2" else []:
            if name in inside and (inside[name] + "/").startswith(root.rstrip("/") + "/"):
                found[name] = Path(target, inside[name][len(root.rstrip("/")) :].lstrip("/"))
    if "unified" in found and (found["unified"] / "cgroup.controllers").exists():
        for name in (found["unified"] / "cgroup.controllers").read_text().split():
            found.setdefault(name, found["unified"])
    return {name: found[name] for name in CONTROLLERS if name in found}
