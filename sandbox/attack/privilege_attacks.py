"""Attacks on privileged kernel interfaces.

The interfaces are mounts, namespaces, devices, and system calls that can be used to escape
containers.
"""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.attack.file_attacks import FILE_LAYERS

MOUNT_LAYERS = FILE_LAYERS | {"seccomp"}
UNSHARE_SNIPPET = "libc.unshare(0x10000000 | 0x00020000)"
"""Source code that enters a new user namespace, where the process has all capabilities."""

MOUNTS = (
    AttackProbe(
        "mount_tmpfs",
        "mounts",
        "mount a file system",
        Evidence.PRINTED,
        (f'{UNSHARE_SNIPPET}\nos.mkdir("m")\nif libc.mount(b"none", b"m", b"tmpfs", 0, None) == 0:\n    pwned()',),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "new_mount_api",
        "mounts",
        "the same with fsopen and fsmount, which filters of mount(2) miss",
        Evidence.PRINTED,
        (f'{UNSHARE_SNIPPET}\nfd = syscall(430, b"tmpfs", 0)\nsyscall(431, fd, 6, None, None, 0)\nsyscall(432, fd, 0, 0)\npwned()',),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "bind_proc",
        "mounts",
        "bind one directory over another",
        Evidence.PRINTED,
        (f'{UNSHARE_SNIPPET}\nos.mkdir("m")\nif libc.mount(b"/", b"m", None, 0x5000, None) == 0:\n    pwned(os.listdir("m"))',),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "new_user_namespace",
        "mounts",
        "become root in a new user namespace",
        Evidence.PRINTED,
        ("if libc.unshare(0x10000000) == 0:\n    pwned(os.getuid())",),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "join_namespace",
        "mounts",
        "enter the network or file system of a process of the host",
        Evidence.PRINTED,
        (
            """
for kind, flag in (("net", 0x40000000), ("mnt", 0x20000)):
    try:
        fd = os.open(f"/proc/{W['canary']}/ns/{kind}", os.O_RDONLY)
        syscall(308, fd, flag)
        pwned(kind)
    except OSError:
        pass
""",
        ),
        MOUNT_LAYERS | {"pid_ns"},
        needs_root=True,
    ),
    AttackProbe(
        "make_device",
        "mounts",
        "make a device node and open it",
        Evidence.PRINTED,
        ('os.mknod("d", 0o20666, os.makedev(1, 3))\nos.close(os.open("d", os.O_RDWR))\npwned()',),
        MOUNT_LAYERS,
        needs_root=True,
    ),
)

SYSCALL_LAYERS = frozenset({"seccomp", "drop_uid", "capabilities"})
CALLS = (
    AttackProbe(
        "io_uring",
        "kernel calls",
        "set up an io_uring",
        Evidence.PRINTED,
        ("syscall(425, 4, ctypes.create_string_buffer(256))\npwned()",),
        SYSCALL_LAYERS | {"rlimits"},
    ),
    AttackProbe(
        "userfaultfd",
        "kernel calls",
        "handle page faults in user space (userfaultfd)",
        Evidence.PRINTED,
        ("syscall(323, 0)\npwned()",),
        SYSCALL_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "bpf",
        "kernel calls",
        "make a BPF map",
        Evidence.PRINTED,
        ("attributes = (ctypes.c_uint32 * 32)(2, 4, 4, 1)\nsyscall(321, 0, attributes, 16)\npwned()",),
        SYSCALL_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "perf",
        "kernel calls",
        "count events of the whole processor (perf_event_open)",
        Evidence.PRINTED,
        (
            'attributes = (ctypes.c_uint8 * 128)()\nstruct.pack_into("IIQ", attributes, 0, 1, 112, 0)\n'
            "syscall(298, attributes, -1, 0, -1, 0)\npwned()",
        ),
        SYSCALL_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "host_keyring",
        "kernel calls",
        "read a key from the keyring that the box inherits",
        Evidence.SECRET,
        (
            'box = ctypes.create_string_buffer(256)\nkey = syscall(250, 10, -3, b"user", W["key"].encode(), 0)\n'
            "syscall(250, 11, key, box, 256)\nprint(box.raw[:64])",
        ),
        SYSCALL_LAYERS,
    ),
    AttackProbe(
        "host_name",
        "kernel calls",
        "rename the host",
        Evidence.CHANGED,
        ('socket.sethostname("gone")',),
        SYSCALL_LAYERS | {"ipc_ns"},
        needs_root=True,
    ),
)

PROBES = (*MOUNTS, *CALLS)
