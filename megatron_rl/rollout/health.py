"""Who of the servers is well: a task for each looks every second, in the loop of the episodes.

Out is who does not say what weights it has (it has died, or its engine hangs), who has others than are served, and who samples nothing
though it says all is well. In is who has said so, and sampled by them. Who has come back with other weights is given all of them first.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.vllm.client import ABORTED, GenerateClient, GenerateRequest
from megatron_rl.rollout.vllm.server_api import VllmServer, server_label
from megatron_rl.rollout.vllm.weight_sender import WeightSender, run_in_daemon_thread
from sandbox.bounded_http import BoundedClient

POLL_S = 1.0
"""Between two looks."""
MISSED_UPDATE = "was not there when the weights changed"
"""Why a server is out that was not looked at, or for a reason that was told before."""
MAX_FAILED_POLLS = 3
"""Looks in a row without an answer, over engine.health_timeout_s at least, after which a server that runs is taken for one that hangs."""
PROBE_REQUEST = GenerateRequest([0], [], SamplingSettings(max_tokens=1, temperature=1.0, seed=0))
PROGRESS_METRICS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
"""Counts of /metrics that stand still where nothing is computed."""
MAX_METRICS_BYTES = 16 << 20
"""Bytes."""


class ServerSupervisor(Protocol):
    """The servers that the run has started itself (services/engine_servers.py). Its calls may take a while."""

    def report_alive(self, url: str) -> None:
        """It says what weights it has."""
        ...

    def report_healthy(self, url: str) -> None:
        """It serves."""
        ...

    def restart(self, url: str, *, is_unresponsive: bool) -> None:
        """It does not answer: start it again if it has ended, or `is_unresponsive` and has answered since it was started, and may be."""
        ...


class HealthMonitor:
    def __init__(
        self, servers: Sequence[VllmServer], *, http: BoundedClient, client: GenerateClient, health_timeout_s: float,
        expected_label: Callable[[], str], cache_salt: Callable[[], str], sender: WeightSender | None,
        supervisor: ServerSupervisor | None, log: Callable[[str], None], outage_timeout_s: float,
    ) -> None:  # fmt: skip
        """`expected_label` is the label of the weights that are served; empty while nobody may ask. `sender` gives weights, where this
        process does. `client` has health_timeout_s as its limit. `outage_timeout_s`: for which those who ask wait while nobody is in."""
        self._servers, self._http, self._client, self._health_timeout_s, self._expected_label, self._cache_salt = (
            servers,
            http,
            client,
            health_timeout_s,
            expected_label,
            cache_salt,
        )
        self._sender, self._supervisor, self.log, self._outage_timeout_s = sender, supervisor, log, outage_timeout_s
        self.unhealthy_since: float | None = None
        """Since when nobody is in, on time.monotonic's clock; None where somebody is, or nothing was served yet."""
        self.last_failure = ""
        """The last failure of a server, with its address."""

    def start(self) -> None:
        for server in self._servers:
            server.failure = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._monitor(server)) for server in self._servers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _monitor(self, server: VllmServer) -> None:
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
                await self._restart(
                    server,
                    is_unresponsive=num_failed_polls >= MAX_FAILED_POLLS and time.monotonic() - first_failure_at >= self._health_timeout_s,
                )
                continue
            num_failed_polls, server.is_responding = 0, True
            if self._supervisor is not None:
                self._supervisor.report_alive(server.url)
            if expected and expected == self._expected_label():
                await self._check_server(server, label, expected)

    async def _check_server(self, server: VllmServer, label: str, expected: str) -> None:
        """Of one that calls its weights so. Where these change meanwhile nothing is said of it."""
        if server.is_healthy and self._supervisor is not None:
            self._supervisor.report_healthy(server.url)
        if label != expected:
            self.mark_unhealthy(server, f"has weights {label}, not {expected}")
            await self._recover(server)
        elif not server.is_healthy or time.monotonic() - server.last_sampled_at > self._health_timeout_s:
            is_generating = await self._probe_generation(server, expected)
            if is_generating is None or expected != self._expected_label():
                return
            if is_generating:
                self.readmit(server)
            else:
                self.mark_unhealthy(
                    server, f"says that it is well, and samples nothing within engine.health_timeout_s={self._health_timeout_s}"
                )
                await (self._recover(server) if self._supervisor is None else self._restart(server, is_unresponsive=True))

    async def _probe_generation(self, server: VllmServer, label: str) -> bool | None:
        """Whether it samples a token, or anything for others; None where another rank has had it give up all that it does."""
        before = await self._read_progress(server)
        try:
            part = await self._client.generate(
                server, PROBE_REQUEST, Completion([], [], is_stopped=False, weight_versions=[]), label=label, salt=self._cache_salt()
            )
            return None if part.finish_reason == ABORTED else True
        except (EndpointError, ValueError, RuntimeError):  # the latter two of an answer that is none
            return before != await self._read_progress(server)

    async def _read_progress(self, server: VllmServer) -> list[str]:
        """What it has computed so far, as it says itself; nothing where it does not."""
        try:
            answer = await server.call_in_loop(self._http, "/metrics", limit_s=self._health_timeout_s, max_bytes=MAX_METRICS_BYTES)
        except EndpointError:
            return []
        return [line for line in answer.decode(errors="replace").splitlines() if line.startswith(PROGRESS_METRICS)]

    async def _restart(self, server: VllmServer, *, is_unresponsive: bool) -> None:
        if self._supervisor is not None:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: self._supervisor.restart(server.url, is_unresponsive=is_unresponsive)))

    async def _recover(self, server: VllmServer) -> None:
        """Give one that has come back the weights that are served, all of them, if they are this process's to give."""
        if self._sender is None or server.endpoint.backoff_until > time.monotonic():
            return
        began = time.monotonic()
        try:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: self._sender.add_server(server.url)))
        except EndpointError as fault:
            server.endpoint.record_failure(sent_at=began)
            self.log(f"engine {server.url}: {fault}")

    async def check_version(self, server: VllmServer) -> str:
        """What a server calls its weights. Through its engine core: one that hangs does not answer."""
        return server_label(await server.call_in_loop(self._http, "/weight_info", limit_s=self._health_timeout_s))

    def mark_unhealthy(self, server: VllmServer, reason: str) -> None:
        """It is out until its weights were looked at; what it has to do is asked of others."""
        if reason != MISSED_UPDATE or not self.last_failure:
            self.last_failure = f"{server.url}: {reason}"
        if server.is_healthy:
            server.is_healthy = False
            server.failure.set_result(reason)
            self.log(f"engine {server.url}: {reason}")
            self.update_outage()

    def update_outage(self) -> None:
        """Whether nobody is in, and since when: all who wait give up together, however late they have begun to ask."""
        if any(server.is_healthy for server in self._servers):
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = time.monotonic()
            self.log(f"no engine is well; replies wait for one up to {self._outage_timeout_s:g} s (engine.outage_timeout_s)")

    def readmit(self, server: VllmServer) -> None:
        if not server.is_healthy:
            server.is_healthy, server.failure = True, asyncio.get_running_loop().create_future()
            server.known_images.clear()
            server.last_sampled_at = time.monotonic()
            self.update_outage()
