"""A sandbox server in this process, over real sockets, whose sandboxes do nothing.

Used to test everything that happens before a sandbox runs code.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import create_connection, create_server, socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import make_uvicorn_config
from megatron_rl_sandbox.image_codec import ImageBudget
from megatron_rl_sandbox.inputs import collect_inputs
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.messages import decode_result
from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import BoxLimits, CallResult
from megatron_rl_sandbox.server import create_app


class FakeBox:
    """Returns its code as output.

    The code `sleep 2` waits for 2 s first. Each file has the size that its name specifies.
    """

    def __init__(self, pool: "FakePool") -> None:
        self.pool = pool

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        self.pool.timeouts.append(timeout_s)
        if code.startswith("sleep "):
            await asyncio.sleep(float(code.split()[1]))
        return CallResult(id=1, text=code[:100])

    async def fetch_files(self, names: list[str]) -> dict[str, bytes]:
        return {name: bytes(int(name)) for name in names if name.isdecimal() and len(name) < 9}

    async def close(self) -> None:
        self.pool.num_open -= 1

    async def __aenter__(self) -> "FakeBox":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class FakePool(SandboxPool):
    """A sandbox pool without processes."""

    def __init__(self, limits: BoxLimits | None = None, *, size: int = 8) -> None:
        super().__init__(size=size, limits=limits)
        self.layers, self.timeouts = Layers(), []

    num_open = 0

    async def open(self, *, images: Mapping[str, bytes] = {}, files: Mapping[str, bytes] = {}, **other: Any) -> FakeBox:
        collect_inputs(images=images, files=files, limits=self.limits)
        if other["preload"].startswith("raise "):
            raise ValueError(other["preload"].encode().decode("unicode_escape"))
        self.num_open += 1
        return FakeBox(self)


@dataclass
class RunningServer:
    """A running server and the log records that it has written."""

    port: int
    pool: FakePool
    server: uvicorn.Server
    log: list[logging.LogRecord] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket:
        return create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def serve_sandbox(
    *, connections: ConnectionRegistry | None = None, pool: FakePool | None = None, app: FastAPI | None = None, token: str = ""
) -> Iterator[RunningServer]:
    """Run the server in a thread with its own event loop.

    `app` replaces the complete application.
    """
    pool = pool or FakePool()
    with create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(make_uvicorn_config(app or create_app(pool, token=token), connections or ConnectionRegistry()))
        server.config.timeout_graceful_shutdown = 0
        found = RunningServer(listener.getsockname()[1], pool, server)
        keeper = logging.Handler()
        keeper.emit = found.log.append  # type: ignore[method-assign]
        logging.getLogger("uvicorn.error").addHandler(keeper)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            while not server.started:
                threading.Event().wait(0.01)
            yield found
        finally:
            server.should_exit = True
            thread.join(20)
            logging.getLogger("uvicorn.error").removeHandler(keeper)
    assert not thread.is_alive()


def build_request(path: str, body: object = None, *, method: str = "POST", headers: str = "", length: int | None = None) -> bytes:
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}Content-Length: {size}\r\n\r\n"
    return head.encode() + content


def read_answer(connection: socket) -> bytes:
    """Read until the other side closes the connection.

    A reset connection returns the data received before the reset.
    """
    answer = b""
    try:
        while part := connection.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def parse_results(data: Any, *, limits: BoxLimits | None = None, calls: int = 1) -> CallResult:
    """Decode the same result `calls` times with one image budget, as from one sandbox, and return
    the last one.
    """
    limits = limits or BoxLimits()
    allowance = ImageBudget(limits)
    return [decode_result(data, limits=limits, budget=allowance) for _ in range(calls)][-1]
