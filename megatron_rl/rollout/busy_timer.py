"""Measures the time during which requests are in flight."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTimer:
    """Measures the total time during which at least one request is in flight.

    The caller passes the current time to each method.
    """

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
        """Return the number of seconds until `now` with at least one request in flight."""
        return self.finished_s + (now - self.since if self.num_in_flight else 0.0)
