"""Client for a sandbox server, with the same interface as the in-process `SandboxPool`.

Example:
    async with SandboxClient("http://127.0.0.1:8080") as pool:
        async with await pool.open(images={"image_0": image}) as box:
            result = await box.run("print(image_0.size)")

If the host or the network fails, `open` raises `PoolFull` or `SandboxError`, and `run` returns a
result with `Fault.HOST`. A call is never sent twice, because a client that has lost its connection
cannot know whether the call ran. The server closes a box when its client disconnects during a call.
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

from megatron_rl_sandbox.bounded_http import DENIED_STATUSES, BoundedClient, NoResponse, Transport
from megatron_rl_sandbox.clock import MAX_WALL_FACTOR
from megatron_rl_sandbox.image_codec import ImageBudget
from megatron_rl_sandbox.inputs import collect_inputs
from megatron_rl_sandbox.messages import (
    MAX_TEXT_CHARS,
    count_json_delimiters,
    decode_base64,
    decode_result,
    encode_base64,
    max_response_bytes,
    max_response_chars,
)
from megatron_rl_sandbox.records import (
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
from megatron_rl_sandbox.zygote_manager import ZYGOTE_START_TIMEOUT_S

CLIENT_GRACE_S = 30.0
"""Seconds for which a client waits in addition to the server's worst-case response time.

sandbox/clock.py explains the worst case.
"""
SLOT_WAIT_S = 60.0
"""Seconds for which one `open` request waits for a slot. The server may allow less."""
CONNECT_TIMEOUT_S = 10.0
CONNECT_RETRIES = 2
DEFAULT_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Default and maximum delay in seconds before `open` retries a refused request.

The default applies if the server sends no valid Retry-After header.
"""
MIN_RESPONSE_BYTES = 64 << 10
"""Size in bytes, and number of JSON delimiters, up to which every response is accepted."""
MAX_RESPONSE_BYTES, MAX_PIXELS, MAX_WAIT_S = 256 << 20, Image.MAX_IMAGE_PIXELS or 0, 86400.0
"""Upper bounds on the limits announced by a server: response bytes, pixels and waiting time."""
MAX_ERROR_CHARS = 2000
_LIMITS: TypeAdapter[BoxLimits] = TypeAdapter(BoxLimits)


