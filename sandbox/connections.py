"""Per-connection limits that uvicorn does not provide.

The limits are implemented in a subclass of H11Protocol of uvicorn 0.54
(protocols/http/h11_impl.py). A client must send the request header, send the request body and read
the response, each within a time limit. If there are too many connections or too many unread
response bytes, the connections that have been idle longest are aborted first. Therefore, idle
clients never displace active clients.
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
    """Limits on a server's connections, and the connections that await client action."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    """Maximum time in seconds until the header of the next request is complete.

    The timeout starts when the connection is opened and restarts after each response.
    """
    body_timeout_s: float = 60.0
    """Maximum time in seconds from the end of a request's header to the end of its body."""
    response_timeout_s: float = 60.0
    """Maximum time in seconds that a client may take to read a response."""
    max_unread_bytes: int = 512 << 20
    """Maximum total number of unread response bytes over all connections."""
    awaiting_request: dict["LimitedConnection", None] = field(default_factory=dict)
    """Connections with an incomplete request, ordered by the start of their timers."""
    awaiting_reader: dict["LimitedConnection", None] = field(default_factory=dict)
    """Connections with unread response bytes in the server's buffer, longest-waiting first."""


class LimitedConnection(H11Protocol):
    """Connection that is aborted without a response when it exceeds a time limit."""

    def __init__(self, *, registry: ConnectionRegistry, **options: Any) -> None:
        super().__init__(**options)
        self.registry = registry
        self._awaited: tuple[float | None, RequestResponseCycle | None] = (None, None)
        self._request_timer: asyncio.TimerHandle | None = None
        self._response_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the request timer, and enforce the limit on the number of connections."""
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
        """Process received data and update the request timer."""
        super().handle_events()
        self._restart_request_timer()

    def send_400_response(self, msg: str) -> None:
        """Send a 400 response to an invalid request and close the connection.

        If an earlier request on this connection is still being processed, the response to the
        earlier request is not sent.
        """
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Start the timer for the next request."""
        super().on_response_complete()
        self._restart_request_timer()

    def pause_writing(self) -> None:
        """Start the response timer when the kernel's send buffer is full.

        The rest of the response is buffered in this process until the client reads it. While the
        total of unread bytes exceeds `max_unread_bytes`, the longest-waiting connections are
        aborted.
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
        """Start the timer for the expected header or body, unless this timer is already running."""
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
    """Abort the first connection of the dict, which is the connection that has waited longest."""
    first = next(iter(connections))
    del connections[first]
    first.transport.abort()


class LogRateLimiter(logging.Filter):
    """Limits the number of log lines per minute, because clients could cause millions of lines."""

    def __init__(self, max_lines: int = LOG_LINES_PER_MINUTE) -> None:
        super().__init__()
        self.max_lines, self.window_start, self.count = max_lines, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True unless `max_lines` lines have already been logged in this minute."""
        now = time.monotonic()
        if now > self.window_start + 60.0:
            self.window_start, self.count = now, 0
        self.count += 1
        return self.count <= self.max_lines
