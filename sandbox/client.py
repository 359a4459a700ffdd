"""A sandbox server seen from a trainer: the verbs of the in-process pool over HTTP.

    async with SandboxClient("http://127.0.0.1:8080") as pool:
        async with await pool.open(images={"image_0": picture}) as box:
            result = await box.run("print(image_0.size)")

The host's trouble, the network included, is `PoolFull` or `SandboxFault` from `open`, and a result with `fault: host` from `run`. A call is
never sent twice: whether it ran is not known when the connection breaks, and the box is gone on the server then.
"""

import asyncio
import contextlib
import json
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from io import BytesIO
from types import TracebackType
from typing import Any, Self

import httpx
from PIL import Image

from sandbox.messages import decoded, encoded, result_from_wire
from sandbox.types import BoxClosed, Error, Fault, PoolFull, Result, SandboxFault

GRACE_S = 30.0
"""On top of what the server itself allows for a call, before a client gives it up."""
CONNECT_S = 10.0
RETRIES_AT_CONNECT = 2
JSON = {"Content-Type": "application/json"}
RETRY_S = 1.0
"""Between two tries of a refused `open` where the server does not say."""


class SandboxClient:
    """One server. `start` asks for its limits; raises SandboxFault when nobody answers."""

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = transport or httpx.AsyncHTTPTransport(retries=RETRIES_AT_CONNECT, limits=limits)
        self.http = httpx.AsyncClient(base_url=url, transport=transport, timeout=CONNECT_S)

    async def start(self) -> None:
        health = await self.ask("GET", "/health")
        try:
            self.call_s, self.open_s = float(health["limits"]["call_s"]), float(health["limits"]["open_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxFault(f"{self.http.base_url}: no sandbox server, or another version: {health!r:.200}") from error

    async def close(self) -> None:
        await self.http.aclose()

    async def ask(self, verb: str, path: str, body: dict[str, Any] | None = None, *, wait_s: float = CONNECT_S) -> Any:
        """The JSON of a good answer. Raises PoolFull for 429, BoxClosed for 404, ValueError for what we sent, SandboxFault for all else."""
        sent = None if body is None else json.dumps(body).encode("ascii")  # escaped: httpx has no bytes for half a surrogate pair
        timeout = httpx.Timeout(CONNECT_S, read=wait_s, write=wait_s)
        try:
            answer = await self.http.request(verb, path, content=sent, headers=JSON, timeout=timeout)
            content = answer.json() if answer.content else None
        except (httpx.HTTPError, ValueError) as error:  # ValueError: not JSON
            raise SandboxFault(f"{self.http.base_url}: {type(error).__name__}: {error}") from error
        if answer.is_success:
            return content
        detail = content.get("detail") if isinstance(content, dict) else content
        match answer.status_code:
            case 429:
                raise Refused(str(detail), after_s=float(answer.headers.get("Retry-After", RETRY_S)))
            case 404:
                raise BoxClosed(str(detail))
            case 409 | 413 | 422:
                raise ValueError(str(detail))
        raise SandboxFault(f"{self.http.base_url}: status {answer.status_code}: {detail}")

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> "RemoteBox":
        """As `Sandbox.open`: waits for ever, or `wait_s` seconds, asking again when the server says so; then PoolFull."""
        body = {
            "images": {name: encoded(file_of(image)) for name, image in (images or {}).items()},
            "files": {name: encoded(content) for name, content in (files or {}).items()},
            "preload": preload,
        }
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                answer = await self.ask("POST", "/boxes", body | {"wait_s": left}, wait_s=self.open_s + GRACE_S)
                return RemoteBox(self, str(answer["box"]))
            except Refused as full:
                if left is not None and left <= full.after_s:
                    raise
                await asyncio.sleep(full.after_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class Refused(PoolFull):
    """The server has no place; it says when to come again."""

    def __init__(self, why: str, *, after_s: float) -> None:
        super().__init__(why)
        self.after_s = after_s


class RemoteBox:
    """A box on the server. `async with` closes it."""

    def __init__(self, pool: SandboxClient, name: str) -> None:
        self.pool = pool
        self.name = name
        self.calls = 0
        self.closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """As `Box.run`. Cancelled, it closes the connection, and the server the box. Raises BoxClosed."""
        self.calls += 1
        try:
            code.encode()
        except UnicodeEncodeError as error:  # no server reads it; an interpreter would say the same
            text = "".join(traceback.format_exception_only(error))
            return Result(id=self.calls, fault=Fault.CODE, error=Error(type=type(error).__name__, message=str(error), traceback=text))
        allowed = self.pool.call_s if timeout_s is None else timeout_s
        body = {"call": secrets.token_hex(8), "code": code, "timeout_s": timeout_s}
        try:
            answer = await self.pool.ask("POST", f"/boxes/{self.name}/calls", body, wait_s=allowed + GRACE_S)
        except SandboxFault as error:
            return self._host_fault(str(error))
        try:
            return result_from_wire(answer)
        except (ValueError, KeyError, TypeError) as error:
            return self._host_fault(f"{self.pool.http.base_url}: no result: {error}")

    def _host_fault(self, reason: str) -> Result:
        return Result(id=self.calls, fault=Fault.HOST, error=Error(type="SandboxFault", message=reason[:2000]))

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        answer = await self.pool.ask("POST", f"/boxes/{self.name}/files", {"names": list(names)}, wait_s=GRACE_S)
        return {name: decoded(content) for name, content in answer.items()}

    async def close(self) -> None:
        """Twice is once; a box that the server closed already is closed."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(BoxClosed, SandboxFault):  # gone already, or its server is: it closes what is idle
            await self.pool.ask("DELETE", f"/boxes/{self.name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def file_of(image: Image.Image | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
