"""The layers of isolation by name, which of them this host offers, and which set makes a room.

Order of entry (confine.py): user_ns, mount_ns with read_only_root once per zygote; then per box net_ns, pid_ns, ipc_ns, mount_ns with
private_tmp, cgroup, rlimits, drop_uid, capabilities, landlock, and seccomp last.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from sandbox.types import SandboxError

SOURCE_DIR = str(Path(__file__).resolve().parents[1])
"""Where this package is imported from."""

REQUIRED_LAYERS = ("mount_ns", "read_only_root", "private_tmp", "pid_ns", "net_ns", "rlimits", "capabilities")
"""Without one of these there is no room. Of `drop_uid` and `user_ns` one is needed, and so is one of `cgroup` and `watchdog`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """One switch a layer; all off by default, so that tests and the attack suite name what they use."""

    user_ns: bool = False
    """The zygote lives in a user namespace of its own: how a process without privilege gets the other namespaces."""
    mount_ns: bool = False
    """A mount table of its own, one per zygote and one per box."""
    read_only_root: bool = False
    """The root holds the interpreter, its packages and /usr, read-only, and nothing else of the host; no /proc, no /sys. Needs mount_ns."""
    private_tmp: bool = False
    """Working directory, /tmp and /dev/shm in a tmpfs of bounded bytes and inodes; inputs are read-only mounts in it. Needs mount_ns."""
    net_ns: bool = False
    pid_ns: bool = False
    ipc_ns: bool = False
    """System V and POSIX message queues, semaphores and shared memory of its own; with it the host's name (UTS)."""
    cgroup: bool = False
    """Memory, processes and cores of a whole box (v1 or v2)."""
    watchdog: bool = False
    """The pool sums the resident memory and counts the processes of each busy box and kills it; for hosts that delegate no cgroup."""
    rlimits: bool = False
    drop_uid: bool = False
    """A user id that nothing else on the host has, another one for every box of a pool. Needs root."""
    capabilities: bool = False
    """No capability in any set, and no_new_privs."""
    landlock: bool = False
    seccomp: bool = False
    """An allow-list of system calls."""

    def __post_init__(self) -> None:
        if (self.read_only_root or self.private_tmp) and not self.mount_ns:
            raise ValueError("layers: read_only_root and private_tmp need mount_ns, or they would change the host's own mount table")

    def enabled_names(self) -> list[str]:
        return [layer.name for layer in fields(self) if getattr(self, layer.name)]


@dataclass(frozen=True, slots=True)
class Protection:
    """Something that code in a box must not do, and the sets of layers of which each keeps it from doing so."""

    violation: str
    enforced_by: tuple[frozenset[str], ...]

    def find_enforcing_layers(self, layers: Layers) -> frozenset[str] | None:
        """The first such set that is whole; None: code can do it."""
        return next((names for names in self.enforced_by if names <= set(layers.enabled_names())), None)


def _make_protection(code: str, *held_by: str) -> Protection:
    return Protection(code, tuple(frozenset(names.split()) for names in held_by))


PROTECTIONS = {
    "files": _make_protection("sees or changes files of the host that are not on the list", "mount_ns read_only_root private_tmp"),
    "processes": _make_protection("sees, signals or debugs a process outside, or outlives its box", "pid_ns"),
    "network": _make_protection("reaches a network, or a socket of the host", "net_ns"),
    "privilege": _make_protection("has or gains a privilege", "capabilities drop_uid", "capabilities user_ns"),
    "disk": _make_protection("fills the disk", "private_tmp"),
    "memory": _make_protection("has more memory than its limit, page tables included", "cgroup", "watchdog rlimits"),
    "kernel_memory": _make_protection(
        "has the kernel keep more for it: locks, socket buffers, pipes, mappings, memory without an owner",
        "cgroup",
        "watchdog rlimits seccomp",
    ),
    "cores": _make_protection("uses more cores than its limit, also between two calls", "cgroup", "watchdog seccomp"),
    "queues": _make_protection("shares System V or POSIX queues and the host's name", "ipc_ns"),
    "crosstalk": _make_protection("locks or watches files that other boxes and the host use", "seccomp"),
    "information": _make_protection("is told the host's name, memory and load, or who made its channel", "ipc_ns seccomp"),
    "kernel_calls": _make_protection("makes system calls that have been ways out of containers", "seccomp"),
}
"""What a complete host holds. A name that this host does not is to be accepted by whoever starts a pool on it."""


def find_missing_protections(layers: Layers) -> list[str]:
    return [name for name, wall in PROTECTIONS.items() if wall.find_enforcing_layers(layers) is None]


LAYER_NAMES = [layer.name for layer in fields(Layers)]


def detect_layers() -> dict[str, str | None]:
    """layer -> None where this host offers it, else the reason. Every layer is tried for real in a process of its own (about 0.3 s)."""
    environment = {**os.environ, "PYTHONPATH": SOURCE_DIR}
    command = [sys.executable, "-m", "sandbox.probe"]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return json.loads(probe.stdout)


def choose_layers(missing_reasons: Mapping[str, str | None], *, allow_missing: Collection[str] = tuple(PROTECTIONS)) -> Layers:
    """Every layer that helps of those on offer: the watchdog only without a cgroup, a user namespace only where the uid cannot be dropped.

    Raises SandboxError with each missing layer and its reason where what is left is no room, and where it has open walls that
    `allow_missing` does not name.
    """
    taken = {name for name in LAYER_NAMES if missing_reasons[name] is None}
    taken -= {"watchdog"} if "cgroup" in taken else set()
    taken -= {"user_ns"} if "drop_uid" in taken else set()
    missing = [name for name in REQUIRED_LAYERS if name not in taken]
    for pair in (("drop_uid", "user_ns"), ("cgroup", "watchdog")):
        missing += [] if taken.intersection(pair) else pair
    if missing:
        reasons = "; ".join(f"{name}: {missing_reasons[name]}" for name in missing)
        remedy = 'isolation="none" runs the code unconfined, with all that this user may do'
        raise SandboxError(f"this host offers no isolation ({reasons}). {remedy}")
    layers = Layers(**dict.fromkeys(taken, True))
    if refused := [name for name in find_missing_protections(layers) if name not in allow_missing]:
        told = "; ".join(f"{name}: code {PROTECTIONS[name].violation}" for name in refused)
        raise SandboxError(f"this host leaves open what others hold ({told}). accept=[{','.join(refused)}] runs here all the same")
    return layers
