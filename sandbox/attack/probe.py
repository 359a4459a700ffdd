"""One attack: the code that a policy might write, the layers and limits it attacks, and what counts as its success."""

from dataclasses import dataclass, field
from enum import StrEnum


class Evidence(StrEnum):
    """How a witness sees that an attack succeeded. Whatever can be seen from outside the box is not taken from what the code prints."""

    PRINTED = "told"  # the code printed the witness's word, which it does only once it got what it wanted
    SECRET = "secret"  # a secret of the host, unknown to the code, is in what came back
    REACHED = "reached"  # a listener of the host heard the word
    CHANGED = "changed"  # a file, a process or a setting of the host is not what it was
    SURVIVED = "survived"  # a process of the box is alive after the call that should have ended it
    FLOODED = "flooded"  # more came back than the limits allow
    HOST_BLAMED = "blamed"  # the host was told to be at fault for what the code did
    OVERWRITTEN = "overwritten"  # the input image is not what it was


@dataclass(frozen=True)
class AttackProbe:
    """`calls` are run one after the other in one box; `lifted_layers` names the layers and `raised` the limits that the control does
    without.

    A probe bounds itself (so many processes, so many bytes): its control needs no more than the outer bounds give.
    """

    name: str
    group: str
    aim: str
    evidence: Evidence
    calls: tuple[str, ...]
    lifted_layers: frozenset[str] = frozenset()
    raised_limits: dict[str, float] = field(default_factory=dict)
    uses_plain_child: bool = False
    """The control is a plain child process of the server, as others run code: no switch of ours lets a box inherit what that inherits."""
    min_cores: int = 1
    """So many of the host are needed to succeed."""
    needs_root: bool = False  # even without layers this takes capabilities that an unprivileged user lacks
    min_kernel: tuple[int, int] = (5, 12)
    """The first Linux on which it can succeed."""
    has_long_timeout: bool = False
    """It has as long for a call with all layers as its control has: that it is slow is not what is to hold it."""


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
"""In front of every call, after `W = {...}`, what the witness tells. Its word stands there backwards: an echo of the code is no success."""
