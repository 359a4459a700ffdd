"""What every HTTP server of ours is beside its routes: reading a request, watching its client, telling what is wrong, limits, the end.

The sandbox's server has it, and those of megatron_rl/services; gate.py and connections.py stand before it.
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
from sandbox.gate import RETRY_HEADERS
from sandbox.token import is_reachable_remotely

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
NO_DOC_PAGES: Mapping[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""Arguments of FastAPI: its pages load scripts from a content delivery network."""
MAX_SHOWN_ERRORS, MAX_ERROR_CHARS = 20, 2000
"""Of what is wrong with a request."""
LISTEN_BACKLOG = 64
"""Connections that the kernel holds before we take them."""
ACCEPT_BATCH, ACCEPT_TICKS = 32, 4
"""Of them asyncio takes so many in one go, without asking for room; so often it does before one that is cut for the first of them has given
its file back (3.11, selector_events.py: taken, made, aborted, closed, in a tick of the loop each)."""
MIN_CONNECTIONS = 16
"""Connections that a server must be able to hold."""
KEEPALIVE_S = 10.0
"""Of a connection without a request. httpx forgets its own after 5 s: it is not to send where we have just closed."""


async def run_while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and ClientDisconnect raised here, as soon as the client is gone."""
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
    return HTTPException(code, text, headers=RETRY_HEADERS)


async def read_body(request: Request, model: type[B]) -> B:
    """The body as a request of this kind. Its text is Unicode afterwards: pydantic's reader refuses half characters, json's does not."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        if error.error_count() > MAX_SHOWN_ERRORS:  # to list a million takes ten seconds
            raise HTTPException(422, f"{error.error_count()} mistakes, keys that there are not among them, maybe") from error
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(
            422, [{"where": [str(part)[:64] for part in each["loc"]], "what": each["msg"][:200]} for each in mistakes]
        ) from error


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """For `app.openapi()`: what the route reads by itself, without references, which would lead into the page and not into the schema."""
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
    """What is wrong, without sending back what may be megabytes, nor half characters of a box, which have no bytes."""
    detail = error.detail[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode() if isinstance(error.detail, str) else error.detail
    return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)


async def handle_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # which nobody hears


@contextlib.contextmanager
def open_listener(host: str, port: int, *, token: str, permits: str) -> Iterator[socket.socket]:
    """A socket at the address; port 0 is any free one. OSError: it is taken. ValueError: beyond this machine, without a token, it `permits`
    everybody something."""
    with socket.create_server((host, port), backlog=LISTEN_BACKLOG) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it; without it a reply takes 40 ms
        if not token and is_reachable_remotely(listener.getsockname()[0]):
            raise ValueError(f"--host {host} lets everybody who reaches it {permits}: give --token-file FILE, or --host 127.0.0.1")
        yield listener


async def serve_until_signal(app: FastAPI, listener: socket.socket, *, registry: ConnectionRegistry) -> None:
    """Serve until SIGINT or SIGTERM; the address is printed once requests are taken."""
    server = uvicorn.Server(make_uvicorn_config(app, registry))
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn stops, then raises it again: what it serves must end before us
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    listener.listen(LISTEN_BACKLOG)  # asyncio has given it AT_ONCE
    host, port = listener.getsockname()[:2]
    print(f"http://{host}:{port}", flush=True)
    await running


def make_uvicorn_config(app: FastAPI, registry: ConnectionRegistry) -> uvicorn.Config:
    """Nothing that we do not use is offered, and what a client may bring about is not logged without end."""
    unused = {"ws": "none", "proxy_headers": False, "access_log": False}
    config = uvicorn.Config(
        app, http=partial(LimitedConnection, registry=registry), backlog=ACCEPT_BATCH, log_level="error",
        timeout_keep_alive=math.ceil(KEEPALIVE_S),
        timeout_graceful_shutdown=5, **unused,
    )  # fmt: skip
    for logger in map(logging.getLogger, ("uvicorn.error", "asyncio")):
        for earlier in [each for each in logger.filters if isinstance(each, LogRateLimiter)]:  # of a server before this one
            logger.removeFilter(earlier)
        logger.addFilter(LogRateLimiter())
    return config


def reserve_connections(other_files: int, *, max_connections: int) -> int:
    """For how many at once this process has files beside `other_files` others; the soft limit is raised where the hard one allows.
    ValueError: too few. A server that cannot accept logs it without end and hears nobody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other_files += psutil.Process().num_fds() + ACCEPT_TICKS * ACCEPT_BATCH
    able = min(max_connections, hard - other_files)
    if able < MIN_CONNECTIONS:
        raise ValueError(f"{hard} open files are allowed (ulimit -Hn), {other_files + MIN_CONNECTIONS} are needed to serve: raise it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, other_files + able), hard))
    return able
