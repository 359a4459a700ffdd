"""Runs a command, and terminates its whole process tree when this script's stdin closes.

usage: supervisor.py [--remove FOLDER] [--pipe FD] COMMAND ...

Standard input is a pipe from the parent process. The kernel closes the pipe when the parent dies,
even if the parent is killed. With --pipe, the inherited file descriptor FD is that pipe, and the
command reads the supervisor's standard input. The supervisor also adopts and kills descendants that
the command leaves behind (prctl(2), PR_SET_CHILD_SUBREAPER). With --remove, it then removes a
folder, even if the parent was killed. The exit code of the supervisor is the command's exit code.
This script imports nothing from this project.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

TERM_GRACE_S = 10.0
"""Number of seconds between SIGTERM and SIGKILL."""
STOP_TIMEOUT_S = 3 * TERM_GRACE_S
"""Timeout in seconds for a supervisor to end its command (up to TERM_GRACE_S) and then the
remaining descendants of the command (up to TERM_GRACE_S again).
"""
TORCHRUN_PREFIXES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_",
    "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_",
)  # fmt: skip
"""Prefixes of the environment variables that torchrun sets for a rank. The command should
not inherit these variables, because it is not a rank.
"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def supervise(command: list[str]) -> int:
    """Run a command until it exits or the pipe of the parent closes; return its exit code."""
    pipe, stdin, folder = sys.stdin.fileno(), subprocess.DEVNULL, ""
    if command[0] == "--remove":
        folder, command = command[1], command[2:]
    if command[0] == "--pipe":
        pipe, stdin, command = int(command[1]), None, command[2:]
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # only the pipe ends it; SIG_IGN would be inherited
        signal.signal(number, lambda number, frame: None)
    service = subprocess.Popen(command, stdin=stdin, start_new_session=True, preexec_fn=_die_with_supervisor)
    ended = os.pidfd_open(service.pid)
    ready, _, _ = select.select([pipe, ended], [], [])
    if ended not in ready:
        service.terminate()
        with suppress(subprocess.TimeoutExpired):
            service.wait(TERM_GRACE_S)
    service.kill()
    code = service.wait()
    _kill_descendants()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    deadline = time.monotonic() + TERM_GRACE_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def _die_with_supervisor() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
