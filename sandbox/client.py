"""A sandbox server seen from a trainer: the verbs of the in-process pool over HTTP.

    async with SandboxClient("http://127.0.0.1:8080") as pool:
        async with await pool.open(images={"image_0": picture}) as box:
            result = await box.run("print(image_0.size)")

The host's trouble, the network included, is `PoolFull` or `SandboxError` from `open`, and a result with `fault: host` from `run`. A call is
never sent twice: whether it ran is not known when the connection breaks, and the box is gone on the server then.
"""

import asyncio
import contextlib
import re
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from types import TracebackType
from typing import Any, Self

from PIL import Image
from pydantic import TypeAdapter
from pydantic_core import from_json

from sandbox.bounded_http import DENIED_STATUSES, BoundedClient, NoResponse, Transport
from sandbox.clock import MAX_WALL_FACTOR
from sandbox.images import ImageBudget
from sandbox.inputs import collect_inputs
from sandbox.keeper import ZYGOTE_START_TIMEOUT_S
from sandbox.messages import (
    MAX_TEXT_CHARS,
    count_json_delimiters,
    decode_base64,
    decode_result,
    encode_base64,
    max_response_bytes,
    max_response_chars,
)
from sandbox.types import (
    BoxClosed,
    BoxLimits,
    CallError,
    CallResult,
    Fault,
    PoolFull,
    SandboxAccessDenied,
    SandboxError,
    check_source_length,
)

