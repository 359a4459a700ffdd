"""The sandbox over HTTP. Boxes live in this process's pool; a client names its box by an id that cannot be guessed.

    POST   /boxes                  open a box          429 when none comes free in time, 503 when the host makes none, with Retry-After
    POST   /boxes/{id}/calls       run code in it      404 for an id that is not open (any more), 409 for a call's name that was used before
    POST   /boxes/{id}/files       read its files
    DELETE /boxes/{id}             close it
    GET    /health /metrics        name, size, layers and limits; Prometheus text
    POST   /run_code               SandboxFusion's request (fusion.py)

What the code did is never an HTTP error: it is in the result. A client that goes away in the middle of a call loses its box, and one that
is silent for `idle_s` too: nothing is kept for those who do not come back.
"""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox import fusion
from sandbox.messages import BODY_BYTES, CallRequest, FetchRequest, OpenRequest, decoded, encoded, result_to_wire
from sandbox.metrics import Metrics
from sandbox.pool import Box, Sandbox
from sandbox.rooms import Rooms
from sandbox.types import BoxClosed, PoolFull, SandboxFault

T = TypeVar("T")
RETRY_S = 1.0
"""What a refused client is told to wait."""


class BodyLimit:
    """Refuses a request whose body is larger than `most` bytes, before anything reads it whole."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.most:
            await JSONResponse({"detail": f"a request has at most {self.most} bytes"}, 413)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                raise HTTPException(413, f"a request has at most {self.most} bytes")
            return message

        await self.app(scope, counted, send)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; cancelled, and CancelledError raised here too, as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def busy(code: int, text: str) -> HTTPException:
    return HTTPException(code, text, headers={"Retry-After": str(math.ceil(RETRY_S))})


class Service:
    """What the routes do, over a running pool. `waiting` requests at most (one per box by default) wait for a free box, each at most
    `wait_s`; more are refused at once."""

    def __init__(self, pool: Sandbox, *, wait_s: float, idle_s: float, waiting: int | None, name: str) -> None:
        self.pool, self.wait_s, self.name = pool, wait_s, name
        self.metrics = Metrics(pool)
        self.rooms = Rooms(idle_s=idle_s, metrics=self.metrics)
        self.line = asyncio.Semaphore(waiting if waiting is not None else pool.size)

    async def _opened(self, *, wait_s: float, **inputs: Any) -> Box:
        if self.line.locked():
            self.metrics.refused.labels("full").inc()
            raise busy(429, f"all {self.pool.size} boxes are taken and as many requests wait as may")
        async with self.line:
            try:
                return await self.pool.open(wait_s=wait_s, **inputs)
            except PoolFull as error:
                self.metrics.refused.labels("full").inc()
                raise busy(429, f"all {self.pool.size} boxes are taken: {error}") from error
            except SandboxFault as error:
                self.metrics.refused.labels("host").inc()
                raise busy(503, str(error)) from error
            except BoxClosed as error:
                raise busy(503, "the server is closing") from error
            except ValueError as error:
                raise HTTPException(422, str(error)) from error

    async def open_box(self, request: Request, body: OpenRequest) -> dict[str, str]:
        try:
            images = {name: decoded(text) for name, text in body.images.items()}
            files = {name: decoded(text) for name, text in body.files.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        patience = self.wait_s if body.wait_s is None else min(body.wait_s, self.wait_s)
        work = self._opened(images=images, files=files, preload=body.preload, wait_s=patience)
        return {"box": self.rooms.add(await while_connected(request, work))}

    async def call(self, request: Request, name: str, body: CallRequest) -> dict[str, Any]:
        with self.rooms.using(name) as room:
            if body.call in room.calls:
                raise HTTPException(409, f"a call named {body.call!r} was made in this box before: it is not run again")
            room.calls.add(body.call)
            try:
                result = await while_connected(request, room.box.run(body.code, timeout_s=body.timeout_s))
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            except asyncio.CancelledError:
                self.metrics.deserted.inc()
                self.rooms.drop(name)
                raise
        self.metrics.called(result)
        return result_to_wire(result)

    async def fetch(self, name: str, body: FetchRequest) -> dict[str, str]:
        with self.rooms.using(name) as room:
            return {file: encoded(content) for file, content in (await room.box.fetch(body.names)).items()}

    async def close(self, name: str) -> None:
        self.rooms.find(name)
        task = self.rooms.drop(name)
        assert task is not None
        await asyncio.shield(task)

    async def run_code(self, request: Request, body: fusion.RunCodeRequest) -> fusion.RunCodeResponse:
        async def work() -> fusion.RunCodeResponse:
            response, result = await fusion.serve(body, open_box=partial(self._opened, wait_s=self.wait_s))
            if result is not None:
                self.metrics.called(result)
            return response

        return await while_connected(request, work())

    async def health(self) -> dict[str, Any]:
        pool = self.pool
        told = {"status": "ok", "name": self.name, "size": pool.size, "open": pool.num_open}
        return {**told, "layers": pool.layers.names(), "limits": asdict(pool.limits)}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


def create_app(pool: Sandbox, *, wait_s: float = 10.0, idle_s: float = 600.0, waiting: int | None = None, name: str = "") -> FastAPI:
    """The application over a running pool; its end closes every box."""
    service = Service(pool, wait_s=wait_s, idle_s=idle_s, waiting=waiting, name=name)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.rooms.close()

    app = FastAPI(title="sandbox", lifespan=lifespan)
    app.add_middleware(BodyLimit, most=BODY_BYTES)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(BoxClosed, _unknown)
    app.post("/boxes", status_code=201)(service.open_box)
    app.post("/boxes/{name}/calls")(service.call)
    app.post("/boxes/{name}/files")(service.fetch)
    app.delete("/boxes/{name}", status_code=204)(service.close)
    app.post("/run_code")(service.run_code)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics_text)
    return app


async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong and where, without sending back what may be megabytes."""
    return JSONResponse({"detail": [{"where": list(item["loc"]), "what": item["msg"]} for item in error.errors()]}, 422)


async def _unknown(_request: Request, error: BoxClosed) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 404)


async def serve(pool: Sandbox, *, host: str, port: int, wait_s: float, idle_s: float, name: str = "") -> None:
    """Until SIGINT or SIGTERM. Port 0 is any free one: the address is printed once it takes requests. Raises SandboxFault, OSError."""
    with socket.create_server((host, port)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it; without it a reply takes 40 ms
        async with pool:
            app = create_app(pool, wait_s=wait_s, idle_s=idle_s, name=name)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
            server = uvicorn.Server(config)
            for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn stops, then raises it again: the pool must end before us
                asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not running.done():
                await asyncio.sleep(0.02)
            print(f"http://{host}:{listener.getsockname()[1]}", flush=True)
            await running
