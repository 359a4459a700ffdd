"""Timer of the requests that are in flight."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTimer:
    """Measures the time in which a server has requests in flight, on a clock of the caller."""

    num_in_flight: int = 0
    since: float = 0.0
    finished_s: float = 0.0

    def start(self, now: float) -> None:
        """Count a request that starts at `now`."""
        if self.num_in_flight == 0:
            self.since = now
        self.num_in_flight += 1

    def stop(self, now: float) -> None:
        """Remove a request that ends at `now`."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.finished_s += now - self.since

    def busy_seconds(self, now: float) -> float:
        """Return the seconds with at least one request in flight until `now`."""
        return self.finished_s + (now - self.since if self.num_in_flight else 0.0)
