"""Allow-list of system calls, as a classic BPF program for seccomp(2) on x86-64.

- A call that is not listed here fails with EPERM, which libraries can handle.
- A call in KILLED_CALLS kills the process, so the result can report the call. Benign programs make
  none of these calls.
- clone3 fails with ENOSYS, because its flags are in memory, which a filter cannot read. glibc then
  falls back to clone, whose flags the filter checks.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import termios

from megatron_rl_sandbox import kernel

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOMEM, ENOSYS = 1, 12, 38
SECCOMP_SET_MODE_FILTER, SYS_SECCOMP = 1, 317
LOAD_WORD, JUMP_EQUAL, JUMP_BITS, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
"""Byte offsets in struct seccomp_data. The low half of each argument comes first."""

ALLOWED_CALLS = {
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "madvise": 28, "membarrier": 324,
    # files
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "pread64": 17, "pwrite64": 18,
    "readv": 19, "writev": 20, "access": 21, "pipe": 22, "dup": 32, "dup2": 33, "sendfile": 40, "fsync": 74,
    "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92,
    "fchown": 93, "lchown": 94, "umask": 95, "utime": 132, "mknod": 133, "statfs": 137, "fstatfs": 138, "getxattr": 191, "lgetxattr": 192,
    "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "getdents64": 217, "fadvise64": 221, "utimes": 235,
    "openat": 257, "mkdirat": 258, "mknodat": 259, "fchownat": 260, "futimesat": 261, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269, "splice": 275, "sync_file_range": 277,
    "utimensat": 280, "fallocate": 285, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "renameat2": 316,
    "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332, "close_range": 436, "openat2": 437, "faccessat2": 439,
    # waiting and events
    "poll": 7, "select": 23, "pause": 34, "nanosleep": 35, "epoll_create": 213, "clock_nanosleep": 230, "epoll_wait": 232,
    "epoll_ctl": 233, "pselect6": 270, "ppoll": 271, "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290, "epoll_create1": 291,
    "epoll_pwait2": 441, "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd": 282, "signalfd4": 289,
    # signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "kill": 62, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "tkill": 200, "tgkill": 234, "restart_syscall": 219,
    # processes and threads
    "sched_yield": 24, "fork": 57, "vfork": 58, "execve": 59, "exit": 60, "wait4": 61, "setpgid": 109, "getpgrp": 111, "setsid": 112,
    "getpgid": 121, "getsid": 124, "getpriority": 140, "setpriority": 141, "arch_prctl": 158, "futex": 202,
    "sched_getaffinity": 204, "set_tid_address": 218, "exit_group": 231, "waitid": 247, "set_robust_list": 273, "get_robust_list": 274,
    "getcpu": 309, "rseq": 334, "pidfd_open": 434, "futex_waitv": 449, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147,
    # identity, time and timers
    "getpid": 39, "uname": 63, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getgroups": 115, "getresuid": 118, "getresgid": 120, "capget": 125,
    "gettid": 186, "time": 201, "clock_gettime": 228, "clock_getres": 229, "getrandom": 318,
    "alarm": 37, "getitimer": 36, "setitimer": 38, "timer_create": 222, "timer_settime": 223, "timer_gettime": 224,
    "timer_getoverrun": 225, "timer_delete": 226,
    # sockets, for use with socketpair only: socket(2) is not allowed
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "recvmmsg": 299, "sendmmsg": 307,
}  # fmt: skip

KILLED_CALLS = {
    "ptrace": 101, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "init_module": 175, "delete_module": 176, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip

SOCKET_CALLS = {"connect": 42, "accept": 43, "bind": 49, "listen": 50, "getsockopt": 55, "accept4": 288}
"""Further calls that are allowed with sockets."""
SOCKET, SETSOCKOPT = 41, 54
SOCKET_FAMILIES = (socket.AF_INET, socket.AF_INET6)
"""Families of allowed sockets. Unix sockets would reach servers of the host that listen in a folder
which the box can read.
"""
SOCKET_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF and _EBPF

CLONE, CLONE3, SOCKETPAIR, PRCTL, IOCTL = 56, 435, 53, 157, 16
FCNTL, FLOCK, GETSOCKOPT = 72, 73, 55
SETRLIMIT, PRLIMIT64, SIGQUEUE, PIDFD_SIGNAL = 160, 302, 129, 424
RLIMIT_RTTIME = 15  # asm-generic/resource.h
PROTECTED_RLIMITS = (resource.RLIMIT_CPU, RLIMIT_RTTIME, resource.RLIMIT_CORE)
"""Resource limits that no process in a box may set.

