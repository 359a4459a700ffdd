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

LINES_A_MINUTE = 20


@dataclass(slots=True, kw_only=True)
class Line:
    """All connections of a server, and what they may take. Times in seconds."""

    most: int = 1024
    header_s: float = 10.0
    """From the connection, or from the answer before, to the end of a request's header."""
    body_s: float = 60.0
    """From there to the end of its body."""
    answer_s: float = 60.0
    """For taking an answer."""
    unread: int = 512 << 20
    """Bytes of answers that nobody has taken yet, of all connections together."""
    owing: dict["Connection", None] = field(default_factory=dict)
    """Those whose request is not complete, in the order in which they began to owe it."""
    taking: dict["Connection", None] = field(default_factory=dict)
    """Those with much of an answer before them, oldest first."""


class Connection(H11Protocol):
    """One connection of `line`. What is late is cut off without a word: it does not listen."""

    def __init__(self, *, line: Line, **options: Any) -> None:
        super().__init__(**options)
        self.line = line
        self._owed: tuple[float | None, RequestResponseCycle | None] = (None, None)
        self._due: asyncio.TimerHandle | None = None
        self._taken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._settle()
        if len(self.connections) > self.line.most:
            _cut_first(self.line.owing)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stand(None, None)
        self._has_taken()

    def handle_events(self) -> None:
        super().handle_events()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """The last answer of the connection, to bytes that are no request: what a request before them is answered is not sent any more."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        """The answer is longer than the kernel takes at once: the rest waits here for its reader."""
        super().pause_writing()
        self.line.taking[self] = None
        self._taken = self.loop.call_later(self.line.answer_s, self.transport.abort)
        while len(self.line.taking) > 1 and sum(each.transport.get_write_buffer_size() for each in self.line.taking) > self.line.unread:
            _cut_first(self.line.taking)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_taken()
        self._stand(None, None)
        self._settle()

    def _settle(self) -> None:
        """Begin the time of what is owed now, unless it runs already."""
        cycle, line = self.cycle, self.line
        awaits_header = cycle is None or cycle.response_complete
        owed = line.header_s if awaits_header else line.body_s if cycle.more_body else None
        if (owed, cycle) != self._owed:
            self._stand(owed, cycle)

    def _stand(self, owed: float | None, cycle: RequestResponseCycle | None) -> None:
        self._owed = (owed, cycle)
        self.line.owing.pop(self, None)
        if self._due is not None:
            self._due.cancel()
        if owed is not None:
            self.line.owing[self] = None
            self._due = self.loop.call_later(owed, self._late)

    def _late(self) -> None:
        if self not in self.line.taking:  # which has a time of its own
            self.transport.abort()

    def _has_taken(self) -> None:
        self.line.taking.pop(self, None)
        if self._taken is not None:
            self._taken.cancel()


def _cut_first(connections: dict[Connection, None]) -> None:
    """The one that is behind for longest."""
    first = next(iter(connections))
    del connections[first]
    first.transport.abort()


class Sparse(logging.Filter):
    """Lets so many lines a minute pass: whoever may cause one may cause a million."""

    def __init__(self, most: int = LINES_A_MINUTE) -> None:
        super().__init__()
        self.most, self.began, self.count = most, time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now > self.began + 60.0:
            self.began, self.count = now, 0
        self.count += 1
        return self.count <= self.most
