"""Clients of OpenAI-compatible servers, with bounded replies and masked keys.

The size limit applies to every body that a server may send: replies, model lists, error pages and
redirect pages. Requests ask for uncompressed responses, and a compressed body is rejected, because
a few kilobytes may expand to gigabytes. Error messages never contain a server's key. Written
against openai 3.52.0, httpx2 2.16.
"""

import os
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
from pydantic import BaseModel, Field, ValidationError

from megatron_rl.clients.endpoint_pool import EndpointError, KeyRefused, RequestRejected, describe_error, parse_retry_after, to_one_line
from megatron_rl.clients.proxies import Proxy, find_proxy, proxy_hint
from megatron_rl.errors import InfraError
from megatron_rl_sandbox.token import read_token

MAX_BODY_BYTES = 1 << 20
"""Maximum size of a response body in bytes."""


class UnreadBody(openai.OpenAIError):
    """Raised for a response body that is compressed or too long; the rest of the body stays unread.

    The class derives from OpenAIError, because the openai package re-raises its own exceptions
    unchanged (_base_client.py, request).
    """


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the chunks; raise UnreadBody after MAX_BODY_BYTES."""
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                raise UnreadBody(f"the response is longer than {MAX_BODY_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound_response(response: httpx2.Response) -> None:
    """Limit the size of a response; raise UnreadBody if its headers already violate the limits.

    Called before any byte of the body is read (httpx2/_client.py, _send_handling_redirects).
    """
    length, encoding = response.headers.get("content-length", ""), response.headers.get("content-encoding", "")
    if encoding.strip().casefold() not in ("", "identity"):
        raise UnreadBody(f"the response is compressed ({encoding[:20]!r}), although no compression was requested")
    if length.isascii() and length.isdigit() and (len(length) > 19 or int(length) > MAX_BODY_BYTES):
        raise UnreadBody(f"the response has {length[:20]} bytes, more than {MAX_BODY_BYTES}")
    assert isinstance(response.stream, httpx2.AsyncByteStream), "the client is asynchronous"
    response.stream = _BoundedStream(response.stream)


BOUNDED_CLIENT_OPTIONS: Mapping[str, Any] = {"headers": {"Accept-Encoding": "identity"}, "event_hooks": {"response": [_bound_response]}}
"""Arguments that make an httpx2 client raise UnreadBody if a reply is compressed or too long."""


def make_client(url: str, *, key: str = "task.judge.urls", secret: str = "") -> openai.AsyncOpenAI:
    """Return an OpenAI client without timeouts or retries; `secret` is the servers' API key.

    Raises:
        InfraError: The address of the server or of its proxy is invalid. The message names the
            setting `key`.
    """
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise InfraError(f"{key}={url}: {error}; correct the address") from error
    http = openai.DefaultAsyncHttpx2Client(**BOUNDED_CLIENT_OPTIONS, **proxy_options([url]), follow_redirects=False)
    return openai.AsyncOpenAI(base_url=url, api_key=secret or "none", timeout=None, max_retries=0, http_client=http)


def proxy_options(urls: Iterable[str]) -> dict[str, Any]:
    """Return the httpx2 client arguments that set the certificates and the proxies for `urls`.

    The proxies come from environment variables (clients/proxies.py).

    Raises:
        InfraError: The address of a proxy is unusable. The message names the variable.
    """
    tls = httpx2.create_ssl_context()  # reads SSL_CERT_FILE, which trust_env=False would ignore
    found = {urlsplit(url).netloc: proxy for url in urls if (proxy := find_proxy(url))}
    return {"trust_env": False, "verify": tls, "mounts": {f"all://{place}": _through(proxy, tls) for place, proxy in found.items()}}


def _through(proxy: Proxy, tls: ssl.SSLContext) -> httpx2.AsyncHTTPTransport:
    try:
        return httpx2.AsyncHTTPTransport(verify=tls, proxy=proxy.address, limits=openai.DEFAULT_CONNECTION_LIMITS)
    except (ValueError, httpx2.InvalidURL, ImportError) as error:
        remedy = f"use http://HOST:PORT, unset it, or set NO_PROXY={proxy.host}"
        raise InfraError(f"{proxy.variable}={to_one_line(proxy.address)}: not a usable proxy; {remedy}") from error


def api_key(token_file: str = "") -> str:
    """Return the API key from `token_file`, or from OPENAI_API_KEY if `token_file` is empty.

    A server that rejects the key may repeat the key in its error message, so the caller must mask
    the key in error messages.

    Raises:
        InfraError: The file at task.judge.token_file cannot be read.
    """
    try:
        return read_token(token_file) if token_file else os.environ.get("OPENAI_API_KEY", "")
    except ValueError as error:
        raise InfraError(f"task.judge.token_file={error}") from error


def describe_key_error(error: openai.APIStatusError, *, secret: str, token_file: str) -> str:
    """Return an error line about a rejected key, with the server's response and the fix."""
    remedy = f"put the server's key into task.judge.token_file={token_file}" if token_file else "set OPENAI_API_KEY"
    return f"{describe_error(error, secret=secret)}: {remedy}{proxy_hint(str(error.request.url))}"


class ChatMessage(BaseModel):
    """Message of a chat completion."""

    content: str
    reasoning: object = None
    reasoning_content: object = None
    """Thoughts of the model, as sent by servers other than vLLM; vLLM sends `reasoning` instead. A
    value that is not text is ignored and does not invalidate the reply.
    """

    @property
    def thoughts(self) -> str:
        """Thoughts of the model; empty if there are none."""
        return next((said for said in (self.reasoning, self.reasoning_content) if isinstance(said, str)), "")


class Choice(BaseModel):
    """One of the alternative replies in a chat completion."""

    message: ChatMessage


class ChatCompletion(BaseModel):
    """Required fields of a chat completion.

    A body that is empty, an HTML page or a JSON error object fails validation.
    """

    choices: list[Choice] = Field(min_length=1)


@contextmanager
def translate_errors(secret: str, *, token_file: str = "") -> Iterator[None]:
    """Translate openai errors and invalid bodies into the exceptions of endpoint_pool.py.

    The messages do not contain the servers' key `secret`. `token_file` is the file that was passed
    to `api_key`.
    """
    try:
        yield
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise KeyRefused(describe_key_error(error, secret=secret, token_file=token_file)) from error
    except openai.BadRequestError as error:
        raise RequestRejected(describe_error(error, secret=secret)) from error
    except openai.APIStatusError as error:
        words = describe_error(error, secret=secret) + proxy_hint(str(error.request.url))
        raise EndpointError(words, retry_after_s=parse_retry_after(error.response.headers.get("retry-after", ""))) from error
    except openai.APIError as error:
        raise EndpointError(describe_error(error, secret=secret) + proxy_hint(str(error.request.url))) from error
    except (UnreadBody, ValidationError) as error:
        raise EndpointError(describe_error(error, secret=secret)) from error
