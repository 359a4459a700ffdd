"""A command under its keeper (supervisor.py), so that none is left however the run dies, and the log of what it says."""

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_rl.io.bounded_files import read_tail
from megatron_rl.services import supervisor
from sandbox.token import USER_KEY_VARIABLES

STOP_TIMEOUT_S = 3 * supervisor.TERM_GRACE_S
"""What a keeper may take to end its server (once TERMINATE_TIMEOUT_S), and what that leaves behind (once more)."""
MAX_LOG_TAIL_CHARS = 300
"""Of the last line of a log."""
TORCHRUN_PREFIXES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_",
    "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_",
)  # fmt: skip
"""Beginnings of the variables that tell a rank its place: a server is no rank."""


class SupervisedProcess:
    """One process with all that it starts."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as said:
            said.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
            said.flush()
            self._log_start = said.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *command], stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._supervisor.poll()

    def log_tail(self) -> str:
        """The end of what it has logged, which is told on one line."""
        lines = read_tail(self._log, start=self._log_start).strip().splitlines()
        return f"{self._log} ends: {lines[-1].strip()[:MAX_LOG_TAIL_CHARS]}" if lines else f"{self._log} has no word of it yet"

    def stop(self) -> None:
        """Ask it to end; what does not is ended."""
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a keeper that hangs ends nobody
            self.kill()

    def kill(self) -> None:
        """At once."""
        if self._supervisor.poll() is None:
            kill_process_tree(psutil.Process(self._supervisor.pid))
        self._supervisor.wait()


def kill_process_tree(root: psutil.Process) -> None:
    """A process and all below it, which it did not end itself."""
    for process in (*root.children(recursive=True), root):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def make_environment(base: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Of a server, from the run's: without its place among ranks and the user's keys, and with its share of the GPUs that the run sees."""
    kept = {name: value for name, value in base.items() if not name.startswith(TORCHRUN_PREFIXES) and name not in USER_KEY_VARIABLES}
    if gpus:
        visible = [number for number in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    return kept


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
