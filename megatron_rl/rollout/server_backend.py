"""Interface through which the server engine and the health monitor use an inference server.

URL paths, JSON fields and command-line flags of a server are defined by the implementations of this
interface; rollout/vllm/server_api.py is the implementation for vLLM.
"""

import asyncio
from typing import Protocol

from megatron_rl.clients.endpoint_pool import Endpoint
from megatron_rl.rollout.busy_timer import BusyTimer
from megatron_rl_sandbox.bounded_http import BoundedClient, BoundedResponse


class ServerBackend(Protocol):
    """One inference server.

    Methods raise EndpointError if the server rejects a request, does not respond in time, or sends
    an unexpected reply.
    """

    url: str
    token: str
    """Token that is sent with every request; empty if the server requires no token."""
    endpoint: Endpoint
    is_healthy: bool
    """True while the server is known to have the current weights."""
    is_responding: bool
    """False if the server did not respond to the last health check."""
    is_checksumming: bool
    """True while the server computes checksums of all its weights. During this time, the server
    does not respond to other requests.
    """
    busy_timer: BusyTimer
    """Measures the time during which this process has requests in flight to the server. All times
    are values of time.perf_counter().
    """
    last_sampled_at: float
    """Time at which the server last returned sampled tokens, as a value of time.monotonic()."""
    known_images: set[str]
    """Keys of the images that the server has received."""
    pending_images: dict[str, asyncio.Event]
    """Events for the images that are being sent, by image key. An event is set when sending the
    image ends, with or without success.
    """
    failure: asyncio.Future[str] | None
    """Future that resolves to the failure reason when the server is marked unhealthy."""
    access_error: str
    """Error message if the server has rejected this run's key or token, else empty. A rejection
    ends the run.
    """

    def check_reply(self, answer: BoundedResponse, path: str) -> bytes:
        """Return the content of a successful reply.

        Raises:
            KeyRefused: The server rejects the token.
            EndpointError: The reply has another error status.
        """
        ...

    async def read_weight_label(self, http: BoundedClient, *, limit_s: float) -> str:
        """Return the label of the weights that the server's engine uses.

        The engine itself processes this request, so the request times out if the engine hangs.
        """
        ...

    async def read_progress(self, http: BoundedClient, *, limit_s: float) -> list[str]:
        """Return counters that change whenever the server computes a token."""
        ...

    async def abort_requests(self, http: BoundedClient, *, limit_s: float) -> None:
        """Abort all requests in flight; each request returns the tokens it has sampled so far."""
        ...
