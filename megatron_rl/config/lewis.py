"""Settings of the Lewis game's services: listeners, speakers and weight receivers."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_address, require_choice
from megatron_rl.config.client import ClientSettings


@dataclass(kw_only=True, slots=True)
class ListenerSettings(ClientSettings):
    """Settings of the clients that query Lewis listeners (tasks/lewis/server/listener_app.py)."""

    urls: list[str] = field(default_factory=list)
    """URLs of replicas of one listener, e.g. http://listener:9000; each request goes to the least
    busy healthy replica. Empty means no listener."""
    token_file: str = ""
    """File with the access token for the listeners; not needed for listeners that the run
    starts."""
    send: str = "files"
    """Method for sending images to the listener. files: upload each image once, then refer to it by
    its hash. paths: send the path of each image on a shared file system."""
    chunk_size: int = 4
    """Maximum number of descriptions in one request."""
    chunk_delay_s: float = 0.05
    """Maximum time in seconds that a request with fewer than chunk_size descriptions waits for more
    descriptions."""
    backoff_s: float = 0.5
    """Initial backoff of a listener after a failure, in seconds; it doubles with each consecutive
    failure."""
    cache: str = ""
    """File that caches scores across runs, keyed by image, description and listener version; if
    empty, scores are cached in memory for this run only."""
    cache_entries: int = 100_000
    """Maximum number of (image, description) scores in the memory cache; the least recently used
    scores are evicted."""
    proxy: bool = False
    """Use the proxies from the environment variables HTTP_PROXY and NO_PROXY for listeners on other
    machines."""
    partner_is_training: bool = False
    """Set this if another run is training the listener. The version of the listener may then change
    during the run. Each description is scored with the listener's current weights, and scores are
    not cached."""

    def __post_init__(self) -> None:
        self.check_client("task.listener")
        require_choice("task.listener.send", self.send, ("files", "paths"))
        require(0 < self.backoff_s < math.inf, "task.listener.backoff_s", self.backoff_s, "must be positive")
        require(
            0 <= self.chunk_delay_s < math.inf,
            "task.listener.chunk_delay_s",
            self.chunk_delay_s,
            "must be a finite, non-negative number of seconds",
        )
        for key in ("chunk_size", "cache_entries"):
            require(getattr(self, key) >= 1, f"task.listener.{key}", getattr(self, key), "must be at least 1")
        remedy = "would contain outdated scores of a listener in training (task.listener.partner_is_training); remove this setting"
        require(not (self.partner_is_training and self.cache), "task.listener.cache", self.cache, remedy)
        remedy = (
            "would receive new weights at different times; set a single URL for a listener in training (task.listener.partner_is_training)"
        )
        require(not self.partner_is_training or len(self.urls) <= 1, "task.listener.urls", self.urls, remedy)


@dataclass(kw_only=True, slots=True)
class SpeakerSettings(ClientSettings):
    """Settings of the clients that query Lewis speakers (tasks/lewis/server/speaker_app.py)."""

    urls: list[str] = field(default_factory=list)
    """URLs of replicas of one speaker, e.g. http://speaker:9001; each request goes to the least
    busy healthy replica. Empty means no speaker."""
    token_file: str = ""
    """File with the access token for the speakers; not needed for speakers that the run starts."""

    def __post_init__(self) -> None:
        self.check_client("task.speaker")


@dataclass(kw_only=True, slots=True)
class WeightPublishSettings:
    """Settings for sending trained weights to a partner run's services (speaker_app --trained)."""

    urls: list[str] = field(default_factory=list)
    """URLs of the services that receive the weights over HTTP (no shared disk is needed); empty
    disables publishing."""
    every: int = 1
    """Number of steps between weight updates; the run's initial weights are also sent."""
    token_file: str = ""
    """File with the access token for the services in weight_publish.urls."""
    chunk_mib: float = 16.0
    """Size of a weight chunk in MiB, before base64 encoding. Encoding increases the size by a
    third, and the encoded chunk must not exceed the service's --body-mib."""
    timeout_s: float = 120.0
    """Timeout in seconds for sending one chunk. Before a service accepts the last chunk, it
    finishes its requests in flight; the timeout includes this time."""
    max_attempts: int = 3
    """Maximum number of attempts to send one weight update; if all attempts fail, the service keeps
    its previous weights."""

    def __post_init__(self) -> None:
        for url in self.urls:
            require_address("weight_publish.urls", url)
        require(self.every >= 1, "weight_publish.every", self.every, "must be at least 1")
        require(self.max_attempts >= 1, "weight_publish.max_attempts", self.max_attempts, "must be at least 1")
        for key in ("chunk_mib", "timeout_s"):
            require(0 < getattr(self, key) < math.inf, f"weight_publish.{key}", getattr(self, key), "must be a positive number")
        require(
            bool(self.urls) or not self.token_file,
            "weight_publish.token_file",
            self.token_file,
            "has no effect without weight_publish.urls; set the URLs of the services",
        )
