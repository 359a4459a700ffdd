"""Request limits, Prometheus metrics and answer log of a model server."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fastapi import HTTPException, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from megatron_rl.config import require
from megatron_rl.errors import InfraError
from megatron_rl.io.jsonl import to_json_line
from megatron_rl.tasks.lewis.listener_protocol import MAX_CANDIDATES, MAX_ITEMS, MAX_QUESTION_CHARS
from megatron_rl.tasks.lewis.server.image_cache import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from megatron_rl_sandbox.http import make_retry_error

LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
MAX_WAITING = 4096
"""Maximum number of waiting requests. Further requests are rejected immediately."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestLimits:
    """Limits for a single request and for all requests together."""

    concurrency: int = 8
    """Maximum number of requests in progress."""
    acquire_s: float = 300.0
    """Maximum number of seconds that a request waits for a slot."""
    timeout_s: float = 120.0
    """Maximum processing time of a request in seconds, not counting the wait for a slot."""
    body_bytes: int = 64 << 20
    """Maximum size of a request's body in bytes."""

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            require(value > 0, f"--{key.replace('_', '-')}", value, "must be positive")

    def to_json(self) -> dict[str, float]:
        """Return all limits, including the limits on images and questions."""
        shown = {"picture_bytes": MAX_IMAGE_BYTES, "picture_pixels": MAX_IMAGE_PIXELS, "question": MAX_QUESTION_CHARS}
        return {**asdict(self), **shown, "candidates": MAX_CANDIDATES, "items": MAX_ITEMS}


class RequestLimiter:
    """Enforces the request limits of a server, records metrics and writes the answer log."""

    def __init__(self, name: str, limits: RequestLimits, *, busy_s: Callable[[], float], log: Path | None) -> None:
        """Create the limiter.

        Args:
            name: Prefix of the metric names.
            limits: Limits on requests.
            busy_s: Function that returns the total busy time of the engine in seconds.
            log: JSON-lines file for the answers; None disables the log.
        """
        self.limits = limits
        self._log = log.open("a", buffering=1) if log else None
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._waiting = 0
        self.registry = CollectorRegistry()
        Gauge(f"{name}_waiting", "Requests that wait for a slot", registry=self.registry).set_function(lambda: self._waiting)
        Gauge(f"{name}_engine_seconds", "Total busy time of the engine in seconds", registry=self.registry).set_function(busy_s)
        self.items = Counter(f"{name}_items", "Items answered", registry=self.registry)
        self.pictures = Counter(f"{name}_pictures", "Images processed for these items", registry=self.registry)
        self.refused = Counter(
            f"{name}_refused", "Rejected or failed requests, by reason (full, late, engine)", ["reason"], registry=self.registry
        )
        self.seconds = Histogram(
            f"{name}_seconds", "Seconds to process a request, excluding the wait", buckets=LATENCY_BUCKETS_S, registry=self.registry
        )

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait for a slot, and run the block with a time limit while holding the slot.

        Raises:
            HTTPException: Status 503 if too many requests are waiting, no slot became free in time,
                or the block exceeded its time limit or raised InfraError. Status 422 if the block
                raised ValueError.
        """
        await self._acquire_slot()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                yield
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        except InfraError as error:
            self.refused.labels("engine").inc()
            raise make_retry_error(503, str(error)) from error
        except TimeoutError as error:
            self.refused.labels("late").inc()
            raise make_retry_error(503, f"processing took longer than {self.limits.timeout_s:g} s; send fewer items per request") from error
        finally:
            self.seconds.observe(time.perf_counter() - began)
            self._slots.release()

    async def _acquire_slot(self) -> None:
        if self._waiting >= MAX_WAITING:
            self.refused.labels("full").inc()
            raise make_retry_error(503, f"{self._waiting} requests are already waiting")
        self._waiting += 1
        try:
            async with asyncio.timeout(self.limits.acquire_s):
                await self._slots.acquire()
        except TimeoutError as error:
            self.refused.labels("full").inc()
            told = f"{self.limits.concurrency} requests are in progress, and none finished within {self.limits.acquire_s:g} s"
            raise make_retry_error(503, told) from error
        finally:
            self._waiting -= 1

    def count_answered(self, *, items: int, pictures: int) -> None:
        """Increase the counters of answered items and of the images in these items."""
        self.items.inc(items)
        self.pictures.inc(pictures)

    def log_answers(self, answers: Iterable[Mapping[str, object]], *, version: str) -> None:
        """Write answers to the log, each with the time and the version of the weights."""
        if self._log is not None:
            now = time.time()
            self._log.write("".join(f"{to_json_line({'time': now, 'version': version, **answer})}\n" for answer in answers))

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus' text format, for GET /metrics."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")
