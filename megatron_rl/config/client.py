"""Settings that all clients of services share."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_address


@dataclass(kw_only=True, slots=True)
class ClientSettings:
    """URLs of the servers of a service, and limits on the requests to these servers."""

    urls: list[str] = field(default_factory=list)
    """URLs of interchangeable servers; each request goes to the least busy healthy server."""
    timeout_s: float = 60.0
    """Timeout of one request, in seconds."""
    outage_timeout_s: float = 60.0
    """Maximum time in seconds that a request waits while all servers are in backoff after failures;
    with 0, a request does not wait. The backoff of a server is at most outage_timeout_s, unless the
    server requests a longer backoff."""
    max_attempts: int = 5
    """Maximum number of attempts per request; if all fail, the rollout fails and gets no
    reward."""
    concurrency: int = 32
    """Maximum total number of concurrent requests to all servers."""

    def check_client(self, key: str) -> None:
        """Raise ValueError if a field is invalid; `key` is the dotted key of these settings."""
        for url in self.urls:
            require_address(f"{key}.urls", url)
        require(0 < self.timeout_s < math.inf, f"{key}.timeout_s", self.timeout_s, "must be positive")
        remedy = "must be a finite, non-negative number of seconds; 0 disables waiting"
        require(0 <= self.outage_timeout_s < math.inf, f"{key}.outage_timeout_s", self.outage_timeout_s, remedy)
        for name in ("max_attempts", "concurrency"):
            require(getattr(self, name) >= 1, f"{key}.{name}", getattr(self, name), "must be at least 1")
