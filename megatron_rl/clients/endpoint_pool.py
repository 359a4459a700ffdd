"""Balances requests over equivalent endpoints, and prefers the least busy healthy endpoint.

A failed request is retried on another endpoint. A failed endpoint is not used during a backoff,
which doubles with each consecutive failure; the endpoint may also request a longer backoff.
`outage_timeout_s` is the maximum time that a request waits for an available endpoint. The time
until the endpoint replies does not count. The caller passes a coroutine function that takes an
endpoint and sends the request. An exception raised by this function determines what happens next:

    EndpointError, TimeoutError   the endpoint has failed: it backs off, and the call is retried
    KeyRefused                    the endpoint works but rejects the key or token: the run ends
    InvalidReply                  the endpoint works but its reply is unusable: the call is retried
    RequestRejected               every endpoint would reject this call: no retry
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from megatron_rl.errors import AccessDenied, InfraError, PermanentInfraError

MAX_BACKOFF_S = 30.0
"""Maximum backoff in seconds. If a pool's outage timeout is shorter, the outage timeout is the
maximum.
"""
T = TypeVar("T")


class EndpointError(Exception):
    """An endpoint has failed. `retry_after_s` is the minimum backoff that the endpoint requests."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class KeyRefused(EndpointError):
    """An endpoint rejected the key or token, so a retry would not help."""


class InvalidReply(ValueError):
    """A working endpoint sent an unusable reply."""


class RequestRejected(Exception):
    """An endpoint rejected a request because of the request itself."""


@dataclass(slots=True)
class Endpoint:
    """State of one endpoint: requests in flight, failures and backoff.

    The backoff doubles with each consecutive failure. Each backoff is multiplied by a random factor
    between 0.5 and 1, so that clients do not all retry at the same time.
    """

    url: str
    backoff_s: float
    """First backoff in seconds."""
    max_backoff_s: float = MAX_BACKOFF_S
    """Maximum backoff in seconds; the endpoint itself may request more."""
    in_flight: int = 0
    """Number of requests in flight."""
    failures: int = 0
    """Number of consecutive failures."""
    backoff_until: float = 0.0
    """End of the backoff, as a value of time.monotonic()."""
    last_failure: str = ""

    def record_failure(self, *, sent_at: float, retry_after_s: float = 0.0) -> None:
        """Start a backoff after a failed request.

        Args:
            sent_at: Time at which the request was sent. If several requests that were in flight at
                the same time fail, only the first failure counts.
            retry_after_s: Minimum backoff in seconds that the endpoint itself requests.
        """
        now = time.monotonic()
        if sent_at >= self.backoff_until:
            rest = min(self.backoff_s * 2**self.failures, self.max_backoff_s) * random.uniform(0.5, 1.0)
            self.failures += 1
            self.backoff_until = max(self.backoff_until, now + rest)
        self.backoff_until = max(self.backoff_until, now + retry_after_s)

    def record_success(self) -> None:
        """Reset the number of consecutive failures to zero."""
        self.failures = 0


