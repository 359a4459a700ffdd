"""Per-connection limits of a server that uvicorn does not have.

They extend uvicorn's connection (0.54, protocols/http/h11_impl.py). A client must send a header,
then the announced body, and read the response, each within a time limit. With too many connections
or too many unread bytes, those waiting longest are aborted first, so silent clients never displace
active ones.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

LOG_LINES_PER_MINUTE = 20


@dataclass(slots=True, kw_only=True)
class ConnectionRegistry:
    """All connections of a server and their limits. Times are in seconds."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    """Seconds from the connection or the previous response to the end of a request's header."""
    body_timeout_s: float = 60.0
    """Seconds from the end of the header to the end of the body."""
    response_timeout_s: float = 60.0
    """Seconds for reading a response."""
    max_unread_bytes: int = 512 << 20
    """Bytes of unread responses of all connections together."""
    awaiting_request: dict["LimitedConnection", None] = field(default_factory=dict)
    """Connections with an incomplete request, in the order in which their timers started."""
    awaiting_reader: dict["LimitedConnection", None] = field(default_factory=dict)
    """Connections with an unread part of a response in the server's buffer, oldest first."""


class LimitedConnection(H11Protocol):
    """Connection that is aborted, without a response, when it exceeds a time limit."""

    def __init__(self, *, registry: ConnectionRegistry, **options: Any) -> None:
        super().__init__(**options)
        self.registry = registry
        self._awaited: tuple[float | None, RequestResponseCycle | None] = (None, None)
        self._request_timer: asyncio.TimerHandle | None = None
        self._response_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the request timer; above the connection limit, abort the oldest connection."""
        super().connection_made(transport)
        self._restart_request_timer()
        if len(self.connections) > self.registry.max_connections:
            _abort_oldest(self.registry.awaiting_request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(exc)
        self._set_request_timer(None, None)
        self._stop_response_timer()

    def handle_events(self) -> None:
        """Process received data and update the timer of the request."""
        super().handle_events()
        self._restart_request_timer()

    def send_400_response(self, msg: str) -> None:
        """Send the last response of the connection, to bytes that are not a request.

        The response to a request before them is no longer sent.
        """
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Start the timer of the next request."""
        super().on_response_complete()
        self._restart_request_timer()

    def pause_writing(self) -> None:
        """Start the response timer once the kernel's buffer is full.

        The rest of the response waits in this process until the client reads it. Above the total of
        unread bytes, the oldest such connections are aborted.
        """
        super().pause_writing()
        self.registry.awaiting_reader[self] = None
        self._response_timer = self.loop.call_later(self.registry.response_timeout_s, self.transport.abort)
        while (
            len(self.registry.awaiting_reader) > 1
            and sum(each.transport.get_write_buffer_size() for each in self.registry.awaiting_reader) > self.registry.max_unread_bytes
        ):
            _abort_oldest(self.registry.awaiting_reader)

    def resume_writing(self) -> None:
        """Stop the response timer and restart the request timer."""
        super().resume_writing()
        self._stop_response_timer()
        self._set_request_timer(None, None)
        self._restart_request_timer()

    def _restart_request_timer(self) -> None:
        """Start the timer for the next part of the request, unless it is already running."""
        cycle, line = self.cycle, self.registry
        awaits_header = cycle is None or cycle.response_complete
        owed = line.header_timeout_s if awaits_header else line.body_timeout_s if cycle.more_body else None
        if (owed, cycle) != self._awaited:
            self._set_request_timer(owed, cycle)

    def _set_request_timer(self, owed: float | None, cycle: RequestResponseCycle | None) -> None:
        self._awaited = (owed, cycle)
        self.registry.awaiting_request.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
        if owed is not None:
            self.registry.awaiting_request[self] = None
            self._request_timer = self.loop.call_later(owed, self._abort_if_late)

    def _abort_if_late(self) -> None:
        if self not in self.registry.awaiting_reader:  # unread responses have their own timer
            self.transport.abort()

    def _stop_response_timer(self) -> None:
        self.registry.awaiting_reader.pop(self, None)
        if self._response_timer is not None:
            self._response_timer.cancel()


def _abort_oldest(connections: dict[LimitedConnection, None]) -> None:
    """Abort the connection that has waited longest."""
    first = next(iter(connections))
    del connections[first]
    first.transport.abort()


class LogRateLimiter(logging.Filter):
    """Limits log lines per minute, because a client that can cause one can cause a million."""

    def __init__(self, max_lines: int = LOG_LINES_PER_MINUTE) -> None:
        super().__init__()
        self.max_lines, self.window_start, self.count = max_lines, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True while the current minute has lines left."""
        now = time.monotonic()
        if now > self.window_start + 60.0:
            self.window_start, self.count = now, 0
        self.count += 1
        return self.count <= self.max_lines
