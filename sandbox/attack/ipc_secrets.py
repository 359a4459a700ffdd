"""Secrets in IPC objects of the host, as targets of attacks.

The objects are a System V shared memory segment, a System V message queue, a POSIX message queue
and a key in a kernel keyring.
"""

import contextlib
import ctypes
import os
import secrets
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
libc.syscall.restype = ctypes.c_long
IPC_CREAT, IPC_EXCL, IPC_RMID = 0o1000, 0o2000, 0
ADD_KEY, KEYCTL, JOIN_SESSION, SESSION, UNLINK = 248, 250, 1, -3, 9
MODE = 0o666


class MqAttributes(ctypes.Structure):
    """C structure mq_attr, which mq_open(3) uses."""

    _fields_ = (
        ("flags", ctypes.c_long),
        ("most", ctypes.c_long),
        ("size", ctypes.c_long),
        ("now", ctypes.c_long),
        ("pad", ctypes.c_long * 4),
    )


def _check_result(result: int, name: str) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def plant_secrets(stack: contextlib.ExitStack, secret: bytes) -> dict[str, Any]:
    """Create IPC objects that contain `secret`, and register their removal on `stack`.

    All users may read the objects. The returned dict contains the keys and names of the objects,
    which the code of attacks uses.
    """
    number = secrets.randbits(30)
    segment = _check_result(libc.shmget(number, 4096, IPC_CREAT | IPC_EXCL | MODE), "shmget")
    stack.callback(libc.shmctl, segment, IPC_RMID, None)
    where = libc.shmat(segment, None, 0)
    ctypes.memmove(where, secret, len(secret))
    libc.shmdt(ctypes.c_void_p(where))

    queue = _check_result(libc.msgget(number, IPC_CREAT | IPC_EXCL | MODE), "msgget")
    stack.callback(libc.msgctl, queue, IPC_RMID, None)
    _check_result(libc.msgsnd(queue, (1).to_bytes(8, "little") + secret, len(secret), 0), "msgsnd")

    name = f"/sandbox-attack-{number}".encode()
    before = os.umask(0)
    posix = _check_result(libc.mq_open(name, os.O_CREAT | os.O_RDWR, MODE, ctypes.byref(MqAttributes(0, 4, 256, 0))), "mq_open")
    os.umask(before)
    stack.callback(libc.mq_unlink, name)
    stack.callback(os.close, posix)
    _check_result(libc.mq_send(posix, secret, len(secret), 0), "mq_send")

    label = f"sandbox-attack-{number}"
    _check_result(libc.syscall(KEYCTL, JOIN_SESSION, None), "keyctl")  # a new session keyring instead of the login session's
    key = _check_result(libc.syscall(ADD_KEY, b"user", label.encode(), secret, len(secret), SESSION), "add_key")
    stack.callback(libc.syscall, KEYCTL, UNLINK, key, SESSION)
    return {"shm_key": number, "msg_key": number, "queue": name.decode()[1:], "key": label}
