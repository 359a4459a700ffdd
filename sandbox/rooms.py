"""The boxes that a server's clients have open: found by id, closed when nobody calls, and when whoever called is gone."""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from sandbox.metrics import Metrics
from sandbox.pool import Box
from sandbox.types import BoxClosed


@dataclass
class Room:
    """A box, the names of its calls and the timer that closes it when nobody calls."""

    box: Box
    calls: set[str] = field(default_factory=set)
    busy: int = 0
    timer: asyncio.TimerHandle | None = None


class Rooms:
    """Ids cannot be guessed: whoever knows one may use the box."""

    def __init__(self, *, idle_s: float, metrics: Metrics) -> None:
        self.idle_s = idle_s
        self.metrics = metrics
        self.rooms: dict[str, Room] = {}
        self.closing: set[asyncio.Task[None]] = set()

    def add(self, box: Box) -> str:
        name = secrets.token_hex(16)
        self.rooms[name] = Room(box)
        self._watch(name)
        return name

    def find(self, name: str) -> Room:
        """Raises BoxClosed."""
        if name not in self.rooms:
            raise BoxClosed(f"no box is open under the id {name[:64]!r}: never opened, closed, or idle for {self.idle_s:g} s")
        return self.rooms[name]

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[Room]:
        """The room, with its timer stopped meanwhile."""
        room = self.find(name)
        if room.timer is not None:
            room.timer.cancel()
        room.busy += 1
        try:
            yield room
        finally:
            room.busy -= 1
            if name in self.rooms and room.busy == 0:
                self._watch(name)

    def _watch(self, name: str) -> None:
        self.rooms[name].timer = asyncio.get_running_loop().call_later(self.idle_s, self._expire, name)

    def _expire(self, name: str) -> None:
        self.metrics.expired.inc()
        self.drop(name)

    def drop(self, name: str) -> asyncio.Task[None] | None:
        """Forget the id at once and close the box in a task of its own, which whoever asked need not outlive."""
        room = self.rooms.pop(name, None)
        if room is None:
            return None
        if room.timer is not None:
            room.timer.cancel()
        task = asyncio.create_task(room.box.close())
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task

    async def close(self) -> None:
        for name in list(self.rooms):
            self.drop(name)
        await asyncio.gather(*self.closing)
