"""A sandbox server seen from a trainer: the verbs of the in-process pool over HTTP.

    async with SandboxClient("http://127.0.0.1:8080") as pool:
        async with await pool.open(images={"image_0": picture}) as box:
            result = await box.run("print(image_0.size)")

The host's trouble, the network included, is `PoolFull` or `SandboxFault` from `open`, and a result with `fault: host` from `run`. A call is
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

from sandbox.bounded_http import DENIED, BoundedClient, NoAnswer, Transport
from sandbox.clock import PATIENCE
from sandbox.images import Allowance
from sandbox.inputs import collect
from sandbox.keeper import START_S
from sandbox.messages import MOST_TEXT, answer_bytes, answer_characters, decoded, encoded, num_marks, result_from_wire
from sandbox.types import AccessDenied, BoxClosed, Error, Fault, Limits, PoolFull, Result, SandboxFault, too_long

GRACE_S = 30.0
"""On top of what the server itself allows on a machine under load (sandbox/clock.py), before a client gives it up."""
PLACE_S = 60.0
"""For how long an `open` waits for a place at a time; a server may allow less."""
CONNECT_S = 10.0
RETRIES_AT_CONNECT = 2
RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Between two tries of a refused `open` where the server does not say, and whatever it says."""
SMALL = 64 << 10
"""Bytes of any answer that are taken, commas and brackets as well."""
MOST_ANSWER, MOST_PIXELS, MOST_WAIT_S = 256 << 20, Image.MAX_IMAGE_PIXELS or 0, 86400.0
"""What a server may promise."""
SHOWN_CHARACTERS = 2000
_LIMITS: TypeAdapter[Limits] = TypeAdapter(Limits)


