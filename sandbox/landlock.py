"""File access rules for a process and its children, set with Landlock (Linux 5.13 and later).

The rules apply to every user, including root. Linux 6.7 and later can also restrict TCP. Linux 6.12
and later can also restrict signals. Access rights that the running kernel does not support are not
restricted. The constants are from include/uapi/linux/landlock.h.
"""

import ctypes
import os
from collections.abc import Sequence

from megatron_rl_sandbox import kernel

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
MAKE_DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
"""File access rights introduced by each Landlock ABI version, keyed by version."""
TCP_RIGHTS = 1 | 2  # bind and connect, ABI 4
SCOPE_FLAGS = 1 | 2  # abstract Unix sockets and signals, ABI 6


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def read_abi_version() -> int:
    """Return the kernel's Landlock ABI version (1 or higher).

    Raises:
        OSError: The kernel does not support Landlock.
    """
    return kernel.syscall(CREATE_RULESET, 0, 0, VERSION_FLAG, name="landlock_create_ruleset")


def restrict_paths(*, readable: Sequence[str], writable: Sequence[str], restricts_tcp: bool = True) -> None:
    """Restrict the files that this process and its children can access.

    Below the `readable` paths, the processes can read and execute files. Below the `writable`
    paths, the processes have all access rights except creating device files and using ioctl(2) on
    devices. If the kernel supports it, the rules also deny TCP (unless `restricts_tcp` is False),
    signals to outside processes, and connections to abstract Unix sockets of outside processes. The
    process must have no_new_privs or CAP_SYS_ADMIN. Paths that do not exist are skipped.
    """
    version = read_abi_version()
    handled = 0
    for since, rights in RIGHTS_BY_ABI.items():
        handled |= rights if version >= since else 0
    ruleset = _Ruleset(files=handled, net=TCP_RIGHTS if version >= 4 and restricts_tcp else 0, scoped=SCOPE_FLAGS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = kernel.syscall(CREATE_RULESET, ctypes.byref(ruleset), size, 0, name="landlock_create_ruleset")
    try:
        for path in readable:
            _add_path_rule(rules, path=path, rights=(EXECUTE | READ_FILE | READ_DIR) & handled)
        for path in writable:
            _add_path_rule(rules, path=path, rights=handled & ~MAKE_DEVICES & ~IOCTL_DEV)
        kernel.syscall(RESTRICT_SELF, rules, 0, name="landlock_restrict_self")
    finally:
        os.close(rules)


def _add_path_rule(rules: int, *, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(allowed=rights if os.path.isdir(path) else rights & FILE_RIGHTS, parent=parent)
        kernel.syscall(ADD_RULE, rules, RULE_PATH_BENEATH, ctypes.byref(rule), 0, name=f"landlock_add_rule({path})")
    finally:
        os.close(parent)