CLIENT_GRACE_S = 30.0
"""On top of what the server itself allows on a machine under load (sandbox/clock.py), before a client gives it up."""
SLOT_WAIT_S = 60.0
"""For how long an `open` waits for a place at a time; a server may allow less."""
CONNECT_TIMEOUT_S = 10.0
CONNECT_RETRIES = 2
DEFAULT_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Between two tries of a refused `open` where the server does not say, and whatever it says."""
MIN_RESPONSE_BYTES = 64 << 10
"""Bytes of any answer that are taken, commas and brackets as well."""
MAX_RESPONSE_BYTES, MAX_PIXELS, MAX_WAIT_S = 256 << 20, Image.MAX_IMAGE_PIXELS or 0, 86400.0
"""What a server may promise."""
MAX_ERROR_CHARS = 2000
_LIMITS: TypeAdapter[BoxLimits] = TypeAdapter(BoxLimits)


class SandboxClient:
    """One server. `start` asks for its limits, and no answer beyond them is believed; raises SandboxError when nobody answers."""

    def __init__(self, url: str, *, token: str = "", transport: Transport | None = None) -> None:
        self.http = BoundedClient(url, token=token, retries=CONNECT_RETRIES, transport=transport)

    async def start(self) -> None:
        try:
            health = await self.send_request("GET", "/health")
        except (BoxClosed, PoolFull, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise SandboxError(f"{self.http.base_url}: no sandbox server, or one that is too busy: {told}") from error
        try:
            promised = {
                "call_timeout_s": health["limits"]["call_timeout_s"],
                "open_timeout_s": health["limits"]["open_timeout_s"],
                **health["limits"],
            }
            self.limits = _LIMITS.validate_python(promised)
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"{self.http.base_url}: no sandbox server, or another version: {health!r:.200}") from error
        if (excess := _find_excessive_limit(self.limits)) is not None:
            raise SandboxError(f"{self.http.base_url}: {excess}, more than a client takes: give the server smaller limits")

    async def close(self) -> None:
        await self.http.close()

    async def send_request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        wait_s: float = CONNECT_TIMEOUT_S,
        max_bytes: int = 0,
        max_delimiters: int = MIN_RESPONSE_BYTES,
    ) -> Any:
        """The JSON of a good answer of `max_bytes` bytes, or of SMALL ones. Raises PoolFull for 429, BoxClosed for 404, ValueError for
        what we sent, AccessDenied for 401 and 403, SandboxError for all else. `wait_s` is for the request and for the answer."""
        limit_s = CONNECT_TIMEOUT_S + 2 * wait_s
        try:
            answer = await self.http.request(
                method, path, body, timeout_s=limit_s, max_bytes=max(max_bytes, MIN_RESPONSE_BYTES), connect_timeout_s=CONNECT_TIMEOUT_S
            )
            if answer.status in DENIED_STATUSES:
                text = " ".join(answer.text[:MAX_ERROR_CHARS].split())
                denied = f"answers {answer.status} ({text}): it does not accept this token; give that of its --token-file"
                raise SandboxAccessDenied(f"{self.http.base_url}: {denied}")
            if count_json_delimiters(answer.content) > max_delimiters:
                raise SandboxError(f"{self.http.base_url}: more than {max_delimiters} commas and brackets")
            told = from_json(answer.content) if answer.content else None
        except NoResponse as error:
            raise SandboxError(f"{self.http.base_url}: {error}"[:MAX_ERROR_CHARS]) from error
        except ValueError as error:  # not JSON, or nested too deeply
            raise SandboxError(f"{self.http.base_url}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]) from error
        if answer.is_success:
            return told
        detail = str(told.get("detail") if isinstance(told, dict) else told)[:MAX_ERROR_CHARS]
        match answer.status:
            case 429:
                raise ServerFull(detail, retry_after_s=_parse_retry_after(answer.headers.get("Retry-After", "")))
            case 404:
                raise BoxClosed(detail)
            case 409 | 413 | 422:
                raise ValueError(detail)
        raise SandboxError(f"{self.http.base_url}: status {answer.status}: {detail}")

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> "RemoteBox":
        """As `SandboxPool.open`: waits for ever, or `wait_s` seconds, asking again when the server says so; then PoolFull."""
        pictures, files = {name: encode_image_file(image) for name, image in (images or {}).items()}, files or {}
        collect_inputs(images=pictures, files=files, limits=self.limits)  # what the server refuses is not sent
        for what, text in (("preload", preload), *(("a name", name) for name in (*pictures, *files))):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # no server reads it
                raise ValueError(f"{what}: {error}") from error
        body = {
            "images": {name: encode_base64(content) for name, content in pictures.items()},
            "files": {name: encode_base64(content) for name, content in files.items()},
            "preload": preload,
        }
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            place_s = SLOT_WAIT_S if left is None else min(left, SLOT_WAIT_S)
            try:
                answer = await self.send_request(
                    "POST", "/boxes", body | {"wait_s": place_s}, wait_s=compute_timeout_s(self.limits, slot_wait_s=place_s)
                )
                name = answer.get("box") if isinstance(answer, dict) else None
                if not isinstance(name, str) or not re.fullmatch(r"\w{1,64}", name, re.ASCII):
                    raise SandboxError(f"{self.http.base_url}: no box's name: {answer!r:.200}")
                return RemoteBox(self, name)
            except ServerFull as full:
                if left is not None and left <= full.retry_after_s:
                    raise
                await asyncio.sleep(full.retry_after_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class ServerFull(PoolFull):
    """The server has no place; it says when to come again."""

    def __init__(self, why: str, *, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class RemoteBox:
    """A box on the server. `async with` closes it."""

    def __init__(self, pool: SandboxClient, name: str) -> None:
        self.pool = pool
        self.name = name
        self.num_calls = 0
        self.image_budget = ImageBudget(pool.limits)
        self.is_closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        """As `Box.run`. Cancelled, it closes the connection, and the server the box. Raises BoxClosed, AccessDenied."""
        self.num_calls += 1
        try:
            code.encode()
        except UnicodeEncodeError as error:  # no server reads it; an interpreter would say the same
            text = "".join(traceback.format_exception_only(error))
            return CallResult(
                id=self.num_calls, fault=Fault.CODE, error=CallError(type=type(error).__name__, message=str(error), traceback=text)
            )
        limits = self.pool.limits
        if (refused := check_source_length(self.num_calls, code, limits=limits)) is not None:
            return refused
        allowed = limits.call_timeout_s if timeout_s is None else min(timeout_s, limits.call_timeout_s)
        body = {"call": secrets.token_hex(8), "code": code, "timeout_s": timeout_s}
        bounds = {
            "wait_s": compute_timeout_s(limits, work_s=allowed),
            "max_bytes": max_response_bytes(limits),
            "max_delimiters": max_response_chars(limits),
        }
        try:
            answer = await self.pool.send_request("POST", f"/boxes/{self.name}/calls", body, **bounds)
            believed = partial(decode_result, answer, limits=limits, budget=self.image_budget)
            return await asyncio.to_thread(believed) if len(answer["images"]) else believed()
        except SandboxAccessDenied:
            raise
        except (SandboxError, PoolFull) as error:
            return self._host_fault(str(error))
        except (ValueError, KeyError, TypeError) as error:  # also where the server finds fault with the request, which is as it should be
            return self._host_fault(f"{self.pool.http.base_url}: no result: {error}")

    def _host_fault(self, reason: str) -> CallResult:
        return CallResult(id=self.num_calls, fault=Fault.HOST, error=CallError(type="SandboxError", message=reason[:2000]))

    async def fetch_files(self, names: Sequence[str]) -> dict[str, bytes]:
        """As `Box.fetch_files`; SandboxError where the server is in trouble."""
        limits = self.pool.limits
        asked, text = list(names), MIN_RESPONSE_BYTES + MAX_TEXT_CHARS * len(names)
        bounds = {
            "wait_s": compute_timeout_s(limits, work_s=limits.call_timeout_s),
            "max_bytes": min(text + limits.max_fetch_bytes * 4 // 3, MAX_RESPONSE_BYTES),
            "max_delimiters": text,
        }
        try:
            answer = await self.pool.send_request("POST", f"/boxes/{self.name}/files", {"names": asked}, **bounds)
            if (
                not isinstance(answer, dict)
                or not set(asked).issuperset(answer)
                or not all(isinstance(file, str) for file in answer.values())
            ):
                raise ValueError("not the files that were asked for")
            found = {name: decode_base64(content) for name, content in answer.items()}
            if sum(map(len, found.values())) > limits.max_fetch_bytes or any(len(content) > limits.file for content in found.values()):
                raise ValueError("files above their limits")
        except (PoolFull, ValueError) as error:
            raise SandboxError(f"{self.pool.http.base_url}: {error}") from error
        return found

    async def close(self) -> None:
        """Twice is once; a box that the server closed already is closed."""
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(BoxClosed, SandboxError, PoolFull, ValueError):  # whatever is wrong: a server closes what is idle
            await self.pool.send_request("DELETE", f"/boxes/{self.name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def compute_timeout_s(limits: BoxLimits, *, work_s: float = 0.0, slot_wait_s: float = 0.0) -> float:
    """Seconds that a server of ours may take on a machine under load: for a place, a zygote, an interpreter (a box that was killed begins
    anew in its next call) and the work."""
    return slot_wait_s + ZYGOTE_START_TIMEOUT_S + MAX_WALL_FACTOR * (limits.open_timeout_s + work_s) + CLIENT_GRACE_S


def _find_excessive_limit(limits: BoxLimits) -> str | None:
    """What a server promises beyond all measure, by mistake or to bring us down; None where nothing."""
    if not max_response_bytes(limits) <= MAX_RESPONSE_BYTES:
        return f"answers of {max_response_bytes(limits)} bytes"
    if not max(limits.image_pixels, limits.pixels) <= MAX_PIXELS:
        return f"pictures of {limits.image_pixels} pixels"
    if not (0 < limits.call_timeout_s <= MAX_WAIT_S and 0 < limits.open_timeout_s <= MAX_WAIT_S):
        return f"calls of {limits.call_timeout_s:g} s, {limits.open_timeout_s:g} s to open"
    return None


def _parse_retry_after(header: str) -> float:
    """Until the next try: what the server says, within reason."""
    try:
        after_s = float(header)
    except ValueError:
        return DEFAULT_RETRY_S
    return min(after_s, MAX_RETRY_S) if after_s >= 0 else DEFAULT_RETRY_S


def encode_image_file(image: Image.Image | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
