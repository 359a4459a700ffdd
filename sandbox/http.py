"""Functions for requests, errors, limits and shutdown, shared by this project's HTTP servers.

The sandbox server and the servers in megatron_rl/services use these functions. Each request first
passes the checks in connections.py and request_gate.py.
"""

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
from collections.abc import Awaitable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import psutil
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import ClientDisconnect

from megatron_rl_sandbox.connections import ConnectionRegistry, LimitedConnection, LogRateLimiter
from megatron_rl_sandbox.request_gate import RETRY_HEADERS
from megatron_rl_sandbox.token import is_reachable_remotely

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
NO_DOC_PAGES: Mapping[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""Arguments of FastAPI that disable its documentation pages, which load scripts from a CDN."""
MAX_SHOWN_ERRORS, MAX_ERROR_CHARS = 20, 2000
"""Maximum number of errors reported per request, and maximum length of an error message."""
LISTEN_BACKLOG = 64
"""Maximum number of connections that the kernel queues before they are accepted."""
ACCEPT_BATCH, ACCEPT_TICKS = 32, 4
"""Connections accepted per event-loop tick, and ticks from the abort to the close of a connection.

asyncio accepts ACCEPT_BATCH connections per tick without checking for free file descriptors. If a
new connection exceeds the limit, an older connection is aborted, but the older connection releases
its descriptor only ACCEPT_TICKS ticks later (Python 3.11, selector_events.py: accept, create, abort
and close take one tick each). Meanwhile, ACCEPT_TICKS * ACCEPT_BATCH connections may be accepted.
"""
MIN_CONNECTIONS = 16
"""Minimum number of simultaneous connections that a server must support."""
KEEPALIVE_S = 10.0
"""Seconds for which the server keeps an idle connection open.

httpx clients close idle connections after 5 s, so they never send on a connection that the server
has just closed.
"""


async def run_while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: The client disconnected first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()
        gone.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_retry_error(code: int, text: str) -> HTTPException:
    """Return an error response with a Retry-After header, which asks the client to retry."""
    return HTTPException(code, text, headers=RETRY_HEADERS)


async def read_body(request: Request, model: type[B]) -> B:
    """Parse the body of a request as `model` and validate it.

    All strings are valid Unicode, because pydantic's JSON parser, unlike `json`, rejects lone
    surrogates.

    Raises:
        HTTPException: The body is invalid. The status is 422, and the response lists the errors if
            there are at most MAX_SHOWN_ERRORS.
    """
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        if error.error_count() > MAX_SHOWN_ERRORS:  # listing a million errors takes ten seconds
            raise HTTPException(422, f"{error.error_count()} validation errors, possibly including unknown keys") from error
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(
            422, [{"where": [str(part)[:64] for part in each["loc"]], "what": each["msg"][:200]} for each in mistakes]
        ) from error


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body that the route parses itself.

    References in the schema are inlined, because OpenAPI would resolve them relative to the whole
    document.
    """
    schema = model.model_json_schema()
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline_references(schema, schema.get("$defs", {}))}}}
    }


def _inline_references(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inline_references(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inline_references(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {name: _inline_references(each, definitions) for name, each in value.items() if name != "$defs"}


async def handle_http_error(_request: Request, error: StarletteException) -> JSONResponse:
    """Return the response for an HTTP error, with at most MAX_ERROR_CHARS of the message.

    Lone surrogates, which a box may have produced, are replaced because they cannot be encoded.
    """
    detail = error.detail[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode() if isinstance(error.detail, str) else error.detail
    return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)


async def handle_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    """Return an empty response with status 499 for a client that has disconnected."""
    return Response(status_code=499)  # never delivered, because the client is gone


@contextlib.contextmanager
def open_listener(host: str, port: int, *, token: str, permits: str) -> Iterator[socket.socket]:
    """Open a listening socket; port 0 picks a free port.

    Args:
        host: Host name or IP address.
        port: Port, or 0.
        token: Bearer token that the server requires, or "".
        permits: What clients can do, as a verb phrase for the error message, such as "run code".

    Raises:
        OSError: The address cannot be bound.
        ValueError: The address is reachable from other machines, and `token` is empty.
    """
    with socket.create_server((host, port), backlog=LISTEN_BACKLOG) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted sockets; without it, a response takes 40 ms
        if not token and is_reachable_remotely(listener.getsockname()[0]):
            raise ValueError(f"--host {host}: without a token, any client may {permits}: set --token-file FILE or --host 127.0.0.1")
        yield listener


class SignalFreeServer(uvicorn.Server):
    """Server that leaves signals to its caller.

    Uvicorn's own handlers would raise a signal again and end this process before the application
    has shut down. A handler of the event loop, called in addition, would count one SIGINT twice,
    and the second one ends requests in progress (uvicorn 0.54, server.py: handle_exit).
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


async def serve_until_signal(app: FastAPI, listener: socket.socket, *, registry: ConnectionRegistry, path: str = "") -> None:
    """Serve until SIGINT or SIGTERM. Print the address once the server accepts requests.

    `path` is appended to the printed address.
    """
    server = SignalFreeServer(make_uvicorn_config(app, registry))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    listener.listen(LISTEN_BACKLOG)  # asyncio has set the backlog to ACCEPT_BATCH
    host, port = listener.getsockname()[:2]
    print(f"http://{host}:{port}{path}", flush=True)
    await running


def make_uvicorn_config(app: FastAPI, registry: ConnectionRegistry) -> uvicorn.Config:
    """Return a uvicorn configuration with unused features disabled and logs rate-limited."""
    unused = {"ws": "none", "proxy_headers": False, "access_log": False}
    config = uvicorn.Config(
        app, http=partial(LimitedConnection, registry=registry), backlog=ACCEPT_BATCH, log_level="error",
        timeout_keep_alive=math.ceil(KEEPALIVE_S),
        timeout_graceful_shutdown=5, **unused,
    )  # fmt: skip
    for logger in map(logging.getLogger, ("uvicorn.error", "asyncio")):
        for earlier in [each for each in logger.filters if isinstance(each, LogRateLimiter)]:  # from an earlier server in this process
            logger.removeFilter(earlier)
        logger.addFilter(LogRateLimiter())
    return config


def reserve_connections(other_files: int, *, max_connections: int) -> int:
    """Raise the soft limit on open files, and return the number of connections that fit within it.

    The result is at most `max_connections`. `other_files` file descriptors are reserved for other
    uses. Without free file descriptors, a server cannot accept connections and logs errors
    continuously.

    Raises:
        ValueError: The hard limit is too low for MIN_CONNECTIONS.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other_files += psutil.Process().num_fds() + ACCEPT_TICKS * ACCEPT_BATCH
    able = min(max_connections, hard - other_files)
    if able < MIN_CONNECTIONS:
        raise ValueError(f"ulimit -Hn is {hard}, but the server needs at least {other_files + MIN_CONNECTIONS} open files: raise the limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, other_files + able), hard))
    return able
