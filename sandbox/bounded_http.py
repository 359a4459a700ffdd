"""The HTTP client of every server of ours and of vLLM's: an answer is bounded in time as a whole, and in bytes.

httpx's own time-outs are those of one read: a byte each second holds a request for ever. Here one limit covers the connection, the request
and the whole answer. Compressed answers are not asked for and are refused, because a few kilobytes of one may be gigabytes. No redirect is
followed, and no proxy of the environment is used. Clients of judges, which may be anywhere, are in megatron_rl/clients/openai.py.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ssl import SSLContext
from types import TracebackType
from typing import Self

import httpx

Transport = httpx.AsyncBaseTransport
DENIED_STATUSES = (401, 403)
"""Statuses of a server that is well and does not accept the key or token of a request."""


class NoResponse(Exception):
    """There is no whole answer within the bounds: nobody listens, the connection broke, or the answer is late, too long or compressed."""


@dataclass(slots=True, frozen=True)
class BoundedResponse:
    """A whole answer of a server, whatever its status."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    token: str = field(default="", repr=False)
    """The token of the request."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The content for error messages: without the token, which the server may have repeated."""
        return _redact_token(self.token, self.content.decode(errors="replace"))


class BoundedClient:
    """Sends requests from one event loop and keeps its connections between them."""

    def __init__(
        self, base_url: str = "", *, token: str = "", keepalive_s: float = 5.0, retries: int = 0, transport: Transport | None = None
    ) -> None:  # fmt: skip
        """`token` goes with every request. An idle connection is kept for `keepalive_s`; `retries` are those of a connection that is
        refused."""
        self._token = token
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_s)
        transport = transport or httpx.AsyncHTTPTransport(verify=_load_tls_context(), retries=retries, limits=limits)
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # none is kept: they would be sent back, and grow without a bound
        self._http = httpx.AsyncClient(
            base_url=base_url, transport=transport, timeout=None, headers=headers, cookies=cookies, trust_env=False
        )  # fmt: skip

    @property
    def base_url(self) -> str:
        return str(self._http.base_url)

    async def request(
        self, method: str, url: str, body: object = None, *,
        timeout_s: float, max_bytes: int, connect_timeout_s: float | None = None,
        params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None,
    ) -> BoundedResponse:  # fmt: skip
        """Return the answer to a request whose body, if any, is sent as JSON. Raises NoResponse.

        `timeout_s` is for all of it; `connect_timeout_s` for a connection alone.
        """
        sent = None
        if body is not None:
            sent = json.dumps(body, separators=(",", ":")).encode("ascii")  # escaped: UTF-8 has no bytes for half a surrogate pair
            headers = {**(headers or {}), "Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.stream(method, url, content=sent, headers=headers, params=params, timeout=timeout) as answer:
                    content = await _read_body(answer, max_bytes=max_bytes)
                    return BoundedResponse(answer.status_code, answer.headers, content, self._token)
        except TimeoutError as late:
            raise NoResponse(f"no whole answer within {timeout_s:g} s") from late
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last one of a host's name
            raise NoResponse(f"{type(error).__name__}: {_redact_token(self._token, str(error))}") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def _redact_token(token: str, text: str) -> str:
    return text.replace(token, "***") if token else text


async def _read_body(answer: httpx.Response, *, max_bytes: int) -> bytes:
    encoding, content = answer.headers.get("Content-Encoding", "").strip().casefold(), bytearray()
    if encoding not in ("", "identity"):
        raise NoResponse(f"the answer is compressed ({encoding[:20]!r}), which was not asked for")
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > max_bytes:
            raise NoResponse(f"the answer has more than {max_bytes} bytes")
    return bytes(content)


def send_request(
    method: str, url: str, body: object = None, *, timeout_s: float, max_bytes: int,
    token: str = "", params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None,
) -> BoundedResponse:  # fmt: skip
    """Return the answer to one request by a connection of its own, as BoundedClient.request. Call it in a thread without an event loop."""

    async def once() -> BoundedResponse:
        async with BoundedClient(token=token) as client:
            return await client.request(method, url, body, timeout_s=timeout_s, max_bytes=max_bytes, params=params, headers=headers)

    return asyncio.run(once())


@cache
def _load_tls_context() -> SSLContext:
    """Return the certificates that are trusted, those of SSL_CERT_FILE where that is set. Reading them takes 30 ms."""
    return httpx.create_ssl_context()
