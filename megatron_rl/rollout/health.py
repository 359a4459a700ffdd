"""Monitors the health of the inference servers, with one task per server.

The tasks run in the episodes' event loop and check each server every second. A server is unhealthy
in three cases: it does not report its weight version (because it has crashed or its engine hangs),
its weights are outdated, or it generates no tokens. A server becomes healthy after reporting the
expected version and generating a token with this version. A server that rejoins with different
weights first receives all current weights.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.config import EngineSettings
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.server_backend import ServerBackend
from megatron_rl.rollout.vllm.client import ABORTED, GenerateClient, GenerateRequest
from megatron_rl.rollout.vllm.weight_sender import WeightSender, run_in_daemon_thread
from megatron_rl_sandbox.bounded_http import BoundedClient

POLL_S = 1.0
"""Seconds between two checks of a server."""
MISSED_UPDATE = "was not reachable during the last weight update"
"""Failure reason of a server that was skipped in a weight update. This reason does not replace an
earlier failure reason.
"""
MAX_FAILED_POLLS = 3
"""Number of consecutive failed checks after which a running server is treated as unresponsive, if
the failures span at least engine.health_timeout_s seconds.
"""
PROBE_REQUEST = GenerateRequest([0], [], SamplingSettings(max_tokens=1, temperature=1.0, seed=0))
"""Request for one token, used to test whether a server generates tokens."""


class ServerSupervisor(Protocol):
    """Restarts servers that the run itself has started (services/engine_servers.py).

    The supervisor's methods may block.
    """

    def report_alive(self, url: str) -> None:
        """Record that the server has reported its weight version."""
        ...

    def report_healthy(self, url: str) -> None:
        """Record that the server is healthy."""
        ...

    def restart(self, url: str, *, is_unresponsive: bool) -> None:
        """Restart an unhealthy server if the server has exited or is unresponsive.

        `is_unresponsive` is ignored until the server has responded for the first time since its
        start. Before its first response, the server is considered unresponsive once its startup
        timeout has passed. The server is not restarted during its restart backoff, or after too
        many restarts.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerControl:
    """Weight sender and supervisor on the main rank; both are None on the other ranks."""

    sender: WeightSender | None = None
    """Sends weights to the servers."""
    supervisor: ServerSupervisor | None = None
    """Restarts servers; None if the run did not start the servers itself."""