If PID 1 of a PID namespace exceeds RLIMIT_CPU or RLIMIT_RTTIME, the kernel kills it. Code in the
namespace has no other means to kill PID 1, so the death of PID 1 would be diagnosed as the host's
fault. If the code changed RLIMIT_CORE from its value in confine.py, a dying box would start the
host's core dump handler.
"""
UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
PR_NAMES = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME and glibc's PR_SET_VMA
FIONCLEX, FIOCLEX = 0x5450, 0x5451
ALLOWED_IOCTLS = (termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, FIONCLEX, FIOCLEX)
F_GETPIPE_SZ, F_GET_SEALS = 1032, 1034
ALLOWED_FCNTLS = (
    fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS,
)  # fmt: skip
"""Allowed commands of fcntl(2).

Commands for locks, leases, directory watches (F_NOTIFY) and larger pipes are not allowed.
"""
SO_DOMAIN, SO_PROTOCOL = 39, 38
ALLOWED_SOCKET_OPTIONS = (socket.SO_TYPE, socket.SO_ERROR, socket.SO_SNDBUF, socket.SO_RCVBUF, socket.SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN)
"""Allowed options of getsockopt(2); options that identify the peer are not allowed.

setsockopt(2) is not allowed at all, because it can attach filters and enlarge buffers.
"""
TYPE_MASK = 0xF  # removes SOCK_CLOEXEC and SOCK_NONBLOCK from socketpair's second argument

Instruction = tuple[int, int, int, int]
"""BPF instruction: (code, jump offset if true, jump offset if false, operand)."""


def _return_value(value: int) -> Instruction:
    return (RETURN, 0, 0, value)


def _load_argument(index: int) -> Instruction:
    return (LOAD_WORD, 0, 0, ARGUMENTS_OFFSET + 8 * index)


def _allow_if_among(number: int, *, index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow call `number` only if the low half of its argument `index` is in `values`."""
    tests = [(JUMP_EQUAL, len(values) - 1 - place, 1 if place == len(values) - 1 else 0, value) for place, value in enumerate(values)]
    body = [_load_argument(index), *tests, _return_value(ALLOW), _return_value(ERRNO | EPERM)]
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def _clone_rule() -> list[Instruction]:
    body = [_load_argument(0), (JUMP_BITS, 0, 1, kernel.CLONE_NEW_ANY), _return_value(ERRNO | EPERM), _return_value(ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), CLONE), *body]


def _socketpair_rule() -> list[Instruction]:
    """Allow only Unix stream sockets, because a datagram socket could send to any address."""
    body = [
        _load_argument(0),
        (JUMP_EQUAL, 0, 4, socket.AF_UNIX),
        _load_argument(1),
        (AND, 0, 0, TYPE_MASK),
        (JUMP_EQUAL, 0, 1, socket.SOCK_STREAM),
        _return_value(ALLOW),
        _return_value(ERRNO | EPERM),
    ]
    return [(JUMP_EQUAL, 0, len(body), SOCKETPAIR), *body]


def _mmap_rule() -> list[Instruction]:
    """Refuse shared anonymous memory.

    No process owns this memory, so only a control group counts it.
    """
    body = [
        _load_argument(3),
        (JUMP_BITS, 0, 2, mmap.MAP_ANONYMOUS),
        (JUMP_BITS, 0, 1, mmap.MAP_SHARED),
        _return_value(ERRNO | ENOMEM),
        _return_value(ALLOW),
    ]
    return [(JUMP_EQUAL, 0, len(body), ALLOWED_CALLS["mmap"]), *body]


