"""Transport to an MCP server that is a program (stdio: one JSON-RPC message per line).

The program runs under a supervisor (supervisor.py), which ends it and everything that it has
started when the transport closes, and when the run is killed. The transport of the package mcp
leaves a program that ignores the end of its input.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from megatron_rl import supervisor
from megatron_rl.supervisor import STOP_TIMEOUT_S

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message of a server. A longer message ends the connection."""
MAX_STDERR_BYTES = 16 << 10
"""Number of bytes that are kept from the end of a program's standard error."""
EXIT_GRACE_S = 2.0
"""Time in seconds in which a program may exit by itself after the end of its input."""


class StdioTransport:
    """Running MCP server, with streams of its messages."""

    def __init__(self, command: Sequence[str], *, env: Sequence[str]) -> None:
        """Prepare the transport.

        Args:
            command: Program and arguments.
            env: Names of environment variables that the program receives, in addition to those
                that MCP clients always pass on (HOME, LOGNAME, PATH, SHELL, TERM, USER).
        """
        self.command = command
        self.environment = get_default_environment() | {name: os.environ[name] for name in env}
        self._stderr = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        """Descriptor of the pipe that tells the supervisor that this process exists."""

    @property
    def last_line(self) -> str:
        """Last line that the program wrote to standard error; empty if there is none."""
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    async def __aenter__(self) -> tuple[ObjectReceiveStream[SessionMessage | Exception], ObjectSendStream[SessionMessage]]:
        """Start the program and return the streams of received and sent messages."""
        theirs, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", supervisor.__file__, "--pipe", str(theirs), *self.command, env=self.environment, pass_fds=[theirs],
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
                limit=MAX_MESSAGE_BYTES,
            )  # fmt: skip
        finally:
            os.close(theirs)
        received, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, sent = anyio.create_memory_object_stream[SessionMessage](0)
        self._tasks = [
            asyncio.create_task(self._receive(self._process, received)),
            asyncio.create_task(self._send(self._process, sent, received)),
            asyncio.create_task(self._read_stderr(self._process)),
        ]
        return read_stream, write_stream

    async def __aexit__(self, *_: object) -> None:
        """End the program and everything that it has started."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_GRACE_S)
        os.close(self._lifeline)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:  # a hanging supervisor; its command dies with it
            with suppress(ProcessLookupError):
                self._process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @staticmethod
    async def _receive(process: asyncio.subprocess.Process, received: ObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass the messages of the program on, until its output ends; ignore other lines."""
        assert process.stdout is not None
        async with received:
            with suppress(anyio.BrokenResourceError, ValueError):  # the session has ended; a line above the limit
                while line := await process.stdout.readline():
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:  # a print statement in the program
                        continue
                    await received.send(SessionMessage(message))

    @staticmethod
    async def _send(
        process: asyncio.subprocess.Process,
        sent: ObjectReceiveStream[SessionMessage],
        received: ObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Write messages to the program; if it does not read them any more, end the connection."""
        assert process.stdin is not None
        async with sent:
            try:
                async for each in sent:
                    line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
            except ConnectionError:
                await received.aclose()

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(MAX_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-MAX_STDERR_BYTES:]
