"""Pool of forked processes, each of which runs the environment of one episode at a time.

Requests never block the event loop. If a process raises an exception, is killed or exceeds its time
limit, only its current episode fails with InfraError. The next episode gets another process.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import InfraError, PermanentInfraError

KILL_SLACK_S = 5.0
"""Seconds to wait for a process after its time limit has passed. Normally the kernel ends the
process at the time limit.
"""
LOAD_TIMEOUT_S = 300.0
"""Time limit in seconds for the imports of a server. The time limit of a request is added to this
value.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ProcessKind:
    """Server module of a task, and the properties of its processes."""

    label: str
    """Name of the environments in error messages."""
    server_module: str
    """Module that is started as `python -m MODULE CONTROL SECONDS ARGUMENT...`, where CONTROL is
    the file descriptor of the control socket (process_server.py) and SECONDS the time limit of a
    request.
    """
    timeout_key: str
    """Setting that contains the time limit of a request."""
    max_episodes: int = 1
    """Maximum number of episodes that one process runs before a new process replaces it."""
    max_answer_bytes: int = 1 << 20
    """Maximum length of an answer."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server, which take precedence over those of this process."""


@dataclass(slots=True)
class EpisodeProcess:
    """Client side of the channel to one process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kind: ProcessKind
    timeout_s: float
    is_idle: bool = True
    """True if every request has been answered. A process with an unanswered request is never
    reused.
    """
    num_episodes: int = 0
    """Number of episodes for which this process was acquired."""

    async def send_request(self, **question: object) -> dict[str, Any]:
        """Send one request to the process and return its answer.

        Raises:
            InfraError: The process failed or did not answer in time.
        """
        assert self.is_idle, "the process still answers, or is gone"
        self.is_idle = False
        limit = f"{self.timeout_s:g} s"
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s + KILL_SLACK_S):
                self.writer.write(json.dumps(question).encode() + b"\n")
                await self.writer.drain()
                line = await self.reader.readline()
        except TimeoutError as late:
            raise InfraError(self._error_text(question, f"no response within {limit} ({self.kind.timeout_key})")) from late
        except (OSError, ValueError) as gone:  # ValueError: the answer is longer than kind.max_answer_bytes
            raise InfraError(self._error_text(question, str(gone))) from gone
        spent = time.monotonic() - started
        if not line.endswith(b"\n"):
            reason = f"the process exited after {spent:.1f} s (limit: {limit}, {self.kind.timeout_key})"
            raise InfraError(self._error_text(question, reason))
        answer = json.loads(line)
        if "fault" in answer:
            raise InfraError(self._error_text(question, answer["fault"]))
        self.is_idle = True
        return answer

    def _error_text(self, question: dict[str, object], reason: str) -> str:
        return f"{self.kind.label} failed at {json.dumps(question)}: {reason}"

    @property
    def is_connected(self) -> bool:
        """True until the process closes its side of the channel."""
        return not self.reader.at_eof()

    def close(self) -> None:
        """Close the channel, which ends the process."""
        self.writer.close()


class ProcessPool:
    """Pool of at most `size` processes.

    If all processes are in use, `acquire` waits for one to be released. The server, which forks the
    processes, is started by the first call to `acquire`.
    """

    def __init__(self, size: int, *, kind: ProcessKind, timeout_s: float) -> None:
        self.size, self.kind, self.timeout_s = size, kind, timeout_s
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._slots = asyncio.Semaphore(size)
        self._spawn_lock = asyncio.Lock()
        self._idle: list[EpisodeProcess] = []

    async def acquire(self, *arguments: str) -> EpisodeProcess:
        """Return a process for exclusive use. The caller must return the process with `release`.

        Args:
            arguments: Further arguments of the server module if the server must be started.

        Raises:
            InfraError: No process could be started.
        """
        await self._slots.acquire()
        try:
            process = self._pop_idle() or await self._spawn_process(arguments)
        except BaseException:
            self._slots.release()
            raise
        process.num_episodes += 1
        return process

    def release(self, process: EpisodeProcess) -> None:
        """Return a process to the pool, or close a process that cannot be reused."""
        if process.is_idle and process.num_episodes < self.kind.max_episodes:
            self._idle.append(process)
        else:
            process.close()
        self._slots.release()

    async def close(self) -> None:
        """End all processes, including busy ones."""
        for process in self._idle:
            process.close()
        self._idle.clear()
        self._stop_server()

    def _pop_idle(self) -> EpisodeProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_connected:
                return process
            process.close()
        return None

    async def _spawn_process(self, arguments: tuple[str, ...]) -> EpisodeProcess:
        async with self._spawn_lock:
            if self._server is None or self._server.poll() is not None:
                await self._start_server(arguments)
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"p"], [theirs.fileno()])
                except OSError as gone:
                    ours.close()
                    self._stop_server()
                    raise InfraError(f"the server that forks processes of {self.kind.label} exited: {gone}") from gone
        reader, writer = await asyncio.open_connection(sock=ours, limit=self.kind.max_answer_bytes)
        return EpisodeProcess(reader, writer, self.kind, self.timeout_s)

    async def _start_server(self, arguments: tuple[str, ...]) -> None:
        """Start the server, which searches the same folders for modules as this process.

        The server runs in its own session, so that Ctrl-C does not interrupt it. A run that is
        stopping still needs the server.

        Raises:
            PermanentInfraError: The server failed to start, or did not start in time.
        """
        self._stop_server()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [sys.executable, "-m", self.kind.server_module, str(theirs.fileno()), str(self.timeout_s), *arguments]
            self._server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=server_environment(self.kind), stdin=subprocess.DEVNULL, start_new_session=True
            )
        has_loaded = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_TIMEOUT_S + self.timeout_s):
                has_loaded = await asyncio.get_running_loop().sock_recv(self._control, 1)
        if not has_loaded:
            self._stop_server()
            limit = f"{self.timeout_s:g} s ({self.kind.timeout_key})"
            raise PermanentInfraError(f"{self.kind.label} failed to load {' '.join(arguments)} or exceeded {limit}; see the output above")

    def _stop_server(self) -> None:
        """End the server and all of its processes, including busy ones."""
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
        self._server = self._control = None


def server_environment(kind: ProcessKind) -> dict[str, str]:
    """Return the environment variables of a server."""
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    hash_seed = {"PYTHONHASHSEED": "0"}  # makes the order of sets reproducible
    return {**os.environ, **hash_seed, "PYTHONPATH": folders, **kind.environment}
