"""Registry of the open boxes of a server.

The registry finds boxes by id and closes idle boxes.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl_sandbox.pool import Box
from megatron_rl_sandbox.records import BoxClosed
from megatron_rl_sandbox.server_metrics import SandboxMetrics


@dataclass
class OpenBox:
    """Open box with the ids of its calls, the number of active requests and its idle timer."""

    box: Box
    call_names: set[str] = field(default_factory=set)
    num_active: int = 0
    idle_timer: asyncio.TimerHandle | None = None


class BoxRegistry:
    """Open boxes, keyed by id.

    Ids are unguessable, because knowing the id of a box is sufficient to use the box.
    """

    def __init__(self, *, idle_timeout_s: float, metrics: SandboxMetrics) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.metrics = metrics
        self.open_boxes: dict[str, OpenBox] = {}
        self.closing_tasks: set[asyncio.Task[None]] = set()

    def add_box(self, box: Box) -> str:
        """Register a box and return its new id."""
        name = secrets.token_hex(16)
        self.open_boxes[name] = OpenBox(box)
        self._start_idle_timer(name)
        return name

    def find_box(self, name: str) -> OpenBox:
        """Return the open box with this id. Raises BoxClosed if there is no such box."""
        if name not in self.open_boxes:
            raise BoxClosed(
                f"no open box has the id {name[:64]!r}: the box was never opened, was closed, or was idle for {self.idle_timeout_s:g} s"
            )
        return self.open_boxes[name]

    @contextlib.contextmanager
    def hold_open(self, name: str) -> Iterator[OpenBox]:
        """Yield an open box; the box does not become idle inside the `with` block."""
        room = self.find_box(name)
        if room.idle_timer is not None:
            room.idle_timer.cancel()
        room.num_active += 1
        try:
            yield room
        finally:
            room.num_active -= 1
            if name in self.open_boxes and room.num_active == 0:
                self._start_idle_timer(name)

    def _start_idle_timer(self, name: str) -> None:
        self.open_boxes[name].idle_timer = asyncio.get_running_loop().call_later(self.idle_timeout_s, self._close_idle, name)

    def _close_idle(self, name: str) -> None:
        self.metrics.expired_boxes.inc()
        self.close_box(name)

    def close_box(self, name: str) -> asyncio.Task[None] | None:
        """Remove the id at once and close the box in a separate task.

        The task continues if the caller is cancelled. Returns the task, or None if no box with this
        id is open.
        """
        room = self.open_boxes.pop(name, None)
        if room is None:
            return None
        if room.idle_timer is not None:
            room.idle_timer.cancel()
        task = asyncio.create_task(room.box.close())
        self.closing_tasks.add(task)
        task.add_done_callback(self.closing_tasks.discard)
        return task

    async def close(self) -> None:
        """Close all boxes and wait until they are closed."""
        for name in list(self.open_boxes):
            self.close_box(name)
        await asyncio.gather(*self.closing_tasks)
