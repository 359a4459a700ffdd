"""This project's servers on free loopback ports, with and without a defense, and raw requests.

No sandbox boxes or models are started, because the attacks target only the HTTP layers.
"""

import argparse
import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from megatron_rl.observe.viewer.store import label_folders
from megatron_rl.observe.viewer.web_app import create_app as viewer_app
from megatron_rl.rollout.vllm.http_gate import MIDDLEWARE, TOKEN_FILE
from megatron_rl.tasks.lewis.server.model_server import make_application
from megatron_rl.tasks.lewis.server.request_limiter import RequestLimits as ModelLimits
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import make_uvicorn_config
from megatron_rl_sandbox.inputs import collect_inputs
from megatron_rl_sandbox.layers import Layers
from megatron_rl_sandbox.pool import SandboxPool
from megatron_rl_sandbox.records import BoxLimits, CallResult
from megatron_rl_sandbox.server import create_app

TOKEN = "a-word-of-thirty-two-characters!"
READ_S = 5.0
SMALL_LIMITS = BoxLimits(input_bytes=4 << 20)


@dataclass
class Site:
    """Port and log messages of a running server."""

    port: int
    log: list[str] = field(default_factory=list)

    def connect(self) -> socket.socket:
        """Open a connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=READ_S)

    def ask(self, verb: str, path: str, *headers: tuple[str, str], body: bytes = b"", version: str = "1.1") -> tuple[int, bytes]:
        """Send one request exactly as given and return the status and the whole response.

        Returns (0, b"") if the server sends no response.
        """
        given = {name.casefold() for name, _ in headers}
        more = [("Content-Length", str(len(body)))] if body and not given & {"content-length", "transfer-encoding"} else []
        head = "".join(f"{name}: {value}\r\n" for name, value in (*headers, *more, ("Connection", "close")))
        with self.connect() as line, suppress(OSError):
            line.sendall(f"{verb} {path} HTTP/{version}\r\n{head}\r\n".encode("latin-1") + body)
            answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
            return int(answer[9:12] or 0), answer
        return 0, b""


class _StillBox:
    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        return CallResult(id=1, text=code[:100])

    async def fetch_files(self, names: list[str]) -> dict[str, bytes]:
        return {name: bytes(int(name)) for name in names}

    async def close(self) -> None:
        """Do nothing: there are no resources."""


class _StillPool(SandboxPool):
    """Sandbox pool whose boxes have no processes."""

    def __init__(self, limits: BoxLimits | None) -> None:
        super().__init__(size=8, limits=limits)
        self.layers = Layers()

    num_open = 0

    async def open(self, *, images: Mapping[str, bytes] = {}, files: Mapping[str, bytes] = {}, **_: Any) -> _StillBox:
        collect_inputs(images=images, files=files, limits=self.limits)
        return _StillBox()


@dataclass(frozen=True, slots=True)
class SandboxServer:
    """Sandbox server, optionally without its request guard."""

    token: str = ""
    is_gated: bool = True
    line: ConnectionRegistry | None = field(default_factory=ConnectionRegistry)
    """Connection limits; None means uvicorn's own connection class, which has no limits."""
    limits: BoxLimits | None = None

    @contextmanager
    def __call__(self, folder: Path) -> Iterator[Site]:
        """Run the server for the duration of a `with` block."""
        app = create_app(_StillPool(self.limits), token=self.token)
        if not self.is_gated:
            app.user_middleware.clear()
        with _serving(app, self.line) as site:
            yield site


@dataclass(frozen=True, slots=True)
class ModelServer:
    """Listener server with a dummy route /score, optionally without its request guard."""

    is_gated: bool = True

    @contextmanager
    def __call__(self, folder: Path) -> Iterator[Site]:
        """Run the server for the duration of a `with` block."""
        app = make_application("listener", limits=ModelLimits(), large_body_routes=("score",), token="", receiver=None)
        if not self.is_gated:
            app.user_middleware.clear()

        @app.post("/score")
        async def score(request: Request) -> dict[str, int]:
            return {"bytes": len(await request.body())}

        with _serving(app, ConnectionRegistry()) as site:
            yield site


@dataclass(frozen=True, slots=True)
class EngineServer:
    """Server with dummy routes behind vLLM's middleware and, optionally, the request gate."""

    is_gated: bool = True

    @contextmanager
    def __call__(self, folder: Path) -> Iterator[Site]:
        """Run the server for the duration of a `with` block."""
        (folder / "token").write_text(TOKEN)
        os.environ[TOKEN_FILE] = str(folder / "token")
        app = FastAPI()

        @app.websocket("/v1/realtime")
        async def realtime(talk: WebSocket) -> None:
            await talk.accept()

        @app.post("/collective_rpc")
        @app.post("/pause")
        @app.get("/v1/models")
        async def route() -> dict[str, str]:
            return {}

        everything = {"allowed_origins": ["*"], "allow_credentials": False, "allowed_methods": ["*"], "allowed_headers": ["*"]}
        middleware = [MIDDLEWARE] if self.is_gated else []
        app.state.args = argparse.Namespace(
            middleware=middleware, host="127.0.0.1", api_key=None, enable_request_id_headers=False, **everything
        )
        init_entrypoints_middleware(app.state.args, app, ())
        with _serving(app, None) as site:
            yield site


@dataclass(frozen=True, slots=True)
class Viewer:
    """Viewer server, optionally without its middleware."""

    is_guarded: bool = True
    line: ConnectionRegistry | None = field(default_factory=ConnectionRegistry)

    @contextmanager
    def __call__(self, folder: Path) -> Iterator[Site]:
        """Run the viewer with a small run directory for the duration of a `with` block."""
        images = folder / "run" / "rollouts" / "images"
        images.mkdir(parents=True)
        (images / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nthe run's picture")
        (folder / "run" / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
        app = viewer_app(label_folders([folder / "run"]), hosts=["127.0.0.1", "localhost"])
        if not self.is_guarded:
            app.user_middleware.clear()
        with _serving(app, self.line) as site:
            yield site


@contextmanager
def _serving(app: FastAPI, line: ConnectionRegistry | None) -> Iterator[Site]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = uvicorn.Server(make_uvicorn_config(app, line) if line else uvicorn.Config(app, log_level="warning"))
        site = Site(listener.getsockname()[1])
        keeper = logging.Handler()
        keeper.emit = lambda record: site.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("uvicorn").handlers = [keeper]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield site  # ends with the process of the attempt


def num_open(lines: Sequence[socket.socket]) -> int:
    """Return the number of connections that the server has neither responded to nor closed."""
    found = 0
    for line in lines:
        line.setblocking(False)
        try:
            line.recv(1)
        except BlockingIOError:
            found += 1
        except OSError:
            continue
    return found