class HealthMonitor:
    """Monitors all servers and keeps `ServerBackend.is_healthy` up to date."""

    def __init__(
        self, servers: Sequence[ServerBackend], settings: EngineSettings, *, http: BoundedClient, client: GenerateClient,
        expected_label: Callable[[], str], cache_salt: Callable[[], str], control: ServerControl, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Create a monitor; `start` begins the checks.

        Args:
            servers: Servers to monitor.
            settings: Engine settings. health_timeout_s is the timeout of a health check;
                outage_timeout_s is used only in a log line.
            http: HTTP client of the episodes' event loop.
            client: Client for probe requests, with settings.health_timeout_s as its timeout.
            expected_label: Returns the label of the current weights, or '' during a weight update.
            cache_salt: Returns the salt of the servers' prefix caches.
            control: Updates and restarts servers.
            log: Prints one line.
        """
        self._servers, self._settings, self._http, self._client = servers, settings, http, client
        self._expected_label, self._cache_salt = expected_label, cache_salt
        self._sender, self._supervisor, self.log = control.sender, control.supervisor, log
        self.unhealthy_since: float | None = None
        """Start of the current outage (no server is healthy), as a value of time.monotonic(). None
        while a server is healthy, and before the first weight update.
        """
        self.last_failure = ""
        """Address and failure reason of the server that failed last."""

    def start(self) -> None:
        """Start one monitoring task per server in the running event loop."""
        for server in self._servers:
            server.failure = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._monitor(server)) for server in self._servers]

    async def stop(self) -> None:
        """Cancel the monitoring tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _monitor(self, server: ServerBackend) -> None:
        num_failed_polls, first_failure_at = 0, 0.0
        while True:
            await asyncio.sleep(POLL_S)
            expected, now = self._expected_label(), time.monotonic()
            try:
                label = await self.check_version(server)
            except EndpointError as fault:
                if server.is_checksumming:
                    continue
                first_failure_at, num_failed_polls, server.is_responding = (
                    first_failure_at if num_failed_polls else now,
                    num_failed_polls + 1,
                    False,
                )
                self.mark_unhealthy(server, str(fault))
                has_lasted = time.monotonic() - first_failure_at >= self._settings.health_timeout_s
                await self._restart(server, is_unresponsive=num_failed_polls >= MAX_FAILED_POLLS and has_lasted)
                continue
            num_failed_polls, server.is_responding = 0, True
            if self._supervisor is not None:
                self._supervisor.report_alive(server.url)
            if expected and expected == self._expected_label():
                await self._check_server(server, label, expected)

    async def _check_server(self, server: ServerBackend, label: str, expected: str) -> None:
        """Update the health of a server that has reported the weight label `label`.

        The result of a probe is ignored if the expected label changed during the probe.
        """
        if server.is_healthy and self._supervisor is not None:
            self._supervisor.report_healthy(server.url)
        if label != expected:
            self.mark_unhealthy(server, f"has weights {label}, not {expected}")
            await self._recover(server)
        elif not server.is_healthy or time.monotonic() - server.last_sampled_at > self._settings.health_timeout_s:
            is_generating = await self._probe_generation(server, expected)
            if is_generating is None or expected != self._expected_label():
                return
            if is_generating:
                self.readmit(server)
            else:
                limit = f"engine.health_timeout_s={self._settings.health_timeout_s}"
                self.mark_unhealthy(server, f"responds to health checks, but generated no token within {limit}")
                await (self._recover(server) if self._supervisor is None else self._restart(server, is_unresponsive=True))

    async def _probe_generation(self, server: ServerBackend, label: str) -> bool | None:
        """Return True if the server generates a token, or makes progress on other requests.

        Returns None if the probe was aborted because another rank aborted all requests of the
        server.
        """
        before = await self._read_progress(server)
        try:
            part = await self._client.generate(
                server, PROBE_REQUEST, Completion([], [], is_stopped=False, weight_versions=[]), label=label, salt=self._cache_salt()
            )
            return None if part.finish_reason == ABORTED else True
        except (EndpointError, ValueError, RuntimeError):  # invalid replies raise ValueError or RuntimeError
            return before != await self._read_progress(server)

    async def _read_progress(self, server: ServerBackend) -> list[str]:
        try:
            return await server.read_progress(self._http, limit_s=self._settings.health_timeout_s)
        except EndpointError:
            return []

    async def _restart(self, server: ServerBackend, *, is_unresponsive: bool) -> None:
        supervisor = self._supervisor
        if supervisor is not None:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: supervisor.restart(server.url, is_unresponsive=is_unresponsive)))

    async def _recover(self, server: ServerBackend) -> None:
        """Send all current weights to a server that rejoins, if this process is the sender."""
        sender = self._sender
        if sender is None or server.endpoint.backoff_until > time.monotonic():
            return
        began = time.monotonic()
        try:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: sender.add_server(server.url)))
        except EndpointError as fault:
            server.endpoint.record_failure(sent_at=began)
            self.log(f"engine {server.url}: {fault}")

    async def check_version(self, server: ServerBackend) -> str:
        """Return the label of the server's weights.

        The request passes through the server's engine core, so the request times out if the engine
        hangs.
        """
        return await server.read_weight_label(self._http, limit_s=self._settings.health_timeout_s)

    def mark_unhealthy(self, server: ServerBackend, reason: str) -> None:
        """Mark a server as unhealthy until `readmit` is called.

        The server's requests in flight fail and are sent to other servers.
        """
        if reason != MISSED_UPDATE or not self.last_failure:
            self.last_failure = f"{server.url}: {reason}"
        if server.is_healthy:
            assert server.failure is not None, "a healthy server has one"
            server.is_healthy = False
            server.failure.set_result(reason)
            self.log(f"engine {server.url}: {reason}")
            self.update_outage()

    def update_outage(self) -> None:
        """Update `unhealthy_since`.

        All waiting requests compute the duration of the outage from `unhealthy_since`. They
        therefore fail at the same time, no matter when they started.
        """
        if any(server.is_healthy for server in self._servers):
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = time.monotonic()
            limit = f"{self._settings.outage_timeout_s:g} s (engine.outage_timeout_s)"
            self.log(f"no engine is healthy; requests wait for a healthy engine for up to {limit}")

    def readmit(self, server: ServerBackend) -> None:
        """Mark a server as healthy, so that it receives requests again."""
        if not server.is_healthy:
            server.is_healthy, server.failure = True, asyncio.get_running_loop().create_future()
            server.known_images.clear()
            server.last_sampled_at = time.monotonic()
            self.update_outage()
