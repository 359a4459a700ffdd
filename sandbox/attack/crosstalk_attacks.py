"""Attacks through state that is shared by boxes and the host.

The shared state consists of files that all boxes and the host read, information from the kernel,
and the channel between each box and the pool.
"""

from megatron_rl_sandbox.attack.attack_probe import AttackProbe, Evidence

SECCOMP_LAYERS = frozenset({"seccomp"})
WATCH_SNIPPET = """
import select
poll = select.poll()
poll.register(watch, select.POLLIN)
end = time.monotonic() + 2 * W["patience_s"]
while time.monotonic() < end:
    if poll.poll(100) and {word} in os.read(watch, 65536):
        pwned()
        break
"""
CHANNEL_SNIPPET = """
for number in range(3, 64):
    try:
        with socket.socket(fileno=os.dup(number)) as channel:
            {ask}
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTSOCK):
            raise
"""
"""Source code that runs `{ask}` with `channel` set to the box's channel to the pool."""

CROSSTALK = (
    AttackProbe(
        "file_lock",
        "crosstalk",
        "detect the lock that the host holds on a file that all boxes read",
        Evidence.PRINTED,
        (
            """
import fcntl
try:
    fcntl.flock(os.open(W["locked_file"], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    pwned()
""",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "record_lock",
        "crosstalk",
        "query which process holds a record lock on it",
        Evidence.PRINTED,
        (
            """
import fcntl
wanted = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, 0, 0, 0, 0)
found = fcntl.fcntl(os.open(W["locked_file"], os.O_RDONLY), 36, wanted)
if struct.unpack("hhxxxxqqixxxx", found)[0] == fcntl.F_RDLCK:
    pwned()
""",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "lease",
        "crosstalk",
        "take a lease on it, which blocks every writer",
        Evidence.PRINTED,
        ('import fcntl\nfcntl.fcntl(os.open(W["locked_file"], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)\npwned()',),
        SECCOMP_LAYERS | {"drop_uid", "capabilities"},
        needs_root=True,
    ),
    AttackProbe(
        "inotify",
        "crosstalk",
        "watch which files the host opens, by name (inotify)",
        Evidence.PRINTED,
        (
            "watch = libc.inotify_init()\nif watch < 0 or libc.inotify_add_watch(watch, W['shared_folder'].encode(), 0x20) < 0:\n"
            "    raise OSError(ctypes.get_errno(), 'inotify')\n" + WATCH_SNIPPET.format(word='b"this.py"'),
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "dnotify",
        "crosstalk",
        "the same by a signal (dnotify)",
        Evidence.PRINTED,
        (
            """
import fcntl
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
fcntl.fcntl(os.open(W["shared_folder"], os.O_RDONLY), 1026, 1)
if signal.sigtimedwait([signal.SIGIO], W["patience_s"] * 2):
    pwned()
""",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "fanotify",
        "crosstalk",
        "the same with fanotify, which needs no privilege since Linux 5.13",
        Evidence.PRINTED,
        (
            "watch = syscall(300, 0x202, 0)\nsyscall(301, watch, 1, 0x20, -100, W['shared_file'].encode())\n"
            + WATCH_SNIPPET.format(word='b""'),
        ),
        SECCOMP_LAYERS,
        min_kernel=(5, 13),
    ),
)

INFORMATION = (
    AttackProbe(
        "host_name_seen",
        "information",
        "read the host's name",
        Evidence.PRINTED,
        ('if os.uname().nodename == W["host_name"] and socket.gethostname() == W["host_name"]:\n    pwned()',),
        frozenset({"ipc_ns"}),
    ),
    AttackProbe(
        "host_figures",
        "information",
        "the host's memory, load and number of processes",
        Evidence.PRINTED,
        (
            """
figures = ctypes.create_string_buffer(112)
syscall(99, figures)
if struct.unpack_from("QQQQQ", figures)[4] == W["host_memory"]:
    pwned()
""",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "pools_pidfd",
        "information",
        "get a pidfd of the pool's process from the channel, to wait for its exit",
        Evidence.PRINTED,
        (CHANNEL_SNIPPET.format(ask="struct.unpack('i', channel.getsockopt(socket.SOL_SOCKET, 77, 4))\n            pwned()"),),
        SECCOMP_LAYERS,
        min_kernel=(6, 5),
    ),
    AttackProbe(
        "pools_user",
        "information",
        "identify the process at the other end of the channel",
        Evidence.PRINTED,
        (
            CHANNEL_SNIPPET.format(
                ask="print(struct.unpack('3i', channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))\n            pwned()"
            ),
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "classic_filter",
        "information",
        "attach a classic BPF program to a socket, which the kernel compiles even if bpf(2) is blocked",
        Evidence.PRINTED,
        (
            """
one, other = socket.socketpair()
program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 65535))
one.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
pwned()
""",
        ),
        SECCOMP_LAYERS,
    ),
    AttackProbe(
        "list_mounts",
        "information",
        "list the mounts without /proc",
        Evidence.PRINTED,
        ("found = (ctypes.c_uint64 * 64)()\nsyscall(458, struct.pack('IIQQ', 24, 0, 2**64 - 1, 0), found, 64, 0)\npwned()",),
        SECCOMP_LAYERS,
        min_kernel=(6, 8),
    ),
)

PROBES = (*CROSSTALK, *INFORMATION)
