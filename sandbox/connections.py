"""What one connection may take of a server: uvicorn's connection (0.54, protocols/http/h11_impl.py) with the limits that uvicorn has not.

A connection owes a header, then the body that it announces, and takes the answer; each has a time. Where there are too many connections, or
too many bytes that nobody takes, those that are behind for longest go first: whoever talks is never turned away by those that are silent.
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
    """All connections of a server, and what they may take. Times in seconds."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    """From the connection, or from the answer before, to the end of a request's header."""
    body_timeout_s: float = 60.0
    """From there to the end of its body."""
    response_timeout_s: float = 60.0
    """For taking an answer."""
    max_unread_bytes: int = 512 << 20
    """Bytes of answers that nobody has taken yet, of all connections together."""
    awaiting_request: dict["LimitedConnection", None] = field(default_factory=dict)
    """Those whose request is not complete, in the order in which they began to owe it."""
    awaiting_reader: dict["LimitedConnection", None] = field(default_factory=dict)
    """Those with much of an answer before them, oldest first."""


class LimitedConnection(H11Protocol):
    """One connection of `line`. What is late is cut off without a word: it does not listen."""

    def __init__(self, *, registry: ConnectionRegistry, **options: Any) -> None:
        super().__init__(**options)
        self.registry = registry
        self._awaited: tuple[float | None, RequestResponseCycle | None] = (None, None)
        self._request_timer: asyncio.TimerHandle | None = None
        self._response_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_request_timer()
        if len(self.connections) > self.registry.max_connections:
            _abort_oldest(self.registry.awaiting_request)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_request_timer(None, None)
        self._stop_response_timer()

    def handle_events(self) -> None:
        super().handle_events()
        self._restart_request_timer()

    def send_400_response(self, msg: str) -> None:
        """The last answer of the connection, to bytes that are no request: what a request before them is answered is not sent any more."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_request_timer()

    def pause_writing(self) -> None:
        """The answer is longer than the kernel takes at once: the rest waits here for its reader."""
        super().pause_writing()
        self.registry.awaiting_reader[self] = None
        self._response_timer = self.loop.call_later(self.registry.response_timeout_s, self.transport.abort)
        while (
            len(self.registry.awaiting_reader) > 1
            and sum(each.transport.get_write_buffer_size() for each in self.registry.awaiting_reader) > self.registry.max_unread_bytes
        ):
            _abort_oldest(self.registry.awaiting_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_response_timer()
        self._set_request_timer(None, None)
        self._restart_request_timer()

    def _restart_request_timer(self) -> None:
        """Begin the time of what is owed now, unless it runs already."""
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
        if self not in self.registry.awaiting_reader:  # which has a time of its own
            self.transport.abort()

    def _stop_response_timer(self) -> None:
        self.registry.awaiting_reader.pop(self, None)
        if self._response_timer is not None:
            self._response_timer.cancel()


def _abort_oldest(connections: dict[LimitedConnection, None]) -> None:
    """The one that is behind for longest."""
    first = next(iter(connections))
    del connections[first]
    first.transport.abort()


class LogRateLimiter(logging.Filter):
    """Lets so many lines a minute pass: whoever may cause one may cause a million."""

    def __init__(self, max_lines: int = LOG_LINES_PER_MINUTE) -> None:
        super().__init__()
        self.max_lines, self.window_start, self.count = max_lines, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now > self.window_start + 60.0:
            self.window_start, self.count = now, 0
        self.count += 1
        return self.count <= self.max_lines
