"""Runs a command under a supervisor, and logs the command's output.

The supervisor (supervisor.py) terminates the command when the run ends, even after a crash.
"""

import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_rl import supervisor
from megatron_rl.io.bounded_files import read_tail
from megatron_rl.supervisor import STOP_TIMEOUT_S, TORCHRUN_PREFIXES
from megatron_rl_sandbox.token import USER_KEY_VARIABLES

MAX_LOG_TAIL_CHARS = 300
"""Maximum number of characters that an error message quotes from the last line of a log."""

CONNECTION_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and the last port that the kernel gives to outgoing connections."""
LOWEST_SERVER_PORT, MAX_PORTS_TRIED = 10_000, 20


class SupervisedProcess:
    """Process that is terminated together with all its descendants."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        """Start `command` with this environment; its output is appended to `log`."""
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
        """Return the exit code; None while the process runs."""
        return self._supervisor.poll()

    def log_tail(self) -> str:
        """Return the last line of the process's output, for an error message."""
        lines = read_tail(self._log, start=self._log_start).strip().splitlines()
        return (
            f"last line of {self._log}: {lines[-1].strip()[:MAX_LOG_TAIL_CHARS]}"
            if lines
            else f"{self._log} contains no output of the process yet"
        )

    def stop(self) -> None:
        """Terminate the process gracefully; kill the process if it does not exit in time."""
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a hanging supervisor does not end its command
            self.kill()

    def kill(self) -> None:
        """Kill the process and its descendants immediately."""
        if self._supervisor.poll() is None:
            kill_process_tree(psutil.Process(self._supervisor.pid))
        self._supervisor.wait()


def kill_process_tree(root: psutil.Process) -> None:
    """Kill a process and all its descendants."""
    for process in (*root.children(recursive=True), root):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def make_environment(base: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a server, derived from the run's environment `base`.

    torchrun's variables and the user's keys are removed. CUDA_VISIBLE_DEVICES is set to the
    server's GPUs; `gpus` are indices into the GPUs that are visible to the run.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(TORCHRUN_PREFIXES) and name not in USER_KEY_VARIABLES}
    if gpus:
        visible = [number for number in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    return kept


def is_port_free(port: int) -> bool:
    """Return True if no other process uses the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_free_port(host: str) -> int:
    """Return a port that is currently free on this host.

    Ports of outgoing connections are avoided, since a connection could take the port before the
    server binds it. If the kernel may use every port for connections, it chooses the port.

    Raises:
        OSError: The host is not an address of this node.
    """
    first_connection_port = int(CONNECTION_PORTS_FILE.read_text().split()[0])
    candidates = range(LOWEST_SERVER_PORT, first_connection_port)
    tried = random.SystemRandom().sample(candidates, min(len(candidates), MAX_PORTS_TRIED))
    for port in tried:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