class SandboxClient:
    """Client for one sandbox server.

    `start` fetches the server's limits. Responses that exceed these limits are rejected.
    """

    def __init__(self, url: str, *, token: str = "", transport: Transport | None = None) -> None:
        self.http = BoundedClient(url, token=token, retries=CONNECT_RETRIES, transport=transport)

    async def start(self) -> None:
        """Fetch the server's limits.

        Raises:
            SandboxError: No sandbox server responds, or the server has another version or
                excessive limits.
            SandboxAccessDenied: The server does not accept the token.
        """
        try:
            health = await self.send_request("GET", "/health")
        except (BoxClosed, PoolFull, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise SandboxError(f"{self.http.base_url}: the server is not a sandbox server or is too busy: {told}") from error
        try:
            promised = {
                "call_timeout_s": health["limits"]["call_timeout_s"],
                "open_timeout_s": health["limits"]["open_timeout_s"],
                **health["limits"],
            }
            self.limits = _LIMITS.validate_python(promised)
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(
                f"{self.http.base_url}: the server is not a sandbox server or has another version: {health!r:.200}"
            ) from error
        if (excess := _find_excessive_limit(self.limits)) is not None:
            raise SandboxError(f"{self.http.base_url}: {excess}, which is more than clients accept: reduce the limits of the server")

    async def close(self) -> None:
        """Close the connections."""
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
        """Send a request and return the parsed JSON of a successful response.

        Args:
            method: HTTP method.
            path: Path below the base URL.
            body: Request body, sent as JSON.
            wait_s: Seconds allowed for sending the request, and the same time for receiving the
                response. The timeout for the whole exchange is `CONNECT_TIMEOUT_S + 2 * wait_s`.
            max_bytes: Maximum size of the response body; at least MIN_RESPONSE_BYTES are accepted.
            max_delimiters: Maximum number of JSON delimiters in the response.

        Raises:
            ServerFull: Status 429.
            BoxClosed: Status 404.
            ValueError: Status 409, 413 or 422: the request is invalid.
            SandboxAccessDenied: Status 401 or 403.
            SandboxError: Any other failure.
        """
        limit_s = CONNECT_TIMEOUT_S + 2 * wait_s
        try:
            answer = await self.http.request(
                method, path, body, timeout_s=limit_s, max_bytes=max(max_bytes, MIN_RESPONSE_BYTES), connect_timeout_s=CONNECT_TIMEOUT_S
            )
            if answer.status in DENIED_STATUSES:
                text = " ".join(answer.text[:MAX_ERROR_CHARS].split())
                denied = f"status {answer.status} ({text}): the server rejected this token; use the token of its --token-file"
                raise SandboxAccessDenied(f"{self.http.base_url}: {denied}")
            if count_json_delimiters(answer.content) > max_delimiters:
                raise SandboxError(f"{self.http.base_url}: the response has more than {max_delimiters} commas and opening brackets")
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
        """Open a box as `SandboxPool.open` does.

        While the server is full, the client repeats the request after the delay in the server's
        Retry-After header. `PoolFull` is raised if no slot becomes free within `wait_s` seconds. If
        `wait_s` is None, there is no limit on the wait.
        """
        pictures, files = {name: encode_image_file(image) for name, image in (images or {}).items()}, files or {}
        collect_inputs(images=pictures, files=files, limits=self.limits)  # validate before sending inputs that the server would refuse
        for what, text in (("preload", preload), *(("a name", name) for name in (*pictures, *files))):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # the server could not parse it
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
                    raise SandboxError(f"{self.http.base_url}: the response has no box id: {answer!r:.200}")
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
    """The server has no free slot; `retry_after_s` is the delay before the next attempt."""

    def __init__(self, why: str, *, retry_after_s: float) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class RemoteBox:
    """Box on the server. Leaving the `async with` block closes the box."""

    def __init__(self, pool: SandboxClient, name: str) -> None:
        self.pool = pool
        self.name = name
        self.num_calls = 0
        self.image_budget = ImageBudget(pool.limits)
        self.is_closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        """Execute `code` as `Box.run` does.

        Cancelling this coroutine closes the connection, and the server then closes the box.

        Raises:
            BoxClosed: The box is closed.
            SandboxAccessDenied: The server no longer accepts the token.
        """
        self.num_calls += 1
        try:
            code.encode()
        except UnicodeEncodeError as error:  # an interpreter would raise the same error
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
        except (ValueError, KeyError, TypeError) as error:  # includes a server that rejects the request as invalid
            return self._host_fault(f"{self.pool.http.base_url}: invalid result: {error}")

    def _host_fault(self, reason: str) -> CallResult:
        return CallResult(id=self.num_calls, fault=Fault.HOST, error=CallError(type="SandboxError", message=reason[:2000]))

    async def fetch_files(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of files in the working directory, as `Box.fetch_files` does.

        Raises:
            SandboxError: The server failed or sent an invalid response.
        """
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
                raise ValueError("the response contains files that were not requested, or is invalid")
            found = {name: decode_base64(content) for name, content in answer.items()}
            if sum(map(len, found.values())) > limits.max_fetch_bytes or any(len(content) > limits.file for content in found.values()):
                raise ValueError("the files in the response are too large")
        except (PoolFull, ValueError) as error:
            raise SandboxError(f"{self.pool.http.base_url}: {error}") from error
        return found

    async def close(self) -> None:
        """Close the box.

        Has no effect if the client or the server has already closed the box.
        """
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(BoxClosed, SandboxError, PoolFull, ValueError):  # errors are harmless: the server closes idle boxes
            await self.pool.send_request("DELETE", f"/boxes/{self.name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def compute_timeout_s(limits: BoxLimits, *, work_s: float = 0.0, slot_wait_s: float = 0.0) -> float:
    """Return the worst-case duration in seconds of a request under load, plus CLIENT_GRACE_S.

    The worst case includes waiting for a slot, starting a zygote, opening an interpreter and the
    work itself. A call also opens an interpreter if the previous interpreter of the box was killed.
    """
    return slot_wait_s + ZYGOTE_START_TIMEOUT_S + MAX_WALL_FACTOR * (limits.open_timeout_s + work_s) + CLIENT_GRACE_S


def _find_excessive_limit(limits: BoxLimits) -> str | None:
    """Return a description of a limit that is too large to accept, or None.

    Such a limit indicates a configuration error or an attack.
    """
    if not max_response_bytes(limits) <= MAX_RESPONSE_BYTES:
        return f"responses of {max_response_bytes(limits)} bytes"
    if not max(limits.image_pixels, limits.pixels) <= MAX_PIXELS:
        return f"images of {limits.image_pixels} pixels"
    if not (0 < limits.call_timeout_s <= MAX_WAIT_S and 0 < limits.open_timeout_s <= MAX_WAIT_S):
        return f"calls of {limits.call_timeout_s:g} s, {limits.open_timeout_s:g} s to open"
    return None


def _parse_retry_after(header: str) -> float:
    """Parse a Retry-After header into a delay of at most MAX_RETRY_S seconds."""
    try:
        after_s = float(header)
    except ValueError:
        return DEFAULT_RETRY_S
    return min(after_s, MAX_RETRY_S) if after_s >= 0 else DEFAULT_RETRY_S


def encode_image_file(image: Image.Image | bytes) -> bytes:
    """Encode a PIL image as PNG; return the bytes of an already encoded image unchanged."""
    if isinstance(image, bytes):
        return image
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
