"""Linux system calls that are not available in Python 3.11, called through libc.

If a system call fails, the function raises an OSError that names the call. The constants are from
the Linux uapi headers.
"""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEW_ANY = 0x7E020000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
SYS_MOUNT_SETATTR = 442  # Linux 5.12; same number on every architecture

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAP = 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check_result(value: int, *, name: str, path: str = "") -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", path or None)
    return value


def syscall(number: int, *arguments: object, name: str) -> int:
    """Make a system call by number and return its result.

    Integer arguments are passed as C longs. Pass pointers as ctypes objects or bytes. `name` is
    used in the error message.
    """
    raw = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _check_result(_libc.syscall(ctypes.c_long(number), *raw), name=name)


def unshare(flags: int) -> None:
    """Move this process into new namespaces, selected by CLONE_NEW* flags."""
    _check_result(_libc.unshare(flags), name=f"unshare({flags:#x})")


def set_host_name(name: str) -> None:
    """Set the host name and the domain name (see uname(2)) of this UTS namespace to `name`."""
    _check_result(_libc.sethostname(name.encode(), len(name)), name="sethostname")
    _check_result(_libc.setdomainname(name.encode(), len(name)), name="setdomainname")


def setns(descriptor: int, kind: int) -> None:
    """Enter the existing namespace that `descriptor` refers to; `kind` is its CLONE_NEW* flag."""
    _check_result(_libc.setns(descriptor, kind), name="setns")


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system at `target`. With MS_BIND, bind-mount the path `source` instead."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check_result(result, name="mount", path=target)


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """Unmount a file system. By default, even a file system in use is detached at once."""
    _check_result(_libc.umount2(target.encode(), flags), name="umount", path=target)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace, and move the previous root to `old`."""
    syscall(SYS_PIVOT_ROOT, new.encode(), old.encode(), name="pivot_root")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def harden_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes (read-only, nosuid, ...) to a mount, by default recursively.

    Unlike a remount, this function keeps attributes that were locked when the mount was inherited
    from an outer mount namespace.
    """
    wanted = _MountAttributes(attr_set=attributes)
    arguments = (AT_FDCWD, target.encode(), AT_RECURSIVE if recursive else 0, ctypes.byref(wanted), ctypes.sizeof(wanted))
    syscall(SYS_MOUNT_SETATTR, *arguments, name=f"mount_setattr({target})")


def prctl(option: int, *arguments: int) -> None:
    """Set an attribute of this process, with at most four `arguments`."""
    padded = [ctypes.c_ulong(item) for item in (*arguments, 0, 0, 0, 0)[:4]]
    _check_result(_libc.prctl(option, *padded), name=f"prctl({option})")


def drop_capabilities() -> None:
    """Empty all five capability sets of this process permanently.

    prctl(2) empties the bounding and ambient sets, and capset(2), with version 3 of its header,
    empties the effective, permitted and inheritable sets.
    """
    for capability in range(LAST_CAP + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            # EINVAL: the number is above the kernel's last capability. EPERM: the process lacks
            # CAP_SETPCAP; this is safe, because exec gains no capability under no_new_privs.
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check_result(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), name="capset")


def close_from(lowest: int) -> None:
    """Close all file descriptors from `lowest` up."""
    os.closerange(lowest, 1 << 20)
