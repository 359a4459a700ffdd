"""Server side of process_pool.py: forks a process for each channel that the pool sends.

A server module loads its libraries, then calls `fork_processes`. When the server starts to fork, it
sends one byte on its control socket. To request a process, the pool sends one byte and the file
descriptor of the process's channel (SCM_RIGHTS).

The server ends when the control socket is closed or the parent process of the server changes. The
kernel kills the forked processes when the server ends. This module does not import torch.
"""

import ctypes
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

PR_SET_PDEATHSIG = 1
READY_BYTE = b"r"
PARENT_POLL_S = 1.0
"""Interval in seconds between checks of the parent process."""


@contextmanager
def kill_after(seconds: float) -> Iterator[None]:
    """End this process if the block takes more than `seconds` seconds.

    The kernel enforces the limit with SIGALRM, which has no handler, even while C code runs.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class RequestChannel:
    """Process side of a channel, which carries one JSON object per line.

    If an exception is raised inside the `with` block, the channel sends the error and the process
    exits, because its state may be corrupt. The process also exits at the end of the block.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rb")
        self.channel = channel

    def send(self, answer: Mapping[str, object]) -> None:
        """Send one answer as a line of JSON."""
        self.channel.sendall(json.dumps(answer).encode() + b"\n")

    def __enter__(self) -> "RequestChannel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is not None and not issubclass(kind, ConnectionError):
                self.send({"fault": f"{kind.__name__}: {error}"})
        finally:
            os._exit(0 if kind is None else 1)


def fork_processes(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Fork a process for each channel that arrives on the control socket; it calls `serve`.

    The function returns when the control socket is closed or the parent process changes.
    """
    control.sendall(READY_BYTE)
    parent, server = os.getppid(), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes
    while os.getppid() == parent:
        if not select.select([control], [], [], PARENT_POLL_S)[0]:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a process may wait for processes of its own
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                serve(socket.socket(fileno=descriptors[0]))
            os._exit(1)
        os.close(descriptors[0])