def _deny_if_among(number: int, *, index: int, values: tuple[int, ...], unless_null: int | None = None) -> list[Instruction]:
    """Refuse call `number` if the low half of its argument `index` is in `values`.

    `unless_null` is None or the index of a pointer argument. If this argument is null, the call is
    allowed.
    """
    tests = [(JUMP_EQUAL, len(values) - place, 0, int(value)) for place, value in enumerate(values)]
    body = [_load_argument(index), *tests, _return_value(ALLOW)]
    if unless_null is not None:
        low = _load_argument(unless_null)
        high = (LOAD_WORD, 0, 0, low[3] + 4)
        body += [low, (JUMP_EQUAL, 0, 3, 0), high, (JUMP_EQUAL, 0, 1, 0), _return_value(ALLOW)]
    body.append(_return_value(ERRNO | EPERM))
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def _forged_signal_rules() -> list[Instruction]:
    """Refuse forged kernel signals, with which PID 1 of a PID namespace could kill or stop itself.

    A process may send itself a signal with a siginfo that claims to be from the kernel (SI_KERNEL).
    The kernel accepts this claim and delivers even SIGKILL and SIGSTOP to PID 1 (kernel/signal.c,
    do_rt_sigqueueinfo and send_signal_locked). kill(2) and its variants stay allowed, because PID 1
    is immune to them. The returned rules also deny changes to the limits in PROTECTED_RLIMITS.
    """
    code = _deny_if_among(SETRLIMIT, index=0, values=PROTECTED_RLIMITS) + _deny_if_among(
        PRLIMIT64, index=1, values=PROTECTED_RLIMITS, unless_null=2
    )
    return (
        code
        + _deny_if_among(SIGQUEUE, index=1, values=UNCATCHABLE)
        + _deny_if_among(PIDFD_SIGNAL, index=1, values=UNCATCHABLE, unless_null=2)
    )


def _file_lock_rules() -> list[Instruction]:
    """Refuse file locks, file watches, and queries that identify the peer of a socket.

    Boxes and the host read the same files. With locks and watches on these files, boxes could block
    or observe each other and the host. flock fails with ENOSYS, which is also the error on file
    systems without locks. HDF5 and other libraries can handle this error.
    """
    return [
        (JUMP_EQUAL, 0, 1, FLOCK),
        _return_value(ERRNO | ENOSYS),
        *_allow_if_among(FCNTL, index=1, values=ALLOWED_FCNTLS),
        *_allow_if_among(GETSOCKOPT, index=2, values=ALLOWED_SOCKET_OPTIONS),
    ]


def build_filter(*, shared_memory: bool, has_sockets: bool = False) -> list[Instruction]:
    """Return the BPF program of the filter.

    If `shared_memory` is False, the filter refuses shared anonymous memory. If `has_sockets` is
    True, it allows the calls in SOCKET_CALLS, and sockets of the families in SOCKET_FAMILIES.
    """
    code: list[Instruction] = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        _return_value(KILL_PROCESS),
        (LOAD_WORD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        _return_value(KILL_PROCESS),
    ]
    if not shared_memory:
        code += _mmap_rule()
    if has_sockets:
        for number in SOCKET_CALLS.values():
            code += [(JUMP_EQUAL, 0, 1, number), _return_value(ALLOW)]
        code += _allow_if_among(SOCKET, index=0, values=SOCKET_FAMILIES)
        code += _deny_if_among(SETSOCKOPT, index=2, values=SOCKET_FILTERS)
    for verdict, numbers in ((ALLOW, ALLOWED_CALLS), (KILL_PROCESS, KILLED_CALLS)):
        for number in numbers.values():
            code += [(JUMP_EQUAL, 0, 1, number), _return_value(verdict)]
    code += [(JUMP_EQUAL, 0, 1, CLONE3), _return_value(ERRNO | ENOSYS)]
    code += _clone_rule() + _socketpair_rule() + _forged_signal_rules() + _file_lock_rules()
    code += _allow_if_among(PRCTL, index=0, values=PR_NAMES) + _allow_if_among(IOCTL, index=1, values=ALLOWED_IOCTLS)
    return [*code, _return_value(ERRNO | EPERM)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(*, shared_memory: bool, has_sockets: bool = False) -> None:
    """Install the filter permanently on this thread and its descendants.

    The arguments are those of `build_filter`. The process must have set no_new_privs.

    Raises:
        OSError: The kernel refuses the filter, or this machine is not x86-64.
    """
    if os.uname().machine != "x86_64":
        raise OSError(ENOSYS, f"the system call table is for x86-64, but this machine is {os.uname().machine}")
    code = build_filter(shared_memory=shared_memory, has_sockets=has_sockets)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    wanted = _Program(length=len(code), instructions=packed)
    kernel.syscall(SYS_SECCOMP, SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(wanted), name="seccomp")