class SandboxClient:
    """One server. `start` asks for its limits, and no answer beyond them is believed; raises SandboxFault when nobody answers."""

    def __init__(self, url: str, *, token: str = "", transport: Transport | None = None) -> None:
        self.http = BoundedClient(url, token=token, retries=RETRIES_AT_CONNECT, transport=transport)

    async def start(self) -> None:
        try:
            health = await self.ask("GET", "/health")
        except (BoxClosed, PoolFull, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise SandboxFault(f"{self.http.base_url}: no sandbox server, or one that is too busy: {told}") from error
        try:
            promised = {"call_s": health["limits"]["call_s"], "open_s": health["limits"]["open_s"], **health["limits"]}
            self.limits = _LIMITS.validate_python(promised)
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxFault(f"{self.http.base_url}: no sandbox server, or another version: {health!r:.200}") from error
        if (excess := _excess(self.limits)) is not None:
            raise SandboxFault(f"{self.http.base_url}: {excess}, more than a client takes: give the server smaller limits")

    async def close(self) -> None:
        await self.http.close()

    async def ask(
        self, verb: str, path: str, body: dict[str, Any] | None = None, *, wait_s: float = CONNECT_S, most: int = 0, marks: int = SMALL
    ) -> Any:
        """The JSON of a good answer of `most` bytes, or of SMALL ones. Raises PoolFull for 429, BoxClosed for 404, ValueError for what we
        sent, AccessDenied for 401 and 403, SandboxFault for all else. `wait_s` is for the request and for the answer."""
        limit_s = CONNECT_S + 2 * wait_s
        try:
            answer = await self.http.request(verb, path, body, limit_s=limit_s, max_bytes=max(most, SMALL), connect_s=CONNECT_S)
            if answer.status in DENIED:
                text = " ".join(answer.text[:SHOWN_CHARACTERS].split())
                denied = f"answers {answer.status} ({text}): it does not accept this token; give that of its --token-file"
                raise AccessDenied(f"{self.http.base_url}: {denied}")
            if num_marks(answer.content) > marks:
                raise SandboxFault(f"{self.http.base_url}: more than {marks} commas and brackets")
            told = from_json(answer.content) if answer.content else None
        except NoAnswer as error:
            raise SandboxFault(f"{self.http.base_url}: {error}"[:SHOWN_CHARACTERS]) from error
        except ValueError as error:  # not JSON, or nested too deeply
            raise SandboxFault(f"{self.http.base_url}: {type(error).__name__}: {error}"[:SHOWN_CHARACTERS]) from error
        if answer.is_success:
            return told
        detail = str(told.get("detail") if isinstance(told, dict) else told)[:SHOWN_CHARACTERS]
        match answer.status:
            case 429:
                raise Refused(detail, after_s=_seconds(answer.headers.get("Retry-After", "")))
            case 404:
                raise BoxClosed(detail)
            case 409 | 413 | 422:
                raise ValueError(detail)
        raise SandboxFault(f"{self.http.base_url}: status {answer.status}: {detail}")

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> "RemoteBox":
        """As `Sandbox.open`: waits for ever, or `wait_s` seconds, asking again when the server says so; then PoolFull."""
        pictures, files = {name: file_of(image) for name, image in (images or {}).items()}, files or {}
        collect(images=pictures, files=files, limits=self.limits)  # what the server refuses is not sent
        for what, text in (("preload", preload), *(("a name", name) for name in (*pictures, *files))):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # no server reads it
                raise ValueError(f"{what}: {error}") from error
        body = {
            "images": {name: encoded(content) for name, content in pictures.items()},
            "files": {name: encoded(content) for name, content in files.items()},
            "preload": preload,
        }
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            place_s = PLACE_S if left is None else min(left, PLACE_S)
            try:
                answer = await self.ask("POST", "/boxes", body | {"wait_s": place_s}, wait_s=bound_s(self.limits, place_s=place_s))
                name = answer.get("box") if isinstance(answer, dict) else None
                if not isinstance(name, str) or not re.fullmatch(r"\w{1,64}", name, re.ASCII):
                    raise SandboxFault(f"{self.http.base_url}: no box's name: {answer!r:.200}")
                return RemoteBox(self, name)
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
        self.allowance = Allowance(pool.limits)
        self.closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """As `Box.run`. Cancelled, it closes the connection, and the server the box. Raises BoxClosed, AccessDenied."""
        self.calls += 1
        try:
            code.encode()
        except UnicodeEncodeError as error:  # no server reads it; an interpreter would say the same
            text = "".join(traceback.format_exception_only(error))
            return Result(id=self.calls, fault=Fault.CODE, error=Error(type=type(error).__name__, message=str(error), traceback=text))
        limits = self.pool.limits
        if (refused := too_long(self.calls, code, limits=limits)) is not None:
            return refused
        allowed = limits.call_s if timeout_s is None else min(timeout_s, limits.call_s)
        body = {"call": secrets.token_hex(8), "code": code, "timeout_s": timeout_s}
        bounds = {"wait_s": bound_s(limits, work_s=allowed), "most": answer_bytes(limits), "marks": answer_characters(limits)}
        try:
            answer = await self.pool.ask("POST", f"/boxes/{self.name}/calls", body, **bounds)
            believed = partial(result_from_wire, answer, limits=limits, allowance=self.allowance)
            return await asyncio.to_thread(believed) if len(answer["images"]) else believed()
        except AccessDenied:
            raise
        except (SandboxFault, PoolFull) as error:
            return self._host_fault(str(error))
        except (ValueError, KeyError, TypeError) as error:  # also where the server finds fault with the request, which is as it should be
            return self._host_fault(f"{self.pool.http.base_url}: no result: {error}")

    def _host_fault(self, reason: str) -> Result:
        return Result(id=self.calls, fault=Fault.HOST, error=Error(type="SandboxFault", message=reason[:2000]))

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """As `Box.fetch`; SandboxFault where the server is in trouble."""
        limits = self.pool.limits
        asked, text = list(names), SMALL + MOST_TEXT * len(names)
        bounds = {"wait_s": bound_s(limits, work_s=limits.call_s), "most": min(text + limits.fetched * 4 // 3, MOST_ANSWER), "marks": text}
        try:
            answer = await self.pool.ask("POST", f"/boxes/{self.name}/files", {"names": asked}, **bounds)
            if (
                not isinstance(answer, dict)
                or not set(asked).issuperset(answer)
                or not all(isinstance(file, str) for file in answer.values())
            ):
                raise ValueError("not the files that were asked for")
            found = {name: decoded(content) for name, content in answer.items()}
            if sum(map(len, found.values())) > limits.fetched or any(len(content) > limits.file for content in found.values()):
                raise ValueError("files above their limits")
        except (PoolFull, ValueError) as error:
            raise SandboxFault(f"{self.pool.http.base_url}: {error}") from error
        return found

    async def close(self) -> None:
        """Twice is once; a box that the server closed already is closed."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(BoxClosed, SandboxFault, PoolFull, ValueError):  # whatever is wrong: a server closes what is idle
            await self.pool.ask("DELETE", f"/boxes/{self.name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def bound_s(limits: Limits, *, work_s: float = 0.0, place_s: float = 0.0) -> float:
    """Seconds that a server of ours may take on a machine under load: for a place, a zygote, an interpreter (a box that was killed begins
    anew in its next call) and the work."""
    return place_s + START_S + PATIENCE * (limits.open_s + work_s) + GRACE_S


def _excess(limits: Limits) -> str | None:
    """What a server promises beyond all measure, by mistake or to bring us down; None where nothing."""
    if not answer_bytes(limits) <= MOST_ANSWER:
        return f"answers of {answer_bytes(limits)} bytes"
    if not max(limits.image_pixels, limits.pixels) <= MOST_PIXELS:
        return f"pictures of {limits.image_pixels} pixels"
    if not (0 < limits.call_s <= MOST_WAIT_S and 0 < limits.open_s <= MOST_WAIT_S):
        return f"calls of {limits.call_s:g} s, {limits.open_s:g} s to open"
    return None


def _seconds(header: str) -> float:
    """Until the next try: what the server says, within reason."""
    try:
        after_s = float(header)
    except ValueError:
        return RETRY_S
    return min(after_s, MOST_RETRY_S) if after_s >= 0 else RETRY_S


def file_of(image: Image.Image | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
