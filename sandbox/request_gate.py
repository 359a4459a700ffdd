"""ASGI middleware that checks request headers and limits the size and complexity of request bodies.

access.py implements the checks of the headers. The middleware reads each body completely before it
calls the application, so clients that disconnect while sending a body never reach a route.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl_sandbox.access import AccessRules, RequestRejection
from megatron_rl_sandbox.messages import count_json_delimiters
from megatron_rl_sandbox.records import BoxLimits

RETRY_HEADERS = {"Retry-After": "1"}
"""Headers of a rejection that ask the client to retry after one second."""
MIN_BODY_BYTES = 64 << 10
"""Body size in bytes that is always accepted, and the limit for routes without their own limit."""
MAX_NAMES_BYTES = 8 << 20
MAX_JSON_BYTES_PER_CHAR = 12
"""Maximum number of JSON bytes per character: two escaped surrogates of six bytes each."""
MAX_LARGE_BODIES = 4
"""Maximum number of maximum-size request bodies held in memory at once."""


def make_body_limits(limits: BoxLimits) -> dict[str, Any]:
    """Return the body limits of the sandbox's routes, as arguments of `RequestGuardMiddleware`."""
    inputs = 2 * limits.input_bytes  # base64 needs 4/3; the rest is for names and the preload
    most = {"boxes": inputs, "run_code": inputs, "calls": MIN_BODY_BYTES + MAX_JSON_BYTES_PER_CHAR * limits.code, "files": MAX_NAMES_BYTES}
    return {"max_body_bytes": most, "max_delimiters": MIN_BODY_BYTES + limits.code}


def make_detail(rejection: RequestRejection) -> object:
    """Return the body of a rejection, in the form of FastAPI's errors."""
    return {"detail": rejection.detail}


class RequestGuardMiddleware:
    """Passes acceptable requests to the application, and rejects all others."""

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: Mapping[str, int], max_delimiters: int, token: str, hosts: Iterable[str] = (),
        make_body: Callable[[RequestRejection], object] = make_detail,
    ) -> None:  # fmt: skip
        """Wrap `app`.

        Args:
            app: ASGI application.
            max_body_bytes: Maximum size of a body in bytes, keyed by the last part of the request's
                path.
            max_delimiters: Maximum number of JSON delimiters in a body (see
                `messages.count_json_delimiters`).
            token: Required bearer token; empty for none.
            hosts: Additional names of this server, as for `AccessRules`.
            make_body: Function that returns the JSON body of a rejection.
        """
        self.app, self.max_body_bytes, self.max_delimiters = app, max_body_bytes, max_delimiters
        self.rules = AccessRules(token=token, hosts=hosts)
        self._make_body = make_body
        self.held_bytes, self.max_held_bytes = 0, MAX_LARGE_BODIES * max(max_body_bytes.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and read a request, then pass it to the application or reject it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.rules.check_request(scope)
        most = self.max_body_bytes.get(scope["path"].rpartition("/")[2], MIN_BODY_BYTES)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if refusal is not None:
            await self._reject(refusal, scope, receive, send)
        elif not declared.isdigit() or int(declared) > most:
            await self._reject(_make_body_too_large(most), scope, receive, send)
        else:
            await self._read_and_forward(most, scope, receive, send)

    async def _read_and_forward(self, max_body_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
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
                self.held_bytes += max(0, size - MIN_BODY_BYTES) - counted
                counted = max(0, size - MIN_BODY_BYTES)
                if size > max_body_bytes:
                    return await self._reject(_make_body_too_large(max_body_bytes), scope, receive, send)
                if self.held_bytes > self.max_held_bytes:
                    code = 429 if scope["path"] == "/boxes" else 503
                    return await self._reject(
                        RequestRejection(code, "the server already holds its maximum of large requests", RETRY_HEADERS),
                        scope,
                        receive,
                        send,
                    )
            body = b"".join(parts)
            parts.clear()
            if count_json_delimiters(body) > self.max_delimiters:
                text = f"more than {self.max_delimiters} commas and opening brackets, which base64 does not contain"
                return await self._reject(RequestRejection(422, text), scope, receive, send)
            await self.app(scope, replay_body(body, receive), send)
        finally:
            self.held_bytes -= counted

    async def _reject(self, rejection: RequestRejection, scope: Scope, receive: Receive, send: Send) -> None:
        await send_rejection(rejection, scope, receive, send, body=self._make_body(rejection))


def _make_body_too_large(most: int) -> RequestRejection:
    return RequestRejection(413, f"a request to this route may have at most {most} bytes")


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that first returns `body`, then the messages of `receive`."""
    left = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return again


async def send_rejection(rejection: RequestRejection, scope: Scope, receive: Receive, send: Send, *, body: object = None) -> None:
    """Send the rejection and close the connection. Unread parts of the request are discarded.

    `body` is the JSON body; None selects that of FastAPI's errors.
    """
    headers = {"Connection": "close", **rejection.headers}
    content = make_detail(rejection) if body is None else body
    await JSONResponse(content, rejection.status_code, headers=headers)(scope, receive, send)
