"""Settings of launch/serve.py for the model of a run."""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.checks import require


@dataclass(kw_only=True, slots=True, frozen=True)
class ServeSettings:
    """Command-line options; None, 0 and "" select the value of the run where a field says so."""

    run: Path
    """Run directory, one of its checkpoints, or its folder final/."""
    checkpoint: str = ""
    """Model of a run directory: final, last, best or a number of steps; "" for final, or last if
    the run has no final model.
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 for a free one."""
    token_file: Path | None = None
    """File with the key that requests need; required for addresses that other machines reach."""
    model_names: tuple[str, ...] = ()
    """Names of the model that requests may use, in addition to `policy`."""
    temperature: float | None = None
    """Temperature of requests without one; None for that of the run."""
    max_requests: int = 256
    """Maximum number of requests in progress."""
    max_sessions: int = 1000
    """Maximum number of conversations that can be continued token for token."""
    request_timeout_s: float = 600.0
    """Time limit of a request, including its wait for the engine."""
    ignore: tuple[str, ...] = ()
    """Unsupported settings of requests that are ignored, in addition to task.options.ignore."""
    log: Path | None = None
    """JSON Lines file to which each request is appended with its token ids."""
    dtype: str = ""
    """Data type of the engine; "" for that of the run."""
    max_model_len: int = 0
    """Maximum number of tokens in a sequence; 0 for that of the run."""
    max_images: int = 0
    """Maximum number of images in a sequence; 0 for that of the run."""
    kv_cache_mib: int = 0
    """Size of the KV cache on a CPU; 0 for that of the run."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine uses."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 1 << 16, "--port", self.port, "must be between 0 and 65535; 0 selects a free port")
        require(self.max_requests >= 1, "--max-requests", self.max_requests, "must be at least 1")
        require(self.max_sessions >= 1, "--max-sessions", self.max_sessions, "must be at least 1")
        require(0 < self.request_timeout_s < math.inf, "--timeout", self.request_timeout_s, "must be a positive number of seconds")
        remedy = "must be between 0 (greedy) and 2"
        require(self.temperature is None or 0 <= self.temperature <= 2, "--temperature", self.temperature, remedy)
