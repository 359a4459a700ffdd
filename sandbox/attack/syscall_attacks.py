"""Attacks through new system calls, which many filters miss, and through obsolete system calls."""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence
from megatron_rl_sandbox.attack.file_attacks import FILE_LAYERS
from megatron_rl_sandbox.attack.privilege_attacks import MOUNT_LAYERS, SYSCALL_LAYERS, UNSHARE_SNIPPET
from megatron_rl_sandbox.attack.process_attacks import DEBUG_LAYERS

NEWER = (
    AttackProbe(
        "clone3_namespace",
        "newer calls",
        "create a child in a user namespace with clone3, whose flags a filter cannot read",
        Evidence.PRINTED,
        (
            """
child = syscall(435, struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
pwned()
""",
        ),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "secret_memory",
        "newer calls",
        "allocate memory that the kernel itself cannot access (memfd_secret)",
        Evidence.PRINTED,
        ("import mmap\nfd = syscall(447, 0)\nos.ftruncate(fd, 65536)\nmmap.mmap(fd, 65536)[0] = 1\npwned()",),
        frozenset({"seccomp", "rlimits"}),
        min_kernel=(6, 5),
    ),
    AttackProbe(
        "copy_mounts",
        "newer calls",
        "copy the whole mount tree with open_tree",
        Evidence.PRINTED,
        (f'{UNSHARE_SNIPPET}\nsyscall(428, -100, b"/", 0x8001)\npwned()',),
        MOUNT_LAYERS,
    ),
    AttackProbe(
        "file_handle",
        "newer calls",
        "get the handle of a file, which opens it without a path",
        Evidence.PRINTED,
        (
            "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136)\n"
            "syscall(303, -100, W['shared_file'].encode(), handle, ctypes.byref(ctypes.c_int()), 0x200)\npwned()",
        ),
        SYSCALL_LAYERS | FILE_LAYERS,
        min_kernel=(6, 6),
    ),
    AttackProbe(
        "madvise_other",
        "newer calls",
        "page out the memory of a process of the host (process_madvise)",
        Evidence.PRINTED,
        ("syscall(440, syscall(434, W['canary'], 0), struct.pack('QQ', W['address'] & ~4095, 4096), 1, 20, 0)\npwned()",),
        DEBUG_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "supervise",
        "newer calls",
        "install a filter that answers system calls in place of the kernel (seccomp)",
        Evidence.PRINTED,
        (
            """
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
if os.fork() == 0:
    try:
        syscall(317, 1, 8, struct.pack("HxxxxxxP", 1, ctypes.addressof(code)))
        pwned()
    finally:
        os._exit(0)
os.wait()
""",
        ),
        SYSCALL_LAYERS,
    ),
)

OLDER = (
    AttackProbe(
        "compare_objects",
        "older calls",
        "compare its memory with that of a process of the host (kcmp)",
        Evidence.PRINTED,
        ("syscall(312, os.getpid(), W['canary'], 1, 0, 0)\npwned()",),
        DEBUG_LAYERS,
    ),
    AttackProbe(
        "segments",
        "older calls",
        "create 16-bit segments (modify_ldt)",
        Evidence.PRINTED,
        ("syscall(154, 1, struct.pack('IIII', 0, 0, 0xFFFF, 0x48), 16)\npwned()",),
        SYSCALL_LAYERS,
    ),
    AttackProbe(
        "personality",
        "older calls",
        "turn off address space randomization (personality)",
        Evidence.PRINTED,
        ("syscall(135, 0x40000)\npwned()",),
        SYSCALL_LAYERS,
    ),
    AttackProbe(
        "kernel_log",
        "older calls",
        "read the kernel log (syslog)",
        Evidence.PRINTED,
        ("box = ctypes.create_string_buffer(4096)\nif syscall(103, 3, box, 4096) > 0:\n    pwned()",),
        SYSCALL_LAYERS,
        needs_root=True,
    ),
    AttackProbe(
        "disk_priority",
        "older calls",
        "raise its I/O priority above that of all others (ioprio_set)",
        Evidence.PRINTED,
        ("syscall(251, 1, 0, 1 << 13)\npwned()",),
        SYSCALL_LAYERS,
        needs_root=True,
    ),
)

PROBES = (*NEWER, *OLDER)
