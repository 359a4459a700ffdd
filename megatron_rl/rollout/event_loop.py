"""Event loop with a clock that stops while the loop is paused.

Timeouts therefore exclude the time during which the trainer uses the device.
"""

import asyncio


class PausableEventLoop(asyncio.SelectorEventLoop):
    """Selector event loop with a clock that excludes the pauses between runs.

    Results that arrive during a pause, such as tool results, are available when the loop resumes,
    and no timeout expires because of the pause.
    """

    def __init__(self) -> None:
        super().__init__()
        self._paused_s = 0.0
        self._paused_at: float | None = None
        """Value of `time()` when the loop was last paused."""

    def time(self) -> float:
        """Return the loop's time in seconds, excluding pauses."""
        return super().time() - self._paused_s

    def run_forever(self) -> None:
        """Run the loop; its clock excludes the pause since the last run."""
        if self._paused_at is not None:
            self._paused_s += self.time() - self._paused_at
        try:
            super().run_forever()
        finally:
            self._paused_at = self.time()
