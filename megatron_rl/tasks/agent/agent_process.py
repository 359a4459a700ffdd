"""Process of one agent, which is ended together with all processes that it starts."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_rl import supervisor
from megatron_rl.supervisor import STOP_TIMEOUT_S, TORCHRUN_PREFIXES
from megatron_rl_sandbox.token import USER_KEY_VARIABLES

MAX_OUTPUT_BYTES = 64 << 10
"""Number of bytes that are kept from the end of the agent's output."""
_CHUNK_BYTES = 64 << 10


class AgentProcess:
    """Agent that runs under a supervisor (supervisor.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tails = {"stdout": b"", "stderr": b""}
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read("stdout", process.stdout)),
            asyncio.create_task(self._read("stderr", process.stderr)),
        ]

    @classmethod
    async def start(cls, command: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> "AgentProcess":
        """Start the agent in a folder. `environment` is added to the run's own environment.

        The agent inherits neither torchrun's variables nor the user's keys.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES) and name not in USER_KEY_VARIABLES
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", supervisor.__file__, *command, cwd=folder, env={**inherited, **environment},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return cls(process)

    async def wait(self) -> int:
        """Return the exit code once the agent has ended and its output is read."""
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return code

    def last_line(self, stream: str) -> str:
        """Return the last line of stdout or stderr that is not blank; empty if there is none."""
        lines = self._tails[stream].decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    async def stop(self) -> None:
        """End the agent and everything that it has started."""
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

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            self._tails[name] = (self._tails[name] + chunk)[-MAX_OUTPUT_BYTES:]
