"""Tests the seccomp filter: its table against the kernel's header, and its program with an
interpreter that executes it as the kernel would."""

import re
import socket
from pathlib import Path

import pytest

from megatron_rl_sandbox import seccomp

HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]
EPERM, ENOSYS = seccomp.ERRNO | 1, seccomp.ERRNO | 38


def execute(number: int, *arguments: int, arch: int = seccomp.AUDIT_ARCH_X86_64, shared_memory: bool = True) -> int:
    """Execute the filter on a struct seccomp_data and return its verdict. Supports the six
    instructions of classic BPF that the filter uses."""
    words = {seccomp.NUMBER_OFFSET: number, seccomp.ARCHITECTURE_OFFSET: arch}
    for index in range(6):
        value = arguments[index] if index < len(arguments) else 0
        words[seccomp.ARGUMENTS_OFFSET + 8 * index], words[seccomp.ARGUMENTS_OFFSET + 8 * index + 4] = value & 0xFFFFFFFF, value >> 32
    place, accumulator = 0, 0
    program = seccomp.build_filter(shared_memory=shared_memory)
    while True:
        code, yes, no, operand = program[place]
        place += 1
        if code == 0x20:
            accumulator = words[operand]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return operand
        else:
            true = {0x15: accumulator == operand, 0x45: bool(accumulator & operand), 0x35: accumulator >= operand}[code]
            place += yes if true else no


