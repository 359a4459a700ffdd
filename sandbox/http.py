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

from sandbox.connections import Connection, Line, Sparse
from sandbox.gate import AGAIN
from sandbox.token import is_for_all

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
NO_PAGES: Mapping[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
"""Arguments of FastAPI: its pages load scripts from a content delivery network."""
SHOWN_MISTAKES, SHOWN_CHARACTERS = 20, 2000
"""Of what is wrong with a request."""
BACKLOG = 64
"""Connections that the kernel holds before we take them."""
AT_ONCE, TICKS = 32, 4
"""Of them asyncio takes so many in one go, without asking for room; so often it does before one that is cut for the first of them has given
its file back (3.11, selector_events.py: taken, made, aborted, closed, in a tick of the loop each)."""
FEWEST = 16
"""Connections that a server must be able to hold."""
KEEP_S = 10.0
"""Of a connection without a request. httpx forgets its own after 5 s: it is not to send where we have just closed."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and ClientDisconnect raised here, as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
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


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def busy(code: int, text: str) -> HTTPException:
    return HTTPException(code, text, headers=AGAIN)


async def read(request: Request, kind: type[B]) -> B:
    """The body as a request of this kind. Its text is Unicode afterwards: pydantic's reader refuses half characters, json's does not."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        if error.error_count() > SHOWN_MISTAKES:  # to list a million takes ten seconds
            raise HTTPException(422, f"{error.error_count()} mistakes, keys that there are not among them, maybe") from error
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        raise HTTPException(
            422, [{"where": [str(part)[:64] for part in each["loc"]], "what": each["msg"][:200]} for each in mistakes]
        ) from error


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """For `app.openapi()`: what the route reads by itself, without references, which would lead into the page and not into the schema."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, schema.get("$defs", {}))}}}}


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inlined(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(each, definitions) for name, each in value.items() if name != "$defs"}


async def told(_request: Request, error: StarletteException) -> JSONResponse:
    """What is wrong, without sending back what may be megabytes, nor half characters of a box, which have no bytes."""
    detail = error.detail[:SHOWN_CHARACTERS].encode("utf-8", "replace").decode() if isinstance(error.detail, str) else error.detail
    return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)


async def nobody(_request: Request, _error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # which nobody hears


@contextlib.contextmanager
def listening(host: str, port: int, *, token: str, allows: str) -> Iterator[socket.socket]:
    """A socket at the address; port 0 is any free one. OSError: it is taken. ValueError: beyond this machine, without a token, it `allows`
    everybody something."""
    with socket.create_server((host, port), backlog=BACKLOG) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it; without it a reply takes 40 ms
        if not token and is_for_all(listener.getsockname()[0]):
            raise ValueError(f"--host {host} lets everybody who reaches it {allows}: give --token-file FILE, or --host 127.0.0.1")
        yield listener


async def until_asked(app: FastAPI, listener: socket.socket, *, line: Line) -> None:
    """Serve until SIGINT or SIGTERM; the address is printed once requests are taken."""
    server = uvicorn.Server(config_of(app, line))
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn stops, then raises it again: what it serves must end before us
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.02)
    listener.listen(BACKLOG)  # asyncio has given it AT_ONCE
    host, port = listener.getsockname()[:2]
    print(f"http://{host}:{port}", flush=True)
    await running


def config_of(app: FastAPI, line: Line) -> uvicorn.Config:
    """Nothing that we do not use is offered, and what a client may bring about is not logged without end."""
    unused = {"ws": "none", "proxy_headers": False, "access_log": False}
    config = uvicorn.Config(
        app, http=partial(Connection, line=line), backlog=AT_ONCE, log_level="error", timeout_keep_alive=math.ceil(KEEP_S),
        timeout_graceful_shutdown=5, **unused,
    )  # fmt: skip
    for logger in map(logging.getLogger, ("uvicorn.error", "asyncio")):
        for earlier in [each for each in logger.filters if isinstance(each, Sparse)]:  # of a server before this one
            logger.removeFilter(earlier)
        logger.addFilter(Sparse())
    return config


def connections(beside: int, *, most: int) -> int:
    """For how many at once this process has files beside `beside` others; the soft limit is raised where the hard one allows.
    ValueError: too few. A server that cannot accept logs it without end and hears nobody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside += psutil.Process().num_fds() + TICKS * AT_ONCE
    able = min(most, hard - beside)
    if able < FEWEST:
        raise ValueError(f"{hard} open files are allowed (ulimit -Hn), {beside + FEWEST} are needed to serve: raise it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, beside + able), hard))
    return able
