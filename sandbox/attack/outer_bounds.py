"""Outer bounds of a control, which protect the host from an attack that runs without layers.

The bounds are:

- new namespaces of every kind, including a user namespace if the suite does not run as root
- all file systems read-only, with small new file systems on /tmp, /var/tmp and /dev/shm; an
  interpreter below one of these paths stays visible
- no network except a loopback interface
- limits on processes, memory, time and file size, by rlimits and, if available, v1 control groups

The control is PID 1 of its PID namespace. When the control exits or is killed at the timeout, the
kernel kills all descendants of the control.
"""

import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl_sandbox import cgroups, kernel, mounts
from megatron_rl_sandbox.layer_probe import is_privileged
from megatron_rl_sandbox.records import BoxLimits

FRESH_MOUNTS = {"/tmp": "1777", "/var/tmp": "1777", "/dev/shm": "1777"}
FRESH_BYTES = 512 << 20
CONTROL_RLIMITS = {resource.RLIMIT_FSIZE: 1 << 30, resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: 8 << 30}
OUTER_LIMITS = BoxLimits(memory=3 << 30, processes=500, cpus=2.0)
NAMESPACE_FLAGS = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41


def run_bounded(work: Callable[[], None], *, timeout_s: float) -> int:
    """Run `work` in a child process inside the bounds and return the child's exit status.

    If the child is still running after `timeout_s`, it is killed, and the status is 124.
    """
    uid, gid = os.getuid(), os.getgid()
    privileged = is_privileged()
    if not privileged:
        kernel.unshare(kernel.CLONE_NEWUSER)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(line)
    groups = _make_outer_group()
    kernel.unshare(NAMESPACE_FLAGS)
    sys.stdout.flush()
    waiting, go = os.pipe()
    child = os.fork()
    if child == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(go)
        os.read(waiting, 1)
        _confine(root=privileged)
        work()
        sys.stdout.flush()
        os._exit(0)
    try:
        if groups is not None:
            groups.slots[0].add_process(child)
        os.close(go)
        return _wait_for_child(child, timeout_s=timeout_s)
    finally:
        if groups is not None:
            groups.close()


def _make_outer_group() -> cgroups.ControlGroups | None:
    """Create a cgroup in which the pool of an unprotected run can create its own cgroups.

    Returns None if this process may not create control groups, or if the host uses control groups
    v2, which do not allow this nesting.
    """
    try:
        groups = cgroups.ControlGroups(size=1, limits=OUTER_LIMITS)
    except OSError:
        return None
    if groups.is_unified:
        groups.close()
        return None
    return groups


def _wait_for_child(child: int, *, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _mount_fresh(target: str, *, mode: str) -> None:
    """Mount a small new tmpfs over `target`.

    Paths of the interpreter and of this package that are below `target` are bind-mounted into the
    new tmpfs.
    """
    own = str(Path(__file__).resolve().parents[1])
    inside = {path: os.open(path, os.O_PATH) for path in (*mounts.system_paths(), own) if Path(path).is_relative_to(target)}
    kernel.mount("tmpfs", target, kind="tmpfs", flags=kernel.MS_NOSUID, data=f"size={FRESH_BYTES},mode={mode}")
    for path, descriptor in inside.items():
        mounts.bind_mount(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)


def _confine(*, root: bool) -> None:
    """Set up the mounts, the loopback interface and the rlimits inside the new namespaces.

    The mounts are set up first, because the other steps need the /proc file system of this PID
    namespace.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    hierarchies = [line.split()[:4] for line in Path("/proc/self/mounts").read_text().splitlines() if " cgroup" in line]
    kernel.harden_mount("/", kernel.MOUNT_ATTR_RDONLY)
    for target, mode in FRESH_MOUNTS.items():
        _mount_fresh(target, mode=mode)
    kernel.mount("proc", "/proc", kind="proc")
    if root:
        # Mount the control groups again, because a control may keep the layer `cgroup`.
        for _, target, kind, options in hierarchies:
            if kind in ("cgroup", "cgroup2"):
                controllers = [name for name in options.split(",") if name not in ("rw", "ro", "nosuid", "nodev", "noexec", "relatime")]
                kernel.umount(target)  # a file system cannot be mounted over itself
                kernel.mount(kind, target, kind=kind, data=",".join(controllers) if kind == "cgroup" else "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
    for kind, most in CONTROL_RLIMITS.items():
        resource.setrlimit(kind, (most, most))
