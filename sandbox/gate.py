"""What every request passes before anything looks into it: its headers (access.py), the size of its body, and how much work that can be.

A body is read whole here, so the routes meet no client that went away in the middle of one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox.access import AccessRules, Refusal
from sandbox.messages import num_marks
from sandbox.types import Limits

AGAIN = {"Retry-After": "1"}
"""What a refused client is told: seconds to wait."""
SMALL = 64 << 10
"""Bytes of a body that are always taken, and all that a route without a body takes."""
NAMES_BYTES = 8 << 20
ESCAPED = 12
"""Bytes of one character of JSON at most: two surrogates of six."""
BODIES_AT_ONCE = 4
"""So many of the largest bodies may be held at the same time."""


def allowed(limits: Limits) -> dict[str, Any]:
    """What the sandbox's own routes take."""
    inputs = 2 * limits.input_bytes  # base64 takes 4/3 of it; the rest is for names and the preload
    most = {"boxes": inputs, "run_code": inputs, "calls": SMALL + ESCAPED * limits.code, "files": NAMES_BYTES}
    return {"most": most, "marks": SMALL + limits.code}


class Gate:
    """Each of the application's requests, or a refusal that ends the connection."""

    def __init__(self, app: ASGIApp, *, most: Mapping[str, int], marks: int, token: str, hosts: Iterable[str] = ()) -> None:
        """`most`: bytes of a body by the last part of its path; `marks`: commas and brackets in one (messages.num_marks); `hosts`: see
        AccessRules."""
        self.app, self.most, self.marks = app, most, marks
        self.rules = AccessRules(token=token, hosts=hosts)
        self.held, self.most_held = 0, BODIES_AT_ONCE * max(most.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.rules.refusal(scope)
        most = self.most.get(scope["path"].rpartition("/")[2], SMALL)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
        elif not declared.isdigit() or int(declared) > most:
            await refuse(_too_long(most), scope, receive, send)
        else:
            await self._take(most, scope, receive, send)

    async def _take(self, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []
        size = counted = 0
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                self.held += max(0, size - SMALL) - counted
                counted = max(0, size - SMALL)
                if size > most:
                    return await refuse(_too_long(most), scope, receive, send)
                if self.held > self.most_held:
                    code = 429 if scope["path"] == "/boxes" else 503
                    return await refuse(Refusal(code, "the server holds as many large requests as it may", AGAIN), scope, receive, send)
            body = b"".join(parts)
            parts.clear()
            if num_marks(body) > self.marks:
                text = f"more than {self.marks} commas and brackets, which base64 has none of"
                return await refuse(Refusal(422, text), scope, receive, send)
            await self.app(scope, replayed(body, receive), send)
        finally:
            self.held -= counted


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"a request has at most {most} bytes here")


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already, then what `receive` gives."""
    left = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return again


async def refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and end the connection: what is still on its way is not read."""
    headers = {"Connection": "close", **refusal.headers}
    await JSONResponse({"detail": refusal.text}, refusal.code, headers=headers)(scope, receive, send)