def test_numbers_are_the_kernels():
    """The numbers of system calls are those of the kernel's header. Calls that are not listed are
    refused with EPERM."""
    header = next((path for path in HEADERS if path.exists()), None)
    if header is None:
        pytest.skip("no linux headers on this host")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    table = {
        **seccomp.ALLOWED_CALLS,
        **seccomp.KILLED_CALLS,
        "clone": seccomp.CLONE,
        "clone3": seccomp.CLONE3,
        "prctl": seccomp.PRCTL,
        "ioctl": seccomp.IOCTL,
        "setrlimit": seccomp.SETRLIMIT,
        "prlimit64": seccomp.PRLIMIT64,
        "rt_sigqueueinfo": seccomp.SIGQUEUE,
        "pidfd_send_signal": seccomp.PIDFD_SIGNAL,
        "fcntl": seccomp.FCNTL,
        "flock": seccomp.FLOCK,
        "getsockopt": seccomp.GETSOCKOPT,
    }
    assert {name: known[name] for name in table} == table
    assert not seccomp.ALLOWED_CALLS.keys() & seccomp.KILLED_CALLS.keys()
    listed = {*table.values(), seccomp.SOCKETPAIR}
    for number in range(500):
        verdict = execute(number)
        expected = (
            seccomp.ALLOW
            if number in seccomp.ALLOWED_CALLS.values()
            else seccomp.KILL_PROCESS
            if number in seccomp.KILLED_CALLS.values()
            else EPERM
        )
        assert verdict == expected or number in listed - set(seccomp.ALLOWED_CALLS.values()) - set(seccomp.KILLED_CALLS.values()), number


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        ((seccomp.CLONE, 0x1200011), seccomp.ALLOW),  # fork, as glibc calls it
        ((seccomp.CLONE, 0x3D0F00), seccomp.ALLOW),  # a thread
        *[((seccomp.CLONE, flag | 17), EPERM) for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)],
        ((seccomp.CLONE3, 0), ENOSYS),
        ((seccomp.SOCKETPAIR, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), seccomp.ALLOW),
        ((seccomp.SOCKETPAIR, socket.AF_UNIX, socket.SOCK_DGRAM), EPERM),
        ((seccomp.SOCKETPAIR, socket.AF_INET, socket.SOCK_STREAM), EPERM),
        ((41, socket.AF_UNIX, socket.SOCK_STREAM), EPERM),
        ((seccomp.PRCTL, 15), seccomp.ALLOW),
        ((seccomp.PRCTL, 1), EPERM),  # PR_SET_PDEATHSIG would let a box outlive its zygote
        ((seccomp.IOCTL, 0, 0x5401), seccomp.ALLOW),
        ((seccomp.IOCTL, 0, 0x5412), EPERM),  # TIOCSTI types into a terminal
        *[((seccomp.SETRLIMIT, kind, 0x1000), EPERM if kind in (0, 4, 15) else seccomp.ALLOW) for kind in range(16)],
        *[((seccomp.PRLIMIT64, 7, kind, 0x1000), EPERM if kind in (0, 4, 15) else seccomp.ALLOW) for kind in range(16)],
        *[((seccomp.PRLIMIT64, 7, kind, 0), seccomp.ALLOW) for kind in range(16)],  # only reads the limit
        ((seccomp.PRLIMIT64, 7, 0, 1 << 32), EPERM),  # a structure at an address whose low half is zero
        ((seccomp.PRLIMIT64, 7, 0x100000000, 0x1000), EPERM),  # the kernel too reads only the low half, an unsigned int
        *[((seccomp.SIGQUEUE, 1, number, 0x1000), EPERM if number in (9, 19) else seccomp.ALLOW) for number in range(1, 65)],
        *[((seccomp.PIDFD_SIGNAL, 5, number, 1 << 32), EPERM if number in (9, 19) else seccomp.ALLOW) for number in range(1, 65)],
        ((seccomp.PIDFD_SIGNAL, 5, 9, 0), seccomp.ALLOW),
        *[((72, 9, command), seccomp.ALLOW) for command in (0, 1, 2, 3, 4, 1030, 1032, 1034)],  # dup, flags, pipe size, get seals
        *[((72, 9, command), EPERM) for command in (5, 6, 7, 36, 37, 38)],  # record locks, per process and per open file
        *[((72, 9, command), EPERM) for command in (8, 10, 1024, 1026, 1031, 1033)],  # owner, signal, lease, watch, wider pipe, seals
        ((73, 9, 2), ENOSYS),
        *[((55, 9, 1, option), seccomp.ALLOW) for option in (3, 4, 7, 8, 30, 38, 39)],
        *[((55, 9, 1, option), EPERM) for option in (17, 26, 31, 59, 77)],  # peer's credentials, filter, label, groups, pidfd
        *[((54, 9, 1, option), EPERM) for option in (7, 16, 26, 50, 76)],  # setsockopt: buffers, PASSCRED, filters, PASSPIDFD
        *[((number, 0), EPERM) for number in (27, 99, 203, 253, 254, 255, 294, 300, 301)],
        ((0x40000000, 0), seccomp.KILL_PROCESS),  # x32's read
        ((10_000, 0), EPERM),
    ],
)
def test_calls_that_depend_on_their_arguments(call: tuple[int, ...], verdict: int):
    """The verdict on a call that depends on its arguments equals the hand-made one."""
    assert execute(*call) == verdict


def test_other_machines_calls_are_death():
    """A system call of another architecture kills the process."""
    assert execute(0, arch=0x40000003) == seccomp.KILL_PROCESS  # i386's restart_syscall by the number of read


@pytest.mark.parametrize("flags", range(0x40))
def test_without_a_control_group_shared_memory_has_a_file(flags: int):
    """Without a control group, shared anonymous mappings are refused with ENOMEM. In mmap(2),
    MAP_SHARED is 1, MAP_SHARED_VALIDATE 3, MAP_PRIVATE 2 and MAP_ANONYMOUS 0x20."""
    refused = flags & 0x20 and flags & 0x3 in (1, 3)
    assert execute(9, 0, 4096, 3, flags, shared_memory=False) == (seccomp.ERRNO | 12 if refused else seccomp.ALLOW)
    assert execute(9, 0, 4096, 3, flags) == seccomp.ALLOW
    assert execute(0, 0, 4096, 3, flags, shared_memory=False) == seccomp.ALLOW
    assert execute(165, shared_memory=False) == seccomp.KILL_PROCESS
