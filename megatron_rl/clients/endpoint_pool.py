"""Servers that do the same work: the least busy healthy one is asked, and another where it fails.

A server that failed rests, twice as long with each failure in a row or as long as it says itself, and the others are asked meanwhile. How
long a request waits for one is a patience of its own, no matter how long an answer may take. What goes on the wire is the caller's: a call
is a coroutine function of the server to ask. What it raises tells how it went:
    EndpointError, TimeoutError   the server is in trouble: it rests, and the call is tried again
    KeyRefused                  the server is well and does not accept the key or token: the run ends
    InvalidReply                    the server is well, what it said is of no use: the call is tried again
    Refused                     any server would refuse this call: no further try
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
"""Or the patience of those who wait, where that is less."""
T = TypeVar("T")


class EndpointError(Exception):
    """A server is in trouble; it asks for a rest of at least `rest_s`."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class KeyRefused(EndpointError):
    """A server does not accept the key or token that it was asked with: it is no outage, and asking again is of no use."""


class InvalidReply(ValueError):
    """A server that is well said something of no use."""


class RequestRejected(Exception):
    """A request is at fault, not the server that refused it."""


@dataclass(slots=True)
class Endpoint:
    """One server and its health. Its rests double with each failure in a row and vary by half, so that clients do not return together."""

    url: str
    backoff_s: float
    """The first rest."""
    max_backoff_s: float = MAX_BACKOFF_S
    """The longest that it is given; it may ask for more itself."""
    in_flight: int = 0
    failures: int = 0
    """Failures in a row."""
    backoff_until: float = 0.0
    """The end of its rest on time.monotonic's clock."""
    last_failure: str = ""

    def record_failure(self, *, sent_at: float, retry_after_s: float = 0.0) -> None:
        """`sent_at` is when the request that failed was sent: of many that were under way together the first failure counts.

        `retry_after_s` is the least that the server itself asks for.
        """
        now = time.monotonic()
        if sent_at >= self.backoff_until:
            rest = min(self.backoff_s * 2**self.failures, self.max_backoff_s) * random.uniform(0.5, 1.0)
            self.failures += 1
            self.backoff_until = max(self.backoff_until, now + rest)
        self.backoff_until = max(self.backoff_until, now + retry_after_s)

    def record_success(self) -> None:
        self.failures = 0


class EndpointPool:
    """Servers behind one `ask`. Counts of their work stand in requests, failures and seconds (in requests)."""

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
        """`name` begins every error; at most `concurrency` requests are under way at once, each of them for timeout_s at most.

        Where all servers rest, a request waits for the first of them up to outage_timeout_s.
        """
        self.name, self.max_attempts, self.concurrency = name, max_attempts, concurrency
        self.timeout_s, self.outage_timeout_s = timeout_s, outage_timeout_s
        self.endpoints = [Endpoint(url, backoff_s, min(MAX_BACKOFF_S, outage_timeout_s)) for url in urls]
        self.requests = self.failures = 0
        self.request_seconds = 0.0

    def start(self) -> None:
        """Bind the pool to the running event loop. Call it again in every later one."""
        self._slots = asyncio.Semaphore(self.concurrency)

    async def request(self, send: Callable[[Endpoint], Awaitable[T]]) -> T:
        """Return what `send` returns of one server or another. Raises InfraError, naming server and reason, after the last try.

        PermanentInfraError where no server was in trouble: what was said to it, or by it, is at fault. AccessDenied where one does not
        accept the key.
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
        raise fault(f"{self.name}: nothing after {len(reasons)} of {self.max_attempts} tries; the last: {reasons[-1]}")

    async def _with_timeout(self, send: Callable[[Endpoint], Awaitable[T]], endpoint: Endpoint) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await send(endpoint)
        except TimeoutError as error:
            raise EndpointError(describe_error(error)) from error

    async def _acquire_endpoint(self) -> Endpoint:
        """The least busy server that does not rest, with leave to send it a request.

        Rests, all together, are waited for up to outage_timeout_s; the time in the queue for a slot is none of it.
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
                    f"{self.name}: {earliest.url} rests for {rest:.0f} s more after {waited:.1f} s of waiting, and so do all others; "
                    f"the last failure: {earliest.url}: {earliest.last_failure}"
                )
            await asyncio.sleep(rest)
            waited += rest


def describe_error(error: Exception, *, secret: str = "") -> str:
    """An error of whatever library in one short line, without the secret that a server may have repeated in it."""
    text = str(error)
    return f"{type(error).__name__}: {to_one_line(text.replace(secret, '***') if secret else text)}"


def to_one_line(text: str) -> str:
    """What others said, short, and without what moves a terminal's cursor or turns letters around."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text[:3000].split())[:300])


def parse_retry_after(header: str) -> float:
    """Seconds, from a number of them or a date (RFC 9110, 10.2.3); 0 for anything else."""
    text = header.strip()
    if text.isascii() and text.isdigit() and len(text) < 9:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the latter from numbers of 20 digits
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
