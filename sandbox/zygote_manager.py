"""Manages the zygote process for the pool.

The manager starts the zygote, requests interpreters from the zygote, is notified when interpreters
exit, and kills the process trees of boxes.
"""

import array
import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from megatron_rl_sandbox.frames import MAX_CONTROL_BYTES
from megatron_rl_sandbox.layers import SOURCE_DIR, Layers
from megatron_rl_sandbox.mounts import BOX_DIR
from megatron_rl_sandbox.process_control import is_dying, kill_process_tree
from megatron_rl_sandbox.records import BoxLimits, SandboxError

ZYGOTE_START_TIMEOUT_S = 60.0
ZYGOTE_STOP_TIMEOUT_S = 10.0
ZYGOTE_REPLY_TIMEOUT_S = 30.0
"""Time in seconds after which a zygote that does not reply is considered unresponsive and killed.

The boxes of a killed zygote fail with a host fault and restart on a new zygote.
"""
EXIT_POLL_S = 2.0
ZYGOTE_ENVIRONMENT = {"LANG": "C.UTF-8", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit status and resource usage of an interpreter that has exited."""

    status: int | None
    """Exit status as returned by wait(2), or None if the zygote died too."""
    cpu_s: float
    lowered_cpu_limit: bool = False
    """True if the code lowered its RLIMIT_CPU.

    The kernel kills a process that exceeds this limit on CPU time.
    """


@dataclass(slots=True)
class Interpreter:
    """Interpreter process of a box, from its fork to its exit."""

    id: int
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output_fds: tuple[int, int]
    """The pool's descriptors of the output and error memfds, which remain readable after exit."""
    exit_future: asyncio.Future[ExitStatus]
    directory: str | None
    """Host directory that `close` removes; None if the directory is in the box's own tmpfs."""
    killed_by_pool: bool = False
    """True once the pool has started to kill this process."""
    exceeded_limit: str | None = None
    """Limit for which the watchdog killed this process; None if the watchdog has not killed it.
    """

    def close(self) -> None:
        """Release the pool's resources for an interpreter that has exited."""
        self.writer.transport.abort()
        for descriptor in self.output_fds:
            os.close(descriptor)
        if self.directory is not None:  # last, because removal needs a free file descriptor
            _remove_directory(self.directory)


@dataclass(slots=True)
class ZygoteManager:
    """Starts the zygote process and manages its interpreters."""

    layers: Layers
    limits: BoxLimits
    shared_anonymous_bytes: int = 0
    """Bytes of anonymous memory that every interpreter shares with the zygote after its fork."""
    is_alive: bool = False
    _next_id: int = 0
    _interpreters: dict[int, Interpreter] = field(default_factory=dict)
    _pending_forks: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _exit_futures: dict[int, asyncio.Future[ExitStatus]] = field(default_factory=dict)
    _ready: asyncio.Future[int] | None = None
    _control: socket.socket | None = None
    _process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            SandboxError: The zygote does not start.
        """
        settings = json.dumps({"layers": asdict(self.layers), "limits": asdict(self.limits), "source": SOURCE_DIR})
        try:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, tempfile.TemporaryDirectory(prefix="sandbox-start-") as folder:  # for Matplotlib's font list (0.1 s)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "megatron_rl_sandbox.zygote", settings],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    env={**ZYGOTE_ENVIRONMENT, "PATH": os.defpath, "PYTHONPATH": SOURCE_DIR, "MPLCONFIGDIR": folder, "HOME": folder},
                    start_new_session=True,
                )
                theirs.close()
                await self._wait_until_ready()
        except OSError as error:
            await self.stop()
            raise SandboxError(f"the zygote could not be started: {error}") from error
        self.is_alive = True

    async def _wait_until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._control.fileno(), self._on_message)
        try:
            async with asyncio.timeout(ZYGOTE_START_TIMEOUT_S):
                self.shared_anonymous_bytes = await self._ready
        except TimeoutError as late:
            await self.stop()
            raise SandboxError(f"the zygote did not start within {ZYGOTE_START_TIMEOUT_S:g} s") from late
        except BaseException:
            await self.stop()
            raise

    async def spawn_interpreter(self, slot: int) -> Interpreter:
        """Fork an interpreter in a new process, where it waits for its inputs.

        Raises:
            SandboxError: The zygote failed, or the host is out of file descriptors or disk space.
        """
        if not self.is_alive:
            raise SandboxError("the zygote is not running")
        loop = asyncio.get_running_loop()
        self._next_id += 1
        number = self._next_id
        try:
            with contextlib.ExitStack() as undo:
                directory = None if self.layers.read_only_root else _make_directory(undo)
                ours, theirs = (undo.enter_context(end) for end in socket.socketpair())
                streams = (_make_output_memfd("stdout", undo), _make_output_memfd("stderr", undo))
                self._send({"spawn": number, "slot": slot, "directory": directory or BOX_DIR}, [theirs.fileno(), *streams])
                theirs.close()
                undo.callback(self._request_kill, number)
                self._pending_forks[number], self._exit_futures[number] = loop.create_future(), loop.create_future()
                ended = self._exit_futures[number]
                pid = await self._wait_for_fork(number)
                ours.setblocking(False)
                reader, writer = await asyncio.open_unix_connection(sock=ours)
                undo.pop_all()
        except OSError as error:
            raise SandboxError(f"cannot start a process for a box: {error}") from error
        return Interpreter(number, pid, reader, writer, output_fds=streams, exit_future=ended, directory=directory)

    async def end_interpreter(self, interpreter: Interpreter) -> ExitStatus:
        """Kill the interpreter and its descendants, and return its exit status."""
        if not interpreter.exit_future.done():
            interpreter.killed_by_pool = True
            if not self.layers.pid_ns:
                with contextlib.suppress(OSError, psutil.Error):  # out of descriptors: kill at least the first process
                    kill_process_tree(interpreter.pid)
            self._request_kill(interpreter.id)
        if await _wait_for_reply(interpreter.exit_future):
            return interpreter.exit_future.result()
        self.kill_zygote()
        return ExitStatus(None, 0.0)

    async def wait_for_exit(self, interpreter: Interpreter) -> None:
        """Wait for the exit of an interpreter after its channel has closed.

        The wait ends if the process has not begun to exit after EXIT_POLL_S. In this case, the code
        has closed the channel, and the process is still running.
        """
        for count in range(int(ZYGOTE_REPLY_TIMEOUT_S / EXIT_POLL_S)):
            if count and not is_dying(interpreter.pid):
                return
            done, _ = await asyncio.wait([interpreter.exit_future], timeout=EXIT_POLL_S)
            if done:
                return

    async def stop(self) -> None:
        """Stop the zygote.

        When the pool closes the control socket, the zygote kills all boxes, waits for their
        processes and exits. If the zygote does not exit within ZYGOTE_STOP_TIMEOUT_S, the zygote is
        killed, and the kernel then kills all boxes.
        """
        self.is_alive = False
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            for _ in range(int(ZYGOTE_STOP_TIMEOUT_S / 0.005)):
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.005)
            self._process.kill()
            self._process.wait()
            self._process = None
        self._fail_pending()

    async def _wait_for_fork(self, number: int) -> int:
        """Wait for the reply to a fork request and return the pid of the new process.

        Raises:
            SandboxError: The zygote failed or did not reply.
        """
        waiting = self._pending_forks[number]
        try:
            if await _wait_for_reply(waiting):
                return waiting.result()
        finally:
            waiting.cancel()
        self.kill_zygote()
        raise SandboxError(f"the zygote did not respond within {ZYGOTE_REPLY_TIMEOUT_S:g} s: it is hung or was stopped")

    def kill_zygote(self) -> None:
        """Kill an unresponsive zygote. The kernel then kills all boxes.

        `_on_message` or `stop` resolves the pending futures afterwards.
        """
        self.is_alive = False
        if self._process is not None:
            self._process.kill()

    def _send(self, message: dict[str, object], descriptors: list[int]) -> None:
        try:
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._control.sendmsg([json.dumps(message).encode()], passed, socket.MSG_DONTWAIT)  # send_fds of Python 3.11 ignores its flags
        except BlockingIOError as full:
            self.kill_zygote()
            raise SandboxError("the zygote is not reading its messages: it is hung or was stopped") from full
        except OSError as error:
            raise SandboxError(f"cannot send to the zygote: {error}") from error

    def _request_kill(self, number: int) -> None:
        if self.is_alive and number in self._exit_futures:
            with contextlib.suppress(SandboxError):  # the zygote has just died, and its children with it
                self._send({"kill": number}, [])

    def _on_message(self) -> None:
        try:
            text = self._control.recv(MAX_CONTROL_BYTES)
        except ConnectionResetError:
            text = b""
        if not text:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self.is_alive = False
            self._fail_pending()
            return
        message = json.loads(text)
        if "ready" in message:
            self._ready.set_result(message["ready"])
        elif "host" in message:
            self._ready.set_exception(SandboxError(message["host"]))
        elif "spawned" in message:
            future = self._pending_forks.pop(message["spawned"])
            if not future.done():
                future.set_result(message["pid"])
        elif "failed" in message:
            del self._exit_futures[message["failed"]]
            future = self._pending_forks.pop(message["failed"])
            if not future.done():
                future.set_exception(SandboxError(f"fork: {message['reason']}"))
        else:
            self._exit_futures.pop(message["exited"]).set_result(ExitStatus(message["status"], message["cpu_s"], message["limited"]))

    def _fail_pending(self) -> None:
        """Resolve all pending futures once the zygote and all boxes are dead."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxError("the zygote died during startup: see its standard error"))
        for future in self._pending_forks.values():
            if not future.done():
                future.set_exception(SandboxError("the zygote died"))
        for ended in self._exit_futures.values():
            ended.set_result(ExitStatus(None, 0.0))
        self._pending_forks.clear()
        self._exit_futures.clear()


async def _wait_for_reply(future: asyncio.Future[Any]) -> bool:
    """Return True if the future completes within ZYGOTE_REPLY_TIMEOUT_S.

    The timeout is split into two waits. If this event loop is blocked during the whole first wait,
    it can still receive the reply during the second wait.
    """
    for _ in range(2):
        done, _ = await asyncio.wait([future], timeout=ZYGOTE_REPLY_TIMEOUT_S / 2)
        if done:
            return True
    return False


def _make_directory(undo: contextlib.ExitStack) -> str:
    directory = tempfile.mkdtemp(prefix="sandbox-")
    undo.callback(_remove_directory, directory)
    os.chmod(directory, 0o755)
    return directory


def _remove_directory(directory: str) -> None:
    """Remove a directory and its contents.

    rmdir is tried first, because it needs no free file descriptor.
    """
    try:
        os.rmdir(directory)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)


def _make_output_memfd(name: str, undo: contextlib.ExitStack) -> int:
    stream = os.memfd_create(name, os.MFD_CLOEXEC)
    undo.callback(os.close, stream)
    with contextlib.suppress(PermissionError):  # this memfd cannot be sealed at all (vm.memfd_noexec)
        fcntl.fcntl(stream, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)  # otherwise, the box could seal the memfd against truncation
    fcntl.fcntl(stream, fcntl.F_SETFL, os.O_APPEND)  # the writes of the box and of its children must not overwrite each other
    return stream
