"""Enters the isolation layers of the zygote and of each box.

Entering a layer can remove privileges that are needed to enter other layers. Therefore, the layers
are entered in this order:

    zygote   user_ns -> mount_ns + read_only_root
    box      pid_ns (by the zygote's fork) -> user_ns (nested), mount_ns, net_ns, ipc_ns
             -> private_tmp and inputs -> rlimits -> drop_uid -> capabilities -> landlock -> seccomp
"""

import math
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl_sandbox import kernel, landlock, mounts, seccomp
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.records import BoxLimits

INNER_UID = 1000  # user and group id inside a box's own user namespace
WORKER_HEADROOM_BYTES = 64 << 20
"""Bytes of memory beyond `BoxLimits.memory` that are available to the worker only.

The worker needs them to encode images and to report that the code has used up its memory.
"""
ADDRESS_SPACE_MARGIN_BYTES = 4 << 30
"""Bytes of address space beyond the memory limit, for thread stacks and allocator arenas.

The margin is used only if the address space is limited in order to bound the size of page tables.
"""
HOST_NAME = "box"
FIRST_UID = 1_000_000_000  # far above the ids of users, services and containers


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Settings for the confinement of one box."""

    layers: Layers
    limits: BoxLimits
    directory: str
    """Directory in which the box's work/ and tmp/ are created."""
    uid: int
    """User id of the box if the layer `drop_uid` is enabled."""
    base_data_bytes: int
    """Bytes of writable memory mapped by the zygote at the time it forks the box."""
    base_address_bytes: int
    """Bytes of address space mapped by the zygote at the time it forks the box."""
    cores: frozenset[int]
    """Cores on which the box's processes may run if the layer `watchdog` is enabled."""
    readable: Sequence[str] = ()
    """Paths of the host that the box can read in addition to the system paths."""
    has_sockets: bool = False
    """True to allow TCP and UDP sockets, which reach only the box's own network namespace."""


def box_uid(zygote: int, slot: int) -> int:
    """Return the user id of a slot; `zygote` is the process id of the pool's zygote.

    The user ids are unique on the host, because process ids are below 2**22 and a pool has at most
    256 slots.
    """
    assert zygote < 1 << 22 and slot < 256, f"zygote {zygote}, slot {slot}"
    return FIRST_UID + zygote * 256 + slot


def box_cores(slot: int, *, cpus: float) -> frozenset[int]:
    """Select the cores for a slot from the cores that this process may use.

    Slots with consecutive numbers get different cores if there are enough cores.
    """
    allowed, wanted = sorted(os.sched_getaffinity(0)), math.ceil(cpus)
    return frozenset(allowed[(slot * wanted + core) % len(allowed)] for core in range(wanted))


def write_id_maps(proc: int, *, inside: int, outside_uid: int, outside_gid: int) -> None:
    """Write the id maps of this process's new user namespace, which map one user and one group.

    Args:
        proc: File descriptor of /proc.
        inside: User and group id inside the namespace.
        outside_uid: User id outside the namespace.
        outside_gid: Group id outside the namespace.
    """
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {outside_uid} 1"), ("gid_map", f"{inside} {outside_gid} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def enter_zygote_layers(layers: Layers, *, proc: int, readable: Sequence[str] = ()) -> None:
    """Enter the layers of the zygote. Raises OSError if the host does not permit a layer.

    `readable` has the same meaning as in `mounts.build_root`.
    """
    if layers.user_ns:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        write_id_maps(proc, inside=0, outside_uid=uid, outside_gid=gid)
    if layers.mount_ns:
        kernel.unshare(kernel.CLONE_NEWNS)
    if layers.read_only_root:
        assert layers.mount_ns, "read_only_root without mount_ns would replace the host's root"
        mounts.build_root(readable)


def enter_box_namespaces(layers: Layers, *, proc: int) -> None:
    """Enter the namespaces of a box. Raises OSError if the host does not permit a namespace."""
    wanted = {
        kernel.CLONE_NEWUSER: layers.user_ns,
        kernel.CLONE_NEWNS: layers.mount_ns,
        kernel.CLONE_NEWNET: layers.net_ns,
        kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS: layers.ipc_ns,
    }
    kernel.unshare(sum(flags for flags, on in wanted.items() if on))
    if layers.user_ns:
        write_id_maps(proc, inside=INNER_UID, outside_uid=0, outside_gid=0)
    if layers.ipc_ns:
        kernel.set_host_name(HOST_NAME)
    if layers.mount_ns:
        kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def prepare_directory(confinement: Confinement, inputs: Mapping[str, bytes]) -> str:
    """Create the box's directories, write its inputs and return its working directory.

    Call this function before `drop_privileges`, because mounting and changing owners require
    privileges.
    """
    owner = confinement.uid if confinement.layers.drop_uid else None
    if confinement.layers.private_tmp:
        size = mounts.tmpfs_size(confinement.limits.disk, list(inputs.values()))
        mounts.mount_box_tmpfs(confinement.directory, num_bytes=size, num_inodes=confinement.limits.inodes + len(inputs))
    work = mounts.make_directories(confinement.directory, owner=owner)
    mounts.write_inputs(work, inputs, owner=owner, mounted=confinement.layers.mount_ns)
    os.chdir(work)
    return work


def drop_privileges(confinement: Confinement) -> None:
    """Drop all privileges of this process permanently.

    The worker calls this function before it processes any untrusted data or code.
    """
    layers = confinement.layers
    if layers.rlimits:
        set_rlimits(
            confinement.limits,
            base_data_bytes=confinement.base_data_bytes,
            base_address_bytes=confinement.base_address_bytes if layers.watchdog else None,
        )
    if layers.watchdog:
        os.sched_setaffinity(0, confinement.cores)
    if layers.drop_uid:
        os.setgroups([])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after setresuid, which clears it
    if layers.capabilities or layers.landlock or layers.seccomp:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if layers.capabilities:
        kernel.drop_capabilities()
    if layers.landlock:
        landlock.restrict_paths(
            readable=[*mounts.system_paths(confinement.readable), *mounts.DEVICES],
            writable=[confinement.directory, *mounts.WRITABLE_DEVICES],
            restricts_tcp=not confinement.has_sockets,
        )
    if layers.seccomp:
        seccomp.install_filter(shared_memory=layers.cgroup, has_sockets=confinement.has_sockets)


def set_rlimits(limits: BoxLimits, *, base_data_bytes: int, base_address_bytes: int | None) -> None:
    """Set the resource limits of a box.

    RLIMIT_NPROC counts processes per user and user namespace, and does not apply to root.

    Args:
        limits: Limits of the box.
        base_data_bytes: Bytes of writable memory mapped by the zygote, which are added to the
            limit.
        base_address_bytes: Bytes of address space mapped by the zygote, which are added to the
            limit. If None, the address space is unlimited, because a control group counts the page
            tables.
    """
    wanted = {
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_CORE: 1,  # too small for a core file; 0 would still start a core dump handler (core(5))
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_DATA, (base_data_bytes + limits.memory, base_data_bytes + limits.memory + WORKER_HEADROOM_BYTES))
    if base_address_bytes is not None:
        space = base_address_bytes + limits.memory + WORKER_HEADROOM_BYTES + ADDRESS_SPACE_MARGIN_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
