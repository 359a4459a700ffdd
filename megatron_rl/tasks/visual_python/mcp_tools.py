"""Tools of MCP servers (task.tools.mcp) for the episodes of a task.

Each episode has its own session with a server, because servers may keep state: a program runs once
per episode, and a server at a URL has one session per episode. A session is opened at the first
call of one of the server's tools.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from PIL.Image import Image as Picture

from megatron_rl.config import McpServerSettings, ToolSettings, require
from megatron_rl.errors import PermanentInfraError
from megatron_rl.tasks.visual_python.image_tools import ToolError
from megatron_rl.types import ToolCall
from megatron_rl_sandbox.token import read_token

if TYPE_CHECKING:  # imports mcp, which is optional
    from megatron_rl.tasks.visual_python.mcp_session import McpSession


class McpTools:
    """MCP servers of a task and the tools that they list."""

    def __init__(self, settings: ToolSettings) -> None:
        """Check the servers without starting them.

        Raises:
            ValueError: The package mcp, a program, an environment variable or a token is missing.
        """
        require(find_spec("mcp") is not None, "task.tools.mcp", settings.mcp[0].name, "needs the package mcp: pip install 'mcp>=2.3,<3'")
        for server in settings.mcp:
            if server.command:
                remedy = "is not an executable program in PATH"
                require(shutil.which(server.command[0]) is not None, f"{server.key}.command", server.command[0], remedy)
            unset = [name for name in server.env if name not in os.environ]
            require(not unset, f"{server.key}.env", unset, "is not set; export it, or remove it from the list")
            if server.token_file:
                try:
                    read_token(server.token_file)
                except ValueError as error:
                    raise ValueError(f"{server.key}.token_file={error}") from error
        self.settings = settings
        self.slots = asyncio.Semaphore(settings.max_episodes)
        self._servers: dict[str, McpServerSettings] = {}
        """Server of each tool."""
        self._schemas: tuple[Mapping[str, object], ...] = ()

    async def list_tools(self, taken: tuple[str, ...]) -> tuple[Mapping[str, object], ...]:
        """Return name, description and parameters of every tool.

        The servers are started for the first list, and ended after it.

        Raises:
            InfraError: A server does not start or respond, or its list is not valid.
            PermanentInfraError: Two tools have the same name, or one of the names in `taken`.
        """
        if self._schemas:
            return self._schemas
        lists = await asyncio.gather(*map(self._list_server, self.settings.mcp))
        owners: dict[str, str] = dict.fromkeys(taken, "task.tool_format=functions")
        for server, schemas in zip(self.settings.mcp, lists, strict=True):
            for name in (str(schema["name"]) for schema in schemas):
                if name in owners:
                    others = ",".join(str(schema["name"]) for schema in schemas if schema["name"] != name)
                    remedy = f"offer only its other tools: tools:[{others}]" if others else "remove one of the servers"
                    raise PermanentInfraError(f"{server.key}: the tool {name} is also a tool of {owners[name]}; {remedy}")
                owners[name] = server.key
                self._servers[name] = server
        self._schemas = tuple(schema for schemas in lists for schema in schemas)
        return self._schemas

    async def _list_server(self, server: McpServerSettings) -> list[Mapping[str, object]]:
        from megatron_rl.tasks.visual_python.mcp_session import McpSession

        session = await McpSession.open(server, self.settings)
        try:
            return await session.list_tools()
        finally:
            await session.close()

    def server_of(self, tool: str) -> McpServerSettings:
        """Return the server of a listed tool."""
        return self._servers[tool]


class EpisodeTools:
    """Sessions of one episode with the MCP servers of a task."""

    def __init__(self, tools: McpTools) -> None:
        self.tools = tools
        self._sessions: dict[str, McpSession] = {}
        self._has_slot = False

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[ToolCall, list[Picture]]:
        """Call a listed tool; return the call with its text or error, and its images.

        Raises:
            InfraError: The server does not start, does not answer in time, or has failed.
        """
        from megatron_rl.tasks.visual_python.mcp_results import read_result

        source = json.dumps(arguments)
        try:
            result = await (await self._session(name)).call(name, arguments)
        except ToolError as error:
            text = str(error)[: self.tools.settings.max_chars]
            return ToolCall(tool=name, source=source, text=f"Error: {text}", error=text), []
        text, pictures = await asyncio.to_thread(read_result, result, self.tools.settings)
        if result.is_error:
            return ToolCall(tool=name, source=source, text=f"Error: {text}", error=text), pictures
        return ToolCall(tool=name, source=source, text=text), pictures

    async def _session(self, tool: str) -> "McpSession":
        from megatron_rl.tasks.visual_python.mcp_session import McpSession

        server = self.tools.server_of(tool)
        if not self._has_slot:
            await self.tools.slots.acquire()
            self._has_slot = True
        if server.name not in self._sessions:
            self._sessions[server.name] = await McpSession.open(server, self.tools.settings)
        return self._sessions[server.name]

    async def close(self) -> None:
        """End the sessions, and the programs of the servers."""
        try:
            await asyncio.gather(*(session.close() for session in self._sessions.values()))
        finally:
            self._sessions.clear()
            if self._has_slot:
                self.tools.slots.release()
                self._has_slot = False
