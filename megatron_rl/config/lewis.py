"""Partners of the Lewis game: whom a run asks, and to whom it sends what it trains."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_address, require_choice


@dataclass(kw_only=True, slots=True)
class ListenerSettings:
    """Listeners of the Lewis game (python -m megatron_rl.tasks.lewis.server.listener_app), who say which picture a description means."""

    urls: list[str] = field(default_factory=list)
    """Addresses, e.g. http://listener:9000, all of the same listener; the least busy healthy one is asked. Empty: there is none."""
    token_file: str = ""
    """File with the token that they ask for; that of a service of the run is known."""
    send: str = "files"
    """How pictures travel: files sends each once and names it by its hash from then on, paths names files on a disk that both sides see."""
    chunk_size: int = 4
    """Descriptions in one request at most."""
    chunk_delay_s: float = 0.05
    """Seconds that a request waits for further descriptions while it is not full."""
    timeout_s: float = 60.0
    """Seconds after which a request is given up."""
    outage_timeout_s: float = 60.0
    """Seconds that a request waits at most while all listeners rest after a failure."""
    max_attempts: int = 5
    """Requests that one description makes at most; after the last the rollout is failed, never 0."""
    backoff_s: float = 0.5
    """A listener's first rest after a failure; each further one in a row is twice as long."""
    concurrency: int = 32
    """Requests under way at the same time, over all listeners."""
    cache: str = ""
    """A file that keeps what was heard between runs, by picture, words and the listener's version; empty keeps it for this run."""
    cache_entries: int = 100_000
    """Pictures with words whose p(yes) is kept in memory; those used longest ago are forgotten."""
    proxy: bool = False
    """Whether the environment's proxies (HTTP_PROXY, NO_PROXY) are used on the way to those that are not on this machine."""
    partner_is_training: bool = False
    """Whether the listener may become another while the run lasts, one that another run trains: each answer is then by the weights that it
    has when it is asked, and nothing is kept."""

    def __post_init__(self) -> None:
        for url in self.urls:
            require_address("task.listener.urls", url)
        require_choice("task.listener.send", self.send, ("files", "paths"))
        for key in ("timeout_s", "backoff_s"):
            require(0 < getattr(self, key) < math.inf, f"task.listener.{key}", getattr(self, key), "must be positive")
        for key in ("outage_timeout_s", "chunk_delay_s"):
            require(0 <= getattr(self, key) < math.inf, f"task.listener.{key}", getattr(self, key), "must be a number of seconds")
        for key in ("max_attempts", "concurrency", "chunk_size", "cache_entries"):
            require(getattr(self, key) >= 1, f"task.listener.{key}", getattr(self, key), "must be at least 1")
        remedy = (
            "keeps what a listener said, and one in training says something else soon (task.listener.partner_is_training); leave it out"
        )
        require(not (self.partner_is_training and self.cache), "task.listener.cache", self.cache, remedy)
        remedy = (
            "are copies that take new weights one after the other; one that is in training (task.listener.partner_is_training) is alone"
        )
        require(not self.partner_is_training or len(self.urls) <= 1, "task.listener.urls", self.urls, remedy)


@dataclass(kw_only=True, slots=True)
class SpeakerSettings:
    """Speakers of the Lewis game (python -m megatron_rl.tasks.lewis.server.speaker_app), whose descriptions a listener is trained on."""

    urls: list[str] = field(default_factory=list)
    """Addresses, e.g. http://speaker:9001, all of the same speaker; the least busy healthy one is asked. Empty: there is none."""
    token_file: str = ""
    """File with the token that they ask for; that of a service of the run is known."""
    timeout_s: float = 60.0
    """Seconds after which a request is given up."""
    outage_timeout_s: float = 60.0
    """Seconds that a request waits at most while all speakers rest after a failure."""
    max_attempts: int = 5
    """Requests that one description makes at most; after the last the rollout is failed."""
    concurrency: int = 32
    """Requests under way at the same time, over all speakers."""

    def __post_init__(self) -> None:
        for url in self.urls:
            require_address("task.speaker.urls", url)
        require(0 < self.timeout_s < math.inf, "task.speaker.timeout_s", self.timeout_s, "must be positive")
        require(
            0 <= self.outage_timeout_s < math.inf, "task.speaker.outage_timeout_s", self.outage_timeout_s, "must be a number of seconds"
        )
        for key in ("max_attempts", "concurrency"):
            require(getattr(self, key) >= 1, f"task.speaker.{key}", getattr(self, key), "must be at least 1")


@dataclass(kw_only=True, slots=True)
class WeightPublishSettings:
    """Services that answer with the policy in training, for a partner's run (python -m megatron_rl.tasks.lewis.server.speaker_app
    --trained)."""

    urls: list[str] = field(default_factory=list)
    """Their addresses: they are sent the weights by HTTP, over no disk. Empty: there are none."""
    every: int = 1
    """Steps from one sending to the next; the weights that the run begins with are sent, too."""
    token_file: str = ""
    """File with the token that they ask for."""
    chunk_mib: float = 16.0
    """Size of the parts, in MiB, in which the weights travel; base64 takes a third more, within the service's --body-mib."""
    timeout_s: float = 120.0
    """Seconds that a service may take for a part; for the last one it first ends what is under way."""
    max_attempts: int = 3
    """Sendings of one update at most; a service that does not take it goes on with what it has."""

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
            "is for services: name them, weight_publish.urls",
        )
