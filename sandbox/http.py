"""Shared parts of our HTTP servers: requests, disconnects, errors, limits and shutdown.

Used by the sandbox's server and those of megatron_rl/services. Requests pass connections.py and
request_gate.py first.
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

from sandbox.connections import ConnectionRegistry, LimitedConnection, LogRateLimiter
from sandbox.request_gate import RETRY_HEADERS
from sandbox.token import is_reachable_remotely

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
NO_DOC_PAGES: Mapping[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""Arguments of FastAPI without its documentation pages, which load scripts from a CDN."""
MAX_SHOWN_ERRORS, MAX_ERROR_CHARS = 20, 2000
"""Limits of the errors reported for a request: their number, and characters of a message."""
LISTEN_BACKLOG = 64
"""Number of connections that the kernel queues before they are accepted."""
ACCEPT_BATCH, ACCEPT_TICKS = 32, 4
"""Number of connections accepted in excess: per event loop tick, and number of ticks.

asyncio accepts ACCEPT_BATCH connections per tick without checking for free descriptors. It does so
ACCEPT_TICKS times before a connection aborted because of the first has released its descriptor
(Python 3.11, selector_events.py: accept, create, abort and close take one tick each).
"""
MIN_CONNECTIONS = 16
"""Number of connections that a server must be able to hold."""
KEEPALIVE_S = 10.0
"""Seconds that a connection without a request is kept.

httpx drops its idle connections after 5 s, so it does not send on one that was just closed here.
"""


async def run_while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it when the client disconnects.

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
    """Return an error response that asks the client to retry."""
    return HTTPException(code, text, headers=RETRY_HEADERS)


async def read_body(request: Request, model: type[B]) -> B:
    """Return the body of a request as a validated model.

    Its strings are valid Unicode: unlike json, pydantic's reader refuses lone surrogates.

    Raises:
        HTTPException: Status 422, with at most MAX_SHOWN_ERRORS errors.
    """
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        if error.error_count() > MAX_SHOWN_ERRORS:  # listing a million takes ten seconds
            raise HTTPException(422, f"{error.error_count()} mistakes, keys that there are not among them, maybe") from error
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(
            422, [{"where": [str(part)[:64] for part in each["loc"]], "what": each["msg"][:200]} for each in mistakes]
        ) from error


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route parses itself.

    References are inlined, because they would point into the document and not into the schema.
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
    """Return an HTTP error with a bounded message.

    Lone surrogates from a box are replaced, because they cannot be encoded.
    """
    detail = error.detail[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode() if isinstance(error.detail, str) else error.detail
    return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)


async def handle_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    """Return the response to a client that has disconnected."""
    return Response(status_code=499)  # never delivered


@contextlib.contextmanager
def open_listener(host: str, port: int, *, token: str, permits: str) -> Iterator[socket.socket]:
    """Open a listening socket; port 0 picks a free port.

    Args:
        host: Host name or IP address.
        port: Port, or 0.
        token: Bearer token that the server requires, or "".
        permits: Verb phrase for the error message: what clients may do.

    Raises:
        OSError: The address cannot be bound.
        ValueError: Other machines could use the server without a token.
    """
    with socket.create_server((host, port), backlog=LISTEN_BACKLOG) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted sockets; without it a reply takes 40 ms
        if not token and is_reachable_remotely(listener.getsockname()[0]):
            raise ValueError(f"--host {host} lets everybody who reaches it {permits}: give --token-file FILE, or --host 127.0.0.1")
        yield listener


async def serve_until_signal(app: FastAPI, listener: socket.socket, *, registry: ConnectionRegistry) -> None:
    """Serve until SIGINT or SIGTERM; the address is printed once requests are accepted."""
    server = uvicorn.Server(make_uvicorn_config(app, registry))
    # Uvicorn would stop and raise the signal again, but the application must shut down before this
    # process.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    listener.listen(LISTEN_BACKLOG)  # asyncio has set it to ACCEPT_BATCH
    host, port = listener.getsockname()[:2]
    print(f"http://{host}:{port}", flush=True)
    await running


def make_uvicorn_config(app: FastAPI, registry: ConnectionRegistry) -> uvicorn.Config:
    """Return a uvicorn configuration without unused features and with rate-limited logs."""
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
    """Return the number of simultaneous connections that this process has descriptors for.

    `other_files` descriptors are reserved for other use, and the soft limit is raised as far as
    needed. A server without free descriptors logs errors endlessly and serves no client.

    Raises:
        ValueError: The hard limit is too low for MIN_CONNECTIONS.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other_files += psutil.Process().num_fds() + ACCEPT_TICKS * ACCEPT_BATCH
    able = min(max_connections, hard - other_files)
    if able < MIN_CONNECTIONS:
        raise ValueError(f"{hard} open files are allowed (ulimit -Hn), {other_files + MIN_CONNECTIONS} are needed to serve: raise it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, other_files + able), hard))
    return able
