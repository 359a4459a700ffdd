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
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException
from starlette.requests import ClientDisconnect

from sandbox import fusion
from sandbox.connections import Line
from sandbox.gate import Gate, allowed
from sandbox.http import NO_PAGES, busy, connections, documented, listening, nobody, read, told, until_asked, while_connected
from sandbox.messages import CallRequest, FetchRequest, OpenRequest, decoded, encoded, result_to_wire
from sandbox.metrics import Metrics
from sandbox.pool import DESCRIPTORS_BESIDE, DESCRIPTORS_PER_BOX, Box, Sandbox
from sandbox.rooms import Room, Rooms
from sandbox.types import BoxClosed, PoolFull, SandboxFault

CALLS_OF_A_BOX = 100_000
"""Their names are kept, that none runs twice."""
AT_ONCE_OF_A_BOX = 8


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

    async def open_box(self, request: Request) -> dict[str, str]:
        body = await read(request, OpenRequest)
        try:
            images = {name: decoded(text) for name, text in body.images.items()}
            files = {name: decoded(text) for name, text in body.files.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        patience = self.wait_s if body.wait_s is None else min(body.wait_s, self.wait_s)
        work = self._opened(images=images, files=files, preload=body.preload, wait_s=patience)
        return {"box": self.rooms.add(await while_connected(request, work))}

    async def call(self, request: Request, name: str) -> dict[str, Any]:
        body, most_s = await read(request, CallRequest), self.pool.limits.call_s
        with self.using(name) as room:
            if body.call in room.calls:
                raise HTTPException(409, f"a call named {body.call!r} was made in this box before: it is not run again")
            if len(room.calls) >= CALLS_OF_A_BOX:
                raise HTTPException(409, f"a box takes {CALLS_OF_A_BOX} calls: open another")
            room.calls.add(body.call)
            try:
                result = await while_connected(request, room.box.run(body.code, timeout_s=min(body.timeout_s or most_s, most_s)))
            except ValueError as error:
                raise HTTPException(422, str(error)) from error
            except (asyncio.CancelledError, ClientDisconnect):
                self.metrics.deserted.inc()
                self.rooms.drop(name)
                raise
        self.metrics.called(result)
        return result_to_wire(result)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[Room]:
        """The room, for one of few at a time: a box answers one by one, and whoever waits for it holds a connection."""
        with self.rooms.using(name) as room:
            if room.busy > AT_ONCE_OF_A_BOX:
                raise busy(429, f"{AT_ONCE_OF_A_BOX} requests wait for this box already")
            yield room

    async def fetch(self, request: Request, name: str) -> dict[str, str]:
        body = await read(request, FetchRequest)
        with self.using(name) as room:
            return {file: encoded(content) for file, content in (await room.box.fetch(body.names)).items()}

    async def close(self, name: str) -> None:
        self.rooms.find(name)
        task = self.rooms.drop(name)
        assert task is not None
        await asyncio.shield(task)

    async def run_code(self, request: Request) -> fusion.RunCodeResponse:
        body, call_s = await read(request, fusion.RunCodeRequest), self.pool.limits.call_s

        async def work() -> fusion.RunCodeResponse:
            response, result = await fusion.serve(body, open_box=partial(self._opened, wait_s=self.wait_s), call_s=call_s)
            if result is not None:
                self.metrics.called(result)
            return response

        return await while_connected(request, work())

    async def health(self) -> dict[str, Any]:
        pool = self.pool
        now = {"status": "ok", "name": self.name, "size": pool.size, "open": pool.num_open}
        return {**now, "layers": pool.layers.names(), "limits": asdict(pool.limits)}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


def create_app(
    pool: Sandbox, *, wait_s: float = 10.0, idle_s: float = 600.0, waiting: int | None = None, name: str = "", token: str = "",
    host: str = "",
) -> FastAPI:  # fmt: skip
    """The application over a running pool; its end closes every box. `token`, and `host` as a further name of the server: gate.py."""
    service = Service(pool, wait_s=wait_s, idle_s=idle_s, waiting=waiting, name=name)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.rooms.close()

    # A redirection for a slash too many is made of the request's Host header, whatever that holds.
    app = FastAPI(title="sandbox", lifespan=lifespan, redirect_slashes=False, **NO_PAGES)
    app.add_middleware(Gate, **allowed(pool.limits), token=token, hosts=[host])
    app.add_exception_handler(StarletteException, told)
    app.add_exception_handler(BoxClosed, _unknown)
    app.add_exception_handler(ClientDisconnect, nobody)
    app.post("/boxes", status_code=201, openapi_extra=documented(OpenRequest))(service.open_box)
    app.post("/boxes/{name}/calls", openapi_extra=documented(CallRequest))(service.call)
    app.post("/boxes/{name}/files", openapi_extra=documented(FetchRequest))(service.fetch)
    app.delete("/boxes/{name}", status_code=204)(service.close)
    app.post("/run_code", openapi_extra=documented(fusion.RunCodeRequest))(service.run_code)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics_text)
    return app


async def _unknown(_request: Request, error: BoxClosed) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 404)


async def serve(
    pool: Sandbox, *, host: str, port: int, wait_s: float, idle_s: float, name: str = "", token: str = "", line: Line | None = None
) -> None:
    """Until SIGINT or SIGTERM. Port 0 is any free one: the address is printed once it takes requests. Raises SandboxFault, OSError,
    and ValueError for an address beyond this machine without a token."""
    with listening(host, port, token=token, allows="run code") as listener:
        async with pool:
            line = line or Line()
            beside, most = DESCRIPTORS_PER_BOX * pool.size + DESCRIPTORS_BESIDE, line.most
            try:
                line.most = min(most, connections(beside, most=most))
            except ValueError as error:
                raise SandboxFault(f"{error}, or take fewer boxes") from error
            await until_asked(create_app(pool, wait_s=wait_s, idle_s=idle_s, name=name, token=token, host=host), listener, line=line)
