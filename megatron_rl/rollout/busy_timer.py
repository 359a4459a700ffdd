"""Measures the time during which requests are in flight."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTimer:
    """Measures how long at least one request was in flight; the caller passes the current time."""

    num_in_flight: int = 0
    since: float = 0.0
    finished_s: float = 0.0

    def start(self, now: float) -> None:
        """Record that a request starts at `now`."""
        if self.num_in_flight == 0:
            self.since = now
        self.num_in_flight += 1

    def stop(self, now: float) -> None:
        """Record that a request ends at `now`."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.finished_s += now - self.since

    def busy_seconds(self, now: float) -> float:
        """Return for how many seconds, up to `now`, at least one request was in flight."""
        return self.finished_s + (now - self.since if self.num_in_flight else 0.0)
