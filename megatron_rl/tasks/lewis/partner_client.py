"""Functions that the listener and speaker clients share: token, connection and health check."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import httpx2
from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import EndpointError, KeyRefused, RequestRejected, describe_error, parse_retry_after, to_one_line
from megatron_rl.clients.health_check import HEALTH_TIMEOUT_S, HealthCheck
from megatron_rl.clients.openai import BOUNDED_CLIENT_OPTIONS, UnreadBody, proxy_options
from megatron_rl_sandbox.bounded_http import DENIED_STATUSES
from megatron_rl_sandbox.token import bearer_header, read_token

REJECTED_STATUSES = (400, 413, 422)
"""HTTP statuses with which a healthy server rejects an invalid request."""


class _PartnerHealth(BaseModel):
    version: str


def read_partner_token(file: str, *, config_key: str) -> str:
    """Return the token from a file, or an empty string if no file is given.

    Raises:
        ValueError: The file cannot be read; the message names `config_key`.
    """
    try:
        return read_token(Path(file)) if file else ""
    except ValueError as error:
        raise ValueError(f"{config_key}={error}") from error


def open_http_client(token: str, *, proxied: Iterable[str] = ()) -> httpx2.AsyncClient:
    """Return an HTTP client with a limit on the size of responses but without a timeout.

    Proxies from environment variables are used only for the URLs in `proxied`.
    """
    headers = {**BOUNDED_CLIENT_OPTIONS["headers"], **bearer_header(token)}
    return httpx2.AsyncClient(**{**BOUNDED_CLIENT_OPTIONS, "headers": headers}, **proxy_options(proxied), timeout=None)


def raise_for_status(reply: httpx2.Response, *, config_key: str) -> None:
    """Raise an error if the status of a response is not 200.

    Raises:
        RequestRejected: The request is invalid.
        KeyRefused: The server requires a token or rejects the token. The message names
            `config_key`, the config key of the token file.
        EndpointError: The server failed.
    """
    if reply.status_code in DENIED_STATUSES:
        raise KeyRefused(f"HTTP {reply.status_code}: requires a valid token; set {config_key}=FILE")
    if reply.status_code in REJECTED_STATUSES:
        raise RequestRejected(f"HTTP {reply.status_code}: {to_one_line(reply.text)}")
    if reply.status_code != 200:
        rest_s = parse_retry_after(reply.headers.get("retry-after", ""))
        raise EndpointError(f"HTTP {reply.status_code}: {to_one_line(reply.text)}", retry_after_s=rest_s)


async def check_partner(http: httpx2.AsyncClient, url: str, *, config_key: str, token: str, proxy: str = "") -> HealthCheck:
    """Return the version of a server, or the reason why its health check failed.

    Args:
        http: HTTP client.
        url: URL of the server.
        config_key: Config key of the token file, for error messages.
        token: Access token, which is removed from error messages.
        proxy: Note about the proxy that is appended to error messages (clients/proxies.py).
    """
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            reply = await http.get(f"{url}/health")
        raise_for_status(reply, config_key=config_key)
        return HealthCheck(models=[_PartnerHealth.model_validate_json(reply.content).version])
    except KeyRefused as error:
        return HealthCheck(error=str(error), is_denied=True)
    except TimeoutError:
        return HealthCheck(error=f"no response within {HEALTH_TIMEOUT_S:.0f} s{proxy}")
    except (httpx2.HTTPError, httpx2.InvalidURL, UnreadBody, RequestRejected, EndpointError, ValidationError) as error:
        return HealthCheck(error=describe_error(error, secret=token) + proxy)
