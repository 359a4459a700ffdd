"""HTTP client that limits the total time and the size of each response.

This client is used for this project's servers and for vLLM servers. Judges may run on any host; the
client for judges is in megatron_rl/clients/openai.py.

The timeouts of httpx apply to single reads, so a server that sends one byte per second could block
a request forever. In this client, one timeout covers the connection, the request and the whole
response. Compressed responses are rejected, because a few kilobytes may expand to gigabytes.
Redirects are not followed, and proxy settings in environment variables are ignored.
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
"""HTTP statuses that a healthy server returns if it rejects the key or token of a request."""


class NoResponse(Exception):
    """No complete response arrived within the limits.

    The connection was refused or lost, or the response was late, too large or compressed.
    """


@dataclass(slots=True, frozen=True)
class BoundedResponse:
    """Complete response of a server, with any status code."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    token: str = field(default="", repr=False)
    """Bearer token sent with the request; `text` redacts this token."""

    @property
    def is_success(self) -> bool:
        """Return True for a 2xx status."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """Content as text for error messages, with the token redacted if the server echoed it."""
        return _redact_token(self.token, self.content.decode(errors="replace"))


class BoundedClient:
    """HTTP client that reuses connections. An instance must be used on one event loop only."""

    def __init__(
        self, base_url: str = "", *, token: str = "", keepalive_s: float = 5.0, retries: int = 0, transport: Transport | None = None
    ) -> None:  # fmt: skip
        """Create a client.

        Args: base_url: Base URL for requests with relative URLs. token: Bearer token sent with
            every request; empty for none. keepalive_s: Seconds for which an idle connection is kept
            open. retries: Number of retries if a connection is refused. transport: Transport that
            replaces the HTTP transport in tests.
        """
        self._token = token
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_s)
        transport = transport or httpx.AsyncHTTPTransport(verify=_load_tls_context(), retries=retries, limits=limits)
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        # Cookies are not stored: they would be sent back, and their number is unbounded.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx.AsyncClient(
            base_url=base_url, transport=transport, timeout=None, headers=headers, cookies=cookies, trust_env=False
        )  # fmt: skip

    @property
    def base_url(self) -> str:
        """Base URL for requests with relative URLs."""
        return str(self._http.base_url)

    async def request(
        self, method: str, url: str, body: object = None, *,
        timeout_s: float, max_bytes: int, connect_timeout_s: float | None = None,
        params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None,
    ) -> BoundedResponse:  # fmt: skip
        """Send a request and return the response.

        Args:
            method: HTTP method.
            url: Absolute URL, or path below the base URL.
            body: Request body, sent as JSON; None sends no body.
            timeout_s: Timeout in seconds for the whole exchange.
            max_bytes: Maximum size of the response body in bytes.
            connect_timeout_s: Timeout in seconds for opening a connection.
            params: Query parameters.
            headers: Additional headers.

        Raises:
            NoResponse: No complete response arrived within the limits.
        """
        sent = None
        if body is not None:
            sent = json.dumps(body, separators=(",", ":")).encode("ascii")  # ASCII escapes: UTF-8 cannot encode a lone surrogate
            headers = {**(headers or {}), "Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.stream(method, url, content=sent, headers=headers, params=params, timeout=timeout) as answer:
                    content = await _read_body(answer, max_bytes=max_bytes)
                    return BoundedResponse(answer.status_code, answer.headers, content, self._token)
        except TimeoutError as late:
            raise NoResponse(f"no complete response within {timeout_s:g} s") from late
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: invalid host name
            raise NoResponse(f"{type(error).__name__}: {_redact_token(self._token, str(error))}") from error

    async def close(self) -> None:
        """Close the connections."""
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
        raise NoResponse(f"the response is compressed ({encoding[:20]!r}), although no compression was requested")
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > max_bytes:
            raise NoResponse(f"the response has more than {max_bytes} bytes")
    return bytes(content)


def send_request(
    method: str, url: str, body: object = None, *, timeout_s: float, max_bytes: int,
    token: str = "", params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None,
) -> BoundedResponse:  # fmt: skip
    """Send one request on a new connection and return the response.

    The arguments are the same as for `BoundedClient` and `BoundedClient.request`. The calling
    thread must not have a running event loop.
    """

    async def once() -> BoundedResponse:
        async with BoundedClient(token=token) as client:
            return await client.request(method, url, body, timeout_s=timeout_s, max_bytes=max_bytes, params=params, headers=headers)

    return asyncio.run(once())


@cache
def _load_tls_context() -> SSLContext:
    """Return a TLS context with the trusted CA certificates.

    The certificates are read from SSL_CERT_FILE if this variable is set. The context is cached,
    because loading the certificates takes 30 ms.
    """
    return httpx.create_ssl_context()
