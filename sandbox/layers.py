"""Detection and selection of isolation layers, and the protections that the layers provide.

The zygote enters user_ns and mount_ns with read_only_root once. Each box then applies pid_ns,
net_ns, ipc_ns, mount_ns (with private_tmp), cgroup, rlimits, drop_uid, capabilities, landlock and
seccomp. confine.py defines the exact order.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_rl_sandbox.records import SandboxError

SOURCE_DIR = str(Path(__file__).resolve().parents[1])
"""Directory that contains this package."""

REQUIRED_LAYERS = ("mount_ns", "read_only_root", "private_tmp", "pid_ns", "net_ns", "rlimits", "capabilities")
"""Layers that isolation="auto" requires.

isolation="auto" also requires `drop_uid` or `user_ns`, and `cgroup` or `watchdog`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Set of isolation layers, with one switch per layer.

    All layers are off by default, so tests and the attack suite must name each layer that they use.
    """

    user_ns: bool = False
    """User namespace for the zygote.

    In a user namespace, an unprivileged process can create the other namespaces.
    """
    mount_ns: bool = False
    """Separate mount namespaces for the zygote and for each box."""
    read_only_root: bool = False
    """Read-only root file system with only the interpreter, its packages, /usr and system files.

    Boxes have no /proc and no /sys. Requires mount_ns.
    """
    private_tmp: bool = False
    """Working directory, /tmp and /dev/shm in a tmpfs with a limit on bytes and inodes.

    Inputs are mounted read-only in the tmpfs. Requires mount_ns.
    """
    net_ns: bool = False
    pid_ns: bool = False
    ipc_ns: bool = False
    """Separate IPC namespace (System V and POSIX IPC objects) and UTS namespace (host name)."""
    cgroup: bool = False
    """Control group (v1 or v2) that limits the memory, processes and cores of a whole box."""
    watchdog: bool = False
    """Background task of the pool for hosts that do not delegate a control group.

    The task regularly measures the memory and number of processes of each box, and kills a box that
    exceeds its limits.
    """
    rlimits: bool = False
    drop_uid: bool = False
    """Separate user id for each box, not used by anything else on the host. Requires root."""
    capabilities: bool = False
    """Empty capability sets and the process attribute no_new_privs."""
    landlock: bool = False
    seccomp: bool = False
    """Allow-list of system calls (seccomp.py)."""

    def __post_init__(self) -> None:
        if (self.read_only_root or self.private_tmp) and not self.mount_ns:
            raise ValueError(
                "layers: read_only_root and private_tmp require mount_ns: without it, they would change the host's mount table"
            )

    def enabled_names(self) -> list[str]:
        """Return the names of the enabled layers, in order of definition."""
        return [layer.name for layer in fields(self) if getattr(self, layer.name)]


@dataclass(frozen=True, slots=True)
class Protection:
    """Protection against one kind of violation, and the sets of layers that enforce it.

    Each set is sufficient by itself. `violation` is a verb phrase whose subject is the code in the
    box, such as "fills the disk".
    """

    violation: str
    enforced_by: tuple[frozenset[str], ...]

    def find_enforcing_layers(self, layers: Layers) -> frozenset[str] | None:
        """Return the first set in `enforced_by` that consists of enabled layers only, or None."""
        return next((names for names in self.enforced_by if names <= set(layers.enabled_names())), None)


def _make_protection(code: str, *held_by: str) -> Protection:
    return Protection(code, tuple(frozenset(names.split()) for names in held_by))


PROTECTIONS = {
    "files": _make_protection("sees or changes files of the host that are not on the list", "mount_ns read_only_root private_tmp"),
    "processes": _make_protection("sees, signals or debugs a process outside, or outlives its box", "pid_ns"),
    "network": _make_protection("reaches a network, or a socket of the host", "net_ns"),
    "privilege": _make_protection("has or gains a privilege", "capabilities drop_uid", "capabilities user_ns"),
    "disk": _make_protection("fills the disk", "private_tmp"),
    "memory": _make_protection("uses more memory than its limit, page tables included", "cgroup", "watchdog rlimits"),
    "kernel_memory": _make_protection(
        "makes the kernel use more memory for it: locks, socket buffers, pipes, mappings, unowned memory",
        "cgroup",
        "watchdog rlimits seccomp",
    ),
    "cores": _make_protection("uses more cores than its limit, also between two calls", "cgroup", "watchdog seccomp"),
    "queues": _make_protection("shares System V or POSIX queues and the host's name", "ipc_ns"),
    "crosstalk": _make_protection("locks or watches files that other boxes and the host use", "seccomp"),
    "information": _make_protection("sees the host's name, memory and load, or the process that created its channel", "ipc_ns seccomp"),
    "kernel_calls": _make_protection("makes system calls that have been used to escape containers", "seccomp"),
}
"""All protections, keyed by name. A host with all layers provides all of them.

If the host lacks a protection, a pool starts only if `allow_missing` names the protection.
"""


def find_missing_protections(layers: Layers) -> list[str]:
    """Return the names of the protections that `layers` does not provide."""
    return [name for name, wall in PROTECTIONS.items() if wall.find_enforcing_layers(layers) is None]


LAYER_NAMES = [layer.name for layer in fields(Layers)]


def detect_layers() -> dict[str, str | None]:
    """Map each layer's name to None, or to the reason why this host does not offer the layer.

    Each layer is tested by entering it in a separate process. The test takes about 0.3 s.
    """
    environment = {**os.environ, "PYTHONPATH": SOURCE_DIR}
    command = [sys.executable, "-m", "megatron_rl_sandbox.layer_probe"]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return json.loads(probe.stdout)


def choose_layers(missing_reasons: Mapping[str, str | None], *, allow_missing: Collection[str] = tuple(PROTECTIONS)) -> Layers:
    """Select the layers to use among the layers that this host offers.

    The watchdog is used only if control groups are not available, and a user namespace only if
    `drop_uid` is not available.

    Raises:
        SandboxError: A required layer is missing (the message lists the reasons), or a protection
            is missing that `allow_missing` does not name.
    """
    taken = {name for name in LAYER_NAMES if missing_reasons[name] is None}
    taken -= {"watchdog"} if "cgroup" in taken else set()
    taken -= {"user_ns"} if "drop_uid" in taken else set()
    missing = [name for name in REQUIRED_LAYERS if name not in taken]
    for pair in (("drop_uid", "user_ns"), ("cgroup", "watchdog")):
        missing += [] if taken.intersection(pair) else pair
    if missing:
        reasons = "; ".join(f"{name}: {missing_reasons[name]}" for name in missing)
        remedy = 'isolation="none" runs the code unconfined, with all permissions of this user'
        raise SandboxError(f"this host offers no isolation ({reasons}). {remedy}")
    layers = Layers(**dict.fromkeys(taken, True))
    if refused := [name for name in find_missing_protections(layers) if name not in allow_missing]:
        told = "; ".join(f"{name}: code {PROTECTIONS[name].violation}" for name in refused)
        raise SandboxError(
            f"this host lacks protections ({told}). Set allow_missing=[{','.join(refused)}] to run without these protections"
        )
    return layers
