"""Session with one MCP server, and the tools that the server lists.

The session uses the handshake of the protocol's versions up to 2025-11-25, because later versions
have no sessions, which keep the episodes apart.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import TypeVar, cast

import anyio
import httpx2
from jsonschema import Draft202012Validator, SchemaError, validators
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS, CallToolResult, ListToolsResult
from pydantic import ValidationError

from megatron_rl.clients.openai import proxy_options
from megatron_rl.clients.proxies import proxy_hint
from megatron_rl.config import McpServerSettings, ToolSettings
from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError
from megatron_rl.supervisor import STOP_TIMEOUT_S
from megatron_rl.tasks.visual_python.image_tools import ToolError
from megatron_rl.tasks.visual_python.mcp_http import limit_response
from megatron_rl.tasks.visual_python.mcp_stdio import EXIT_GRACE_S, MAX_MESSAGE_BYTES, StdioTransport
from megatron_rl_sandbox.token import bearer_header, read_token

T = TypeVar("T")
PROGRAM_CLOSE_TIMEOUT_S = EXIT_GRACE_S + STOP_TIMEOUT_S + 5
URL_CLOSE_TIMEOUT_S = 5.0
"""Timeout in seconds for a server at a URL to end a session."""
MAX_PAGES = 100
"""Maximum number of pages of a list of tools."""
SERVER_ERRORS = (
    MCPError, OSError, RuntimeError, ValidationError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError,
)  # fmt: skip
"""Exceptions of the package mcp for a server that is dead or does not follow the protocol."""

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its errors are raised as well


class McpSession:
    """Session with one server, which belongs to one episode or lists the server's tools.

    A task of its own holds the connection, because anyio requires that one task opens and closes
    it. Create the session with `open`, and close it in any case.
    """

    def __init__(self, server: McpServerSettings, settings: ToolSettings) -> None:
        self.server, self.settings = server, settings
        self._stdio = StdioTransport(server.command, env=server.env) if server.command else None
        self._is_denied = False
        """True if the server at a URL rejected the token, or demands one."""
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._owner = asyncio.create_task(self._own())

    @classmethod
    async def open(cls, server: McpServerSettings, settings: ToolSettings) -> "McpSession":
        """Connect to a server.

        Raises:
            AccessDenied: The server rejects the token.
            InfraError: The server does not start or respond.
        """
        session = cls(server, settings)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(session.close)
            await session._wait(asyncio.shield(session._client), "to start", settings.startup_timeout_s, "startup_timeout_s")
            undo.pop_all()
        return session

    async def list_tools(self) -> list[Mapping[str, object]]:
        """Return name, description and JSON schema of the parameters of the offered tools.

        Raises:
            InfraError: The server does not respond.
            PermanentInfraError: There are no tools, a tool of task.tools.mcp is missing, or a
                schema is not a JSON schema.
        """
        answer = await self._wait(self._list(), "to list its tools", self.settings.startup_timeout_s, "startup_timeout_s")
        listed = {str(tool["name"]): tool for tool in answer}
        key = self.server.key
        if not listed:
            raise PermanentInfraError(f"{key}: the server lists no tools; remove the server, or repair it")
        unknown = [name for name in self.server.tools if name not in listed]
        if unknown:
            raise PermanentInfraError(f"{key}.tools={unknown[0]}: is not a tool of this server; choose from {', '.join(listed)}")
        offered = [tool for name, tool in listed.items() if not self.server.tools or name in self.server.tools]
        for tool in offered:
            problem = find_schema_problem(cast(dict[str, object], tool["parameters"]))
            if problem:
                others = ",".join(name for name in listed if name != tool["name"])
                remedy = f"repair the server, or offer its other tools: tools:[{others}]" if others else "repair the server"
                raise PermanentInfraError(f"{key}: the parameters of the tool {tool['name']} are no JSON schema ({problem}); {remedy}")
        return offered

    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Call a tool and return its result.

        Raises:
            ToolError: The server rejects the arguments.
            InfraError: The server does not answer in time, or has failed.
        """
        work = self._client.result().call_tool(name, dict(arguments))
        return await self._wait(work, f"to answer the call of {name}", self.settings.call_timeout_s, "call_timeout_s")

    async def close(self) -> None:
        """End the session, and the program of the server."""
        self._closing.set()
        if not self._client.done():  # the handshake does not end by itself
            self._owner.cancel()
        limit_s = PROGRAM_CLOSE_TIMEOUT_S if self.server.command else URL_CLOSE_TIMEOUT_S
        done, _ = await asyncio.wait([self._owner], timeout=limit_s)
        if not done:
            self._owner.cancel()
            await asyncio.wait([self._owner], timeout=limit_s)
        if self._owner.done() and not self._owner.cancelled():
            self._owner.exception()  # a failed server was reported by the call that it failed
        self._client.cancel()

    async def _own(self) -> None:
        try:
            if self._stdio is not None:
                await self._hold(Client(self._stdio, mode="legacy", cache=None))
            else:
                async with self._make_http_client() as http:
                    streams = streamable_http_client(self.server.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES)
                    await self._hold(Client(streams, mode="legacy", cache=None))
        finally:
            if not self._client.done():
                self._client.cancel()

    async def _hold(self, unopened: Client) -> None:
        async with unopened as client:
            if not self._client.done():
                self._client.set_result(client)
            await self._closing.wait()

    def _make_http_client(self) -> httpx2.AsyncClient:
        async def note_denial(response: httpx2.Response) -> None:
            self._is_denied = self._is_denied or response.status_code in (401, 403)

        token = bearer_header(read_token(self.server.token_file)) if self.server.token_file else {}
        headers = {"Accept-Encoding": "identity", **token}
        read_s = max(self.settings.startup_timeout_s, self.settings.call_timeout_s) + 5  # after the timeout of the call
        timeout = httpx2.Timeout(self.settings.startup_timeout_s, read=read_s)
        hooks = {"response": [note_denial, limit_response]}
        return httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks, **proxy_options([self.server.url]))

    async def _list(self) -> list[Mapping[str, object]]:
        client, cursor = self._client.result(), None
        tools: list[Mapping[str, object]] = []
        for _ in range(MAX_PAGES):
            try:
                page: ListToolsResult = await client.list_tools(cursor=cursor)
            except ValidationError as error:
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
                raise PermanentInfraError(
                    f"{self.server.key}: the list of tools is not that of MCP ({problem}); repair the server"
                ) from error
            tools += [{"name": each.name, "description": each.description or "", "parameters": each.input_schema} for each in page.tools]
            cursor = page.next_cursor
            if not cursor:
                break
        return tools

    async def _wait(self, work: Awaitable[T], what: str, limit_s: float, key: str) -> T:
        """Await an answer of the server, and turn every failure of the server into InfraError."""
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await work
        except InfraError:
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise InfraError(f"{self.server.key}: {self._describe(error)}") from error
            last = f" (its last line: {self._stdio.last_line[:300]})" if self._stdio is not None and self._stdio.last_line else ""
            raise InfraError(f"{self.server.key}: took more than task.tools.{key}={limit_s:g} seconds {what}{last}") from error
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            await self._raise_failure(error)
        except asyncio.CancelledError as error:  # of this episode, or of the connection that failed
            task = asyncio.current_task()
            if (task is not None and task.cancelling()) or not self._client.cancelled():
                raise
            await self._raise_failure(error)
        except SERVER_ERRORS as error:
            await self._raise_failure(error)
        raise AssertionError("unreachable")

    async def _raise_failure(self, error: BaseException) -> None:
        """Raise InfraError for an error of the server, with the cause if the connection failed.

        Raises:
            AccessDenied: The server rejects the token.
            InfraError: The server has failed in another way.
        """
        self._closing.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_GRACE_S):
                await asyncio.wait([self._owner])
        if self._owner.done() and not self._owner.cancelled():
            error = self._owner.exception() or error
        if self._is_denied:
            raise AccessDenied(f"{self.server.key}.url={self.server.url}: the server rejects the token; set token_file: FILE") from error
        raise InfraError(f"{self.server.key}: {self._describe(error)}{proxy_hint(self.server.url)}") from error

    def _describe(self, error: BaseException) -> str:
        """Describe why the server failed, with the last line of its standard error."""
        leaf = next(find_leaves(error), error)
        known = self._stdio.last_line[:300] if self._stdio is not None else self.server.url
        said = " ".join(str(leaf).split())[:300]
        return f"the server failed ({type(leaf).__name__}: {said}; {known or 'no output'})"


def find_leaves(error: BaseException) -> Iterator[BaseException]:
    """Return the errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from find_leaves(each)
    else:
        yield error


def find_schema_problem(schema: dict[str, object]) -> str:
    """Describe why a schema is not a JSON schema; '' if it is one."""
    try:
        validators.validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return error.message[:200]
    return ""
