"""The protocol of an inference server, as the server engine and the health monitor use it.

URL paths, JSON fields and flags of a server are known to its implementation alone;
rollout/vllm/server_api.py implements it for vLLM.
"""

import asyncio
from typing import Protocol

from megatron_rl.clients.endpoint_pool import Endpoint
from megatron_rl.rollout.busy_timer import BusyTimer
from sandbox.bounded_http import BoundedClient


class ServerBackend(Protocol):
    """One inference server.

    Its methods raise EndpointError if the server refuses, does not answer in time, or sends an
    unexpected reply.
    """

    url: str
    token: str
    """Token that every request carries; empty if the server needs none."""
    endpoint: Endpoint
    is_healthy: bool
    """True while the server is known to hold the weights that are served."""
    is_responding: bool
    """True unless the last health check got no answer."""
    is_checksumming: bool
    """True while the server reads all of its weights and answers nothing else."""
    busy_timer: BusyTimer
    """Time during which this process had requests in flight, on the clock of time.perf_counter."""
    last_sampled_at: float
    """Time of the last sampled token, on the clock of time.monotonic."""
    known_images: set[str]
    """Keys of the images that the server has received."""
    failure: asyncio.Future[str] | None
    """Resolves to the reason as soon as the server is marked unhealthy."""
    access_error: str
    """Error message if the server has refused this run's key or token, which ends the run."""

    async def read_weight_label(self, http: BoundedClient, *, limit_s: float) -> str:
        """Return the label of the weights that the server's engine samples with.

        An engine that hangs does not answer.
        """
        ...

    async def read_progress(self, http: BoundedClient, *, limit_s: float) -> list[str]:
        """Return counters that change whenever the server computes a token."""
        ...

    async def abort_requests(self, http: BoundedClient, *, limit_s: float) -> None:
        """End all requests in flight; each returns the tokens that it has sampled."""
        ...
