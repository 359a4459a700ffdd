"""Definition of an attack: its code, its target layers and limits, and its success criterion."""

from dataclasses import dataclass, field
from enum import StrEnum


class Evidence(StrEnum):
    """Kind of evidence that an attack succeeded.

    If an effect is visible outside the box, the oracle checks the effect itself instead of the
    output of the code.
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
    """Attack and the settings of its control.

    Each entry of `calls` is the source code of one call; the calls run one after the other in one
    box. The control runs without the layers in `lifted_layers` and with the limits in
    `raised_limits`. The code limits its own effect, such as the number of processes it starts or
    the number of bytes it writes, so the control stays within the outer bounds (outer_bounds.py).
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

    A plain child process inherits the environment and the file descriptors of the server. A box
    inherits neither the environment nor the file descriptors, even without layers.
    """
    min_cores: int = 1
    """Minimum number of host cores that the attack needs to succeed."""
    needs_root: bool = False  # even without layers, the attack needs capabilities that an unprivileged user lacks
    min_kernel: tuple[int, int] = (5, 12)
    """First Linux version (major, minor) on which the attack can succeed."""
    has_long_timeout: bool = False
    """True if the run with all layers uses the same call timeout as the control.

    Slow attacks need a long timeout, because the layers, not the timeout, must stop the attack.
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
"""Source code that is prepended to each call, after the assignment of the oracle's facts to `W`.

`W` contains the marker in reverse order, so an attack that merely prints its source code does not
count as a success.
"""
