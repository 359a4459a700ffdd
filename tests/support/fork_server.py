"""Starts processes without the cost of importing packages. They are forked from a process that has
imported what every run imports, which takes 8 s of CPU time once.

For a script, nothing differs from `python SCRIPT ARGUMENTS...` or from torchrun: it is `__main__`,
with its own arguments, environment, folder and session; it imports this project's modules itself,
and its output goes to a file. Tests of fresh interpreters and of torchrun itself use processes
started without this module (tests/conftest.py: start).
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
TERMINATE_TIMEOUT_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_outputs = tempfile.TemporaryDirectory(prefix="forked_")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.fork_server_preload"])


class Process:
    """A started process with part of the interface of subprocess.Popen."""

    def __init__(self, script: str | Path, *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
        """Start the script.

        `environment` is added to this process's own environment, and stderr is redirected to
        stdout.
        """
        descriptor, name = tempfile.mkstemp(dir=_outputs.name)
        os.close(descriptor)
        self.output = Path(name)
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
        self.args = [str(script), *map(str, arguments)]
        self._process = _context.Process(target=_run_child, args=(self.args, str(cwd), given, name))
        self._process.start()
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, output=self.output.read_text(errors="replace"))
        return self.output.read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def terminate(self, *, deadline: float) -> None:
        """Send SIGTERM, and SIGKILL at the deadline, which is a value of time.monotonic()."""
        self._process.terminate()
        self._process.join(max(0.0, deadline - time.monotonic()))
        self.kill()


def run_script(script: str | Path, *arguments: object, timeout_s: float, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run one process until it exits."""
    process = Process(script, *arguments, cwd=cwd)
    try:
        output, _ = process.communicate(timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_world(num_ranks: int, script: str | Path, *arguments: object, environment: Mapping[str, str] | None = None) -> list[Process]:
    """Start as many processes as torchrun would start, with its environment variables."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    given = {**place, **(environment or {})}
    return [Process(script, *arguments, environment={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]


def run_world(num_ranks: int, script: str | Path, *arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run the processes of `start_world` until they have exited.

    The first rank that fails ends the others, and its exit code becomes the world's. Raises
    TimeoutExpired.
    """
    ranks = start_world(num_ranks, script, *arguments)
    deadline = time.monotonic() + timeout_s
    try:
        left = {rank.sentinel: rank for rank in ranks}
        while left and not any(rank.returncode for rank in ranks):
            ended = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ended:
                raise subprocess.TimeoutExpired(ranks[0].args, timeout_s, output=_collect_output(ranks))
            for sentinel in ended:
                left.pop(sentinel).communicate()
        code = next((rank.returncode for rank in ranks if rank.returncode), 0)
    finally:
        by = time.monotonic() + TERMINATE_TIMEOUT_S
        for rank in ranks:
            rank.terminate(deadline=by)
    return subprocess.CompletedProcess(ranks[0].args, code, _collect_output(ranks))


def _collect_output(ranks: list[Process]) -> str:
    return "".join(rank.output.read_text(errors="replace") for rank in ranks)


def _run_child(argv: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    """Set up the new process and run the script in it."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # the default instead of the server's method
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
