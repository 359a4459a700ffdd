"""HTTP server of the sandbox.

Boxes run in the pool of this process. A client addresses its box by an unguessable id.

    POST   /boxes                  open a box; 429 if no box becomes free in time, 503 if the host
                                   fails to open a box, both with a Retry-After header
    POST   /boxes/{id}/calls       run code in the box; 404 if the box is not open, 409 if the id
                                   of the call was used before
    POST   /boxes/{id}/files       read files of the box
    DELETE /boxes/{id}             close the box
    GET    /health                 name, size, layers and limits of the server
    GET    /metrics                metrics in Prometheus' text format
    POST   /run_code               run a SandboxFusion request (fusion.py)

If the executed code fails, the HTTP response is still successful, and the result describes the
failure. The server closes a box if the client disconnects during a call, or if the box receives no
request for `idle_timeout_s`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import ClientDisconnect

from megatron_rl_sandbox import fusion
from megatron_rl_sandbox.box_registry import BoxRegistry, OpenBox
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import (
    NO_DOC_PAGES,
    handle_disconnect,
    handle_http_error,
    make_retry_error,
    open_listener,
    openapi_body,
    read_body,
    reserve_connections,
    run_while_connected,
    serve_until_signal,
)
from megatron_rl_sandbox.messages import CallRequest, FetchRequest, OpenRequest, decode_base64, encode_base64, encode_result
from megatron_rl_sandbox.pool import DESCRIPTORS_PER_BOX, EXTRA_DESCRIPTORS, Box, SandboxPool
from megatron_rl_sandbox.records import BoxClosed, PoolFull, SandboxError
from megatron_rl_sandbox.request_gate import RequestGuardMiddleware, make_body_limits
from megatron_rl_sandbox.server_metrics import SandboxMetrics

MAX_CALLS_PER_BOX = 100_000
"""Maximum number of calls per box. The ids of all calls are stored, so that no call runs twice."""
MAX_REQUESTS_PER_BOX = 8


class SandboxService:
    """Route handlers that serve a running pool.

    At most `max_waiting` requests (default: the pool's size) wait for a free box, each for at most
    `wait_s` seconds. Further requests are refused at once.
    """

    def __init__(self, pool: SandboxPool, *, wait_s: float, idle_timeout_s: float, max_waiting: int | None, name: str) -> None:
        self.pool, self.wait_s, self.name = pool, wait_s, name
        self.metrics = SandboxMetrics(pool)
        self.open_boxes = BoxRegistry(idle_timeout_s=idle_timeout_s, metrics=self.metrics)
        self.wait_queue = asyncio.Semaphore(max_waiting if max_waiting is not None else pool.size)

    async def _open_in_pool(self, *, wait_s: float, **inputs: Any) -> Box:
        if self.wait_queue.locked():
            self.metrics.refused_opens.labels("full").inc()
            raise make_retry_error(429, f"all {self.pool.size} boxes are in use and the wait queue is full")
        async with self.wait_queue:
            try:
                return await self.pool.open(wait_s=wait_s, **inputs)
            except PoolFull as error:
                self.metrics.refused_opens.labels("full").inc()
                raise make_retry_error(429, f"all {self.pool.size} boxes are in use: {error}") from error
            except SandboxError as error:
                self.metrics.refused_opens.labels("host").inc()
                raise make_retry_error(503, str(error)) from error
            except BoxClosed as error:
                raise make_retry_error(503, "the server is closing") from error
            except ValueError as error:
                raise HTTPException(422, str(error)) from error

    async def open_box(self, request: Request) -> dict[str, str]:
        """Open a box and return its id."""
        body = await read_body(request, OpenRequest)
        try:
            images = {name: decode_base64(text) for name, text in body.images.items()}
            files = {name: decode_base64(text) for name, text in body.files.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        patience = self.wait_s if body.wait_s is None else min(body.wait_s, self.wait_s)
        work = self._open_in_pool(images=images, files=files, preload=body.preload, wait_s=patience)
        return {"box": self.open_boxes.add_box(await run_while_connected(request, work))}

    async def run_call(self, request: Request, name: str) -> dict[str, Any]:
        """Run a call in a box and return its encoded result.

        If the client disconnects during the call, the box is closed.
        """
        body, most_s = await read_body(request, CallRequest), self.pool.limits.call_timeout_s
        with self.hold_open(name) as room:
            if body.call in room.call_names:
                raise HTTPException(409, f"call id {body.call!r} was already used in this box: the call is not run again")
            if len(room.call_names) >= MAX_CALLS_PER_BOX:
                raise HTTPException(409, f"a box accepts only {MAX_CALLS_PER_BOX} calls: open a new box")
            room.call_names.add(body.call)
            try:
                result = await run_while_connected(request, room.box.run(body.code, timeout_s=min(body.timeout_s or most_s, most_s)))
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            except (asyncio.CancelledError, ClientDisconnect):
                self.metrics.abandoned_calls.inc()
                self.open_boxes.close_box(name)
                raise
        self.metrics.record_call(result)
        return encode_result(result)

    @contextlib.contextmanager
    def hold_open(self, name: str) -> Iterator[OpenBox]:
        """Keep a box open during a request, and limit the number of active requests for each box.

        A box runs one request at a time, and each waiting request occupies a connection. Therefore,
        a request is refused if MAX_REQUESTS_PER_BOX requests for the box are already active.
        """
        with self.open_boxes.hold_open(name) as room:
            if room.num_active > MAX_REQUESTS_PER_BOX:
                raise make_retry_error(429, f"{MAX_REQUESTS_PER_BOX} requests already wait for this box")
            yield room

    async def fetch_files(self, request: Request, name: str) -> dict[str, str]:
        """Return the requested files of a box, base64-encoded."""
        body = await read_body(request, FetchRequest)
        with self.hold_open(name) as room:
            return {file: encode_base64(content) for file, content in (await room.box.fetch_files(body.names)).items()}

    async def close_box(self, name: str) -> None:
        """Close a box and wait until it is closed."""
        self.open_boxes.find_box(name)
        task = self.open_boxes.close_box(name)
        assert task is not None
        await asyncio.shield(task)

    async def run_code(self, request: Request) -> fusion.RunCodeResponse:
        """Run a SandboxFusion request in a new box."""
        body, call_timeout_s = await read_body(request, fusion.RunCodeRequest), self.pool.limits.call_timeout_s

        async def work() -> fusion.RunCodeResponse:
            response, result = await fusion.handle_run_code(
                body, open_box=partial(self._open_in_pool, wait_s=self.wait_s), call_timeout_s=call_timeout_s
            )
            if result is not None:
                self.metrics.record_call(result)
            return response

        return await run_while_connected(request, work())

    async def health(self) -> dict[str, Any]:
        """Return the name, size, layers and limits of the server."""
        pool = self.pool
        now = {"status": "ok", "name": self.name, "size": pool.size, "open": pool.num_open}
        return {**now, "layers": pool.layers.enabled_names(), "limits": asdict(pool.limits)}

    async def read_metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self.metrics.render_text(), media_type="text/plain; version=0.0.4")


def create_app(
    pool: SandboxPool, *, wait_s: float = 10.0, idle_timeout_s: float = 600.0, max_waiting: int | None = None, name: str = "",
    token: str = "",
    host: str = "",
) -> FastAPI:  # fmt: skip
    """Return the application that serves a running pool.

    The shutdown of the application closes every box. `token` is the bearer token that requests must
    send ("" for none), and `host` is an additional host name of this server (see request_gate.py).
    """
    service = SandboxService(pool, wait_s=wait_s, idle_timeout_s=idle_timeout_s, max_waiting=max_waiting, name=name)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.open_boxes.close()

    # FastAPI would redirect paths with a trailing slash to the host in the request's Host header,
    # which is untrusted.
    app = FastAPI(title="sandbox", lifespan=lifespan, redirect_slashes=False, **NO_DOC_PAGES)
    app.add_middleware(RequestGuardMiddleware, **make_body_limits(pool.limits), token=token, hosts=[host])
    app.add_exception_handler(StarletteException, handle_http_error)
    app.add_exception_handler(BoxClosed, _handle_unknown_box)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.post("/boxes", status_code=201, openapi_extra=openapi_body(OpenRequest))(service.open_box)
    app.post("/boxes/{name}/calls", openapi_extra=openapi_body(CallRequest))(service.run_call)
    app.post("/boxes/{name}/files", openapi_extra=openapi_body(FetchRequest))(service.fetch_files)
    app.delete("/boxes/{name}", status_code=204)(service.close_box)
    app.post("/run_code", openapi_extra=openapi_body(fusion.RunCodeRequest))(service.run_code)
    app.get("/health")(service.health)
    app.get("/metrics")(service.read_metrics)
    return app


async def _handle_unknown_box(_request: Request, error: BoxClosed) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 404)


async def run_server(
    pool: SandboxPool,
    *,
    host: str,
    port: int,
    wait_s: float,
    idle_timeout_s: float,
    name: str = "",
    token: str = "",
    registry: ConnectionRegistry | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Port 0 picks a free port. The address is printed once the server accepts requests.

    Raises:
        SandboxError: The pool does not start, or the limit on open files is too low.
        OSError: The address cannot be bound.
        ValueError: The address is reachable from other machines and there is no token.
    """
    with open_listener(host, port, token=token, permits="run code") as listener:
        async with pool:
            registry = registry or ConnectionRegistry()
            beside, most = DESCRIPTORS_PER_BOX * pool.size + EXTRA_DESCRIPTORS, registry.max_connections
            try:
                registry.max_connections = min(most, reserve_connections(beside, max_connections=most))
            except ValueError as error:
                raise SandboxError(f"{error} or use fewer boxes") from error
            await serve_until_signal(
                create_app(pool, wait_s=wait_s, idle_timeout_s=idle_timeout_s, name=name, token=token, host=host),
                listener,
                registry=registry,
            )
