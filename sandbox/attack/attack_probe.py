"""Definition of an attack: its code, the layers and limits it targets, and its evidence."""

from dataclasses import dataclass, field
from enum import StrEnum


class Evidence(StrEnum):
    """Evidence that an attack succeeded.

    Effects that are visible outside the box are checked there, not in the output of the code.
    """

    PRINTED = "told"  # the code printed the oracle's marker, which it does only after success
    SECRET = "secret"  # the output contains a secret of the host, which the code does not know
    REACHED = "reached"  # a listener of the host received the marker
    CHANGED = "changed"  # a file, process or setting of the host has changed
    SURVIVED = "survived"  # a process of the box is alive after the box was closed
    FLOODED = "flooded"  # more output was returned than the limits allow
    HOST_BLAMED = "blamed"  # the host was reported to be at fault for an action of the code
    OVERWRITTEN = "overwritten"  # the input image has changed


@dataclass(frozen=True)
class AttackProbe:
    """One attack.

    `calls` run one after the other in one box. The control runs without `lifted_layers` and with
    `raised_limits`. A probe limits its own effect (number of processes, bytes), so that its control
    stays within the outer bounds (outer.py).
    """

    name: str
    group: str
    aim: str
    evidence: Evidence
    calls: tuple[str, ...]
    lifted_layers: frozenset[str] = frozenset()
    raised_limits: dict[str, float] = field(default_factory=dict)
    uses_plain_child: bool = False
    """True if the control is a plain child process of the server, as in simple code runners.

    No combination of layers lets a box inherit the environment and descriptors that such a child
    inherits.
    """
    min_cores: int = 1
    """Number of cores the host must have for the attack to succeed."""
    needs_root: bool = False  # even without layers it needs capabilities that an unprivileged user lacks
    min_kernel: tuple[int, int] = (5, 12)
    """First Linux version on which the attack can succeed."""
    has_long_timeout: bool = False
    """True if a call with all layers gets the same timeout as in the control.

    The attack is slow, and must be stopped by other means than the timeout.
    """


PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def pwned(note=""):
    print(W["drow"][::-1], note, flush=True)
def syscall(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
"""Source that precedes every call, after `W = {...}` with the oracle's facts.

The marker is reversed in the facts, so that an echo of the source is not taken for success.
"""