class EndpointPool:
    """Pool of equivalent endpoints; `request` sends a request to one of them.

    Statistics are in `requests`, `failures` and `request_seconds`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        max_attempts: int,
        timeout_s: float,
        outage_timeout_s: float,
        concurrency: int,
        backoff_s: float = 0.5,
    ) -> None:
        """Create a pool; `start` binds it to an event loop.

        Args:
            urls: Addresses of the endpoints.
            name: Name of the pool, which is the prefix of every error message.
            max_attempts: Maximum number of attempts per request.
            timeout_s: Timeout of one attempt in seconds.
            outage_timeout_s: Maximum wait in seconds while all endpoints back off.
            concurrency: Maximum number of requests in flight.
            backoff_s: First backoff of an endpoint in seconds.
        """
        self.name, self.max_attempts, self.concurrency = name, max_attempts, concurrency
        self.timeout_s, self.outage_timeout_s = timeout_s, outage_timeout_s
        self.endpoints = [Endpoint(url, backoff_s, min(MAX_BACKOFF_S, outage_timeout_s)) for url in urls]
        self.requests = self.failures = 0
        self.request_seconds = 0.0

    def start(self) -> None:
        """Bind the pool to the running event loop; call `start` again in each new event loop."""
        self._slots = asyncio.Semaphore(self.concurrency)

    async def request(self, send: Callable[[Endpoint], Awaitable[T]]) -> T:
        """Call `send` with an available endpoint, retry on failure, and return the reply.

        Raises:
            InfraError: All attempts failed, at least one of them because of an endpoint failure, or
                all endpoints were backing off for too long. The message names the endpoint and the
                reason.
            PermanentInfraError: All attempts failed because the request was rejected or the replies
                were unusable.
            AccessDenied: An endpoint rejects the key.
        """
        reasons: list[str] = []
        fault = PermanentInfraError
        while len(reasons) < self.max_attempts:
            endpoint = await self._acquire_endpoint()
            began = time.monotonic()
            self.requests += 1
            endpoint.in_flight += 1
            try:
                reply = await self._with_timeout(send, endpoint)
                endpoint.record_success()
                return reply
            except KeyRefused as error:
                raise AccessDenied(f"{self.name}: {endpoint.url}: {error}") from error
            except (InvalidReply, RequestRejected, EndpointError) as error:
                self.failures += 1
                reasons.append(f"{endpoint.url}: {error}")
                if isinstance(error, RequestRejected):
                    break
                if isinstance(error, EndpointError):
                    fault, endpoint.last_failure = InfraError, str(error)
                    endpoint.record_failure(sent_at=began, retry_after_s=error.retry_after_s)
            finally:
                self.request_seconds += time.monotonic() - began
                endpoint.in_flight -= 1
                self._slots.release()
        raise fault(f"{self.name}: failed after {len(reasons)} of {self.max_attempts} attempts; the last failure: {reasons[-1]}")

    async def _with_timeout(self, send: Callable[[Endpoint], Awaitable[T]], endpoint: Endpoint) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await send(endpoint)
        except TimeoutError as error:
            raise EndpointError(describe_error(error)) from error

    async def _acquire_endpoint(self) -> Endpoint:
        """Acquire a concurrency slot; return the least busy endpoint that is not backing off.

        Waits for backoffs to end for up to `outage_timeout_s` seconds in total. The time spent
        waiting for a concurrency slot does not count toward `outage_timeout_s`.
        """
        waited = 0.0
        while True:
            await self._slots.acquire()
            now = time.monotonic()
            rested = [endpoint for endpoint in self.endpoints if endpoint.backoff_until <= now]
            if rested:
                return min(rested, key=lambda endpoint: (endpoint.in_flight, random.random()))
            self._slots.release()
            earliest = min(self.endpoints, key=lambda endpoint: endpoint.backoff_until)
            rest = earliest.backoff_until - now
            if waited + rest > self.outage_timeout_s:
                raise InfraError(
                    f"{self.name}: all endpoints are backing off; the next available endpoint is {earliest.url}, in {rest:.0f} s; "
                    f"already waited {waited:.1f} s; the last failure: {earliest.url}: {earliest.last_failure}"
                )
            await asyncio.sleep(rest)
            waited += rest


def describe_error(error: BaseException, *, secret: str = "") -> str:
    """Return an error as one short line; mask `secret`, which a server may have echoed."""
    text = str(error)
    return f"{type(error).__name__}: {to_one_line(text.replace(secret, '***') if secret else text)}"


def to_one_line(text: str) -> str:
    """Return untrusted text as one short printable line.

    Characters that move a terminal's cursor or reverse the text are replaced by "?".
    """
    return "".join(character if character.isprintable() else "?" for character in " ".join(text[:3000].split())[:300])


def parse_retry_after(header: str) -> float:
    """Return the number of seconds to wait according to a Retry-After header.

    The header contains a number of seconds or a date (RFC 9110, 10.2.3). Returns 0 for any other
    content.
    """
    text = header.strip()
    if text.isascii() and text.isdigit() and len(text) < 9:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # OverflowError: numbers of 20 digits
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
