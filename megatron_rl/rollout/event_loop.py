"""An event loop whose clock stands while it does: who waits with a time limit is not charged for the trainer's turn on the device."""

import asyncio


class PausableEventLoop(asyncio.SelectorEventLoop):
    """What comes meanwhile (a tool's answer) is there when it goes on, and no limit has run out for that."""

    def __init__(self) -> None:
        super().__init__()
        self._paused_s = 0.0
        self._paused_at: float | None = None
        """When it last stopped, by its own clock."""

    def time(self) -> float:
        return super().time() - self._paused_s

    def run_forever(self) -> None:
        if self._paused_at is not None:
            self._paused_s += self.time() - self._paused_at
        try:
            super().run_forever()
        finally:
            self._paused_at = self.time()
