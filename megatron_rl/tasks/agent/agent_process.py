"""Agent of one episode: a process with all processes that it starts, or a request to a service."""

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from megatron_rl import supervisor
from megatron_rl.supervisor import STOP_TIMEOUT_S, TORCHRUN_PREFIXES
from megatron_rl_sandbox.bounded_http import BoundedClient, NoResponse
from megatron_rl_sandbox.token import USER_KEY_VARIABLES

MAX_OUTPUT_BYTES = 64 << 10
"""Number of bytes that are kept from the end of a process's output, and maximum size of the
response of a service.
"""
MAX_EPISODE_S = 86_400.0
"""Timeout of the request to a service. The time between two requests of the agent is limited by
task.env_timeout_s.
"""
_CHUNK_BYTES = 64 << 10
MAX_QUOTED_CHARS = 300


@dataclass(slots=True, frozen=True)
class AgentExit:
    """Result of an agent that has ended, or the reason why it failed."""

    result: str
    """Result of the agent; for a process, the last line that it printed."""
    description: str
    """Text for an error message: exit code or status, with the last output."""
    is_failed: bool = False


class Agent(Protocol):
    """Agent of one episode."""

    async def wait(self) -> AgentExit:
        """Return once the agent has ended."""
        ...

    async def stop(self) -> None:
        """End the agent."""
        ...


def inherited_environment() -> dict[str, str]:
    """Return the run's environment without torchrun's variables and the user's keys."""
    return {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES) and name not in USER_KEY_VARIABLES}


class AgentProcess:
    """Agent that runs under a supervisor (supervisor.py)."""

    def __init__(self, process: asyncio.subprocess.Process, command: Sequence[str], folder: Path) -> None:
        self._process, self._command, self._folder = process, command, folder
        self._tails = {"stdout": b"", "stderr": b""}
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read("stdout", process.stdout)),
            asyncio.create_task(self._read("stderr", process.stderr)),
        ]

    @classmethod
    async def start(
        cls, command: Sequence[str], started: Sequence[str], *, folder: Path, environment: Mapping[str, str]
    ) -> "AgentProcess":  # fmt: skip
        """Start the agent in a folder of its own, which is removed even if the run dies.

        Args:
            command: Command of the agent, for error messages.
            started: Command that is started; it may run `command` in the sandbox.
            folder: Working directory.
            environment: All environment variables.
        """
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", supervisor.__file__, "--remove", str(folder), *started, cwd=folder, env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            undo.pop_all()
        return cls(process, command, folder)

    async def wait(self) -> AgentExit:
        """Return once the agent has ended and its output is read."""
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        printed = self._last_line("stdout")
        said = self._last_line("stderr") or printed or "no output"
        described = f"the agent exited with code {code} ({said[:MAX_QUOTED_CHARS]})"
        return AgentExit(printed, f"task.options.command={' '.join(self._command)}: {described}", is_failed=code != 0)

    def _last_line(self, stream: str) -> str:
        """Return the last line of stdout or stderr that is not blank; empty if there is none."""
        lines = self._tails[stream].decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    async def stop(self) -> None:
        """End the agent and everything that it has started, and remove its folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:  # a hanging supervisor; its command dies with it
            with suppress(ProcessLookupError):
                self._process.kill()
        for reader in self._readers:
            reader.cancel()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)  # if the supervisor could not

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            self._tails[name] = (self._tails[name] + chunk)[-MAX_OUTPUT_BYTES:]


class AgentService:
    """Agent that a service runs: one request, with a response when the agent has ended."""

    def __init__(self, url: str, episode: Mapping[str, object]) -> None:
        """Send the request. `episode` is its body, in JSON."""
        self._url = url
        self._response = asyncio.create_task(self._post(episode))

    async def wait(self) -> AgentExit:
        """Return once the service has responded."""
        return await self._response

    async def stop(self) -> None:
        """Close the connection, so that the service can end the agent."""
        self._response.cancel()
        await asyncio.wait((self._response,))

    async def _post(self, episode: Mapping[str, object]) -> AgentExit:
        try:
            async with BoundedClient() as client:
                answer = await client.request("POST", self._url, episode, timeout_s=MAX_EPISODE_S, max_bytes=MAX_OUTPUT_BYTES)
        except NoResponse as error:
            return self._describe(str(error)[:MAX_QUOTED_CHARS], is_failed=True)
        text = answer.text.strip()
        described = f"the service responded with status {answer.status} ({text[-MAX_QUOTED_CHARS:] or 'no text'})"
        return self._describe(described, is_failed=answer.status != HTTPStatus.OK, result=(text.splitlines() or [""])[-1].strip())

    def _describe(self, described: str, *, is_failed: bool, result: str = "") -> AgentExit:
        return AgentExit(result, f"task.options.url={self._url}: {described}", is_failed=is_failed)
