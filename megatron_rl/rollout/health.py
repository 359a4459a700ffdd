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
UNREACHABLE = "was not there when the weights changed"
"""Why a server is out that was not looked at, or for a reason that was told before."""
UNRESPONSIVE = 3
"""Looks in a row without an answer, over engine.health_timeout_s at least, after which a server that runs is taken for one that hangs."""
PROBE = GenerateRequest([0], [], SamplingSettings(max_tokens=1, temperature=1.0, seed=0))
STALE = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
"""Counts of /metrics that stand still where nothing is computed."""
MAX_METRICS_BYTES = 16 << 20
"""Bytes."""


class ServerSupervisor(Protocol):
    """The servers that the run has started itself (services/engine_servers.py). Its calls may take a while."""

    def report_alive(self, url: str) -> None:
        """It says what weights it has."""
        ...

    def is_healthy(self, url: str) -> None:
        """It serves."""
        ...

    def restart(self, url: str, *, hangs: bool) -> None:
        """It does not answer: start it again if it has ended, or `hangs` and has answered since it was started, and may be."""
        ...


class HealthMonitor:
    def __init__(
        self, servers: Sequence[VllmServer], *, http: BoundedClient, asking: GenerateClient, probe_s: float, wanted: Callable[[], str],
        salt: Callable[[], str], sender: WeightSender | None, household: ServerSupervisor | None, tell: Callable[[str], None], patience_s:
        float,
    ) -> None:  # fmt: skip
        """`wanted` is the label of the weights that are served; empty while nobody may ask. `sender` gives weights, where this process
        does. `asking` has probe_s as its limit. `patience_s`: for which those who ask wait while nobody is in."""
        self._servers, self._http, self._asking, self._probe_s, self._wanted, self._salt = servers, http, asking, probe_s, wanted, salt
        self._sender, self._household, self.tell, self._patience_s = sender, household, tell, patience_s
        self.dark_since: float | None = None
        """Since when nobody is in, on time.monotonic's clock; None where somebody is, or nothing was served yet."""
        self.last_failure = ""
        """The last failure of a server, with its address."""

    def start(self) -> None:
        for server in self._servers:
            server.fall = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, server: VllmServer) -> None:
        num_silent, since = 0, 0.0
        while True:
            await asyncio.sleep(POLL_S)
            wanted, now = self._wanted(), time.monotonic()
            try:
                label = await self.check_version(server)
            except EndpointError as fault:
                if server.is_reading:
                    continue
                since, num_silent, server.answers = since if num_silent else now, num_silent + 1, False
                self.mark_unhealthy(server, str(fault))
                await self._revive(server, hangs=num_silent >= UNRESPONSIVE and time.monotonic() - since >= self._probe_s)
                continue
            num_silent, server.answers = 0, True
            if self._household is not None:
                self._household.report_alive(server.url)
            if wanted and wanted == self._wanted():
                await self._evaluate(server, label, wanted)

    async def _evaluate(self, server: VllmServer, label: str, wanted: str) -> None:
        """Of one that calls its weights so. Where these change meanwhile nothing is said of it."""
        if server.is_in and self._household is not None:
            self._household.is_healthy(server.url)
        if label != wanted:
            self.mark_unhealthy(server, f"has weights {label}, not {wanted}")
            await self._recover(server)
        elif not server.is_in or time.monotonic() - server.heard > self._probe_s:
            does = await self._generates(server, wanted)
            if does is None or wanted != self._wanted():
                return
            if does:
                self.readmit(server)
            else:
                self.mark_unhealthy(server, f"says that it is well, and samples nothing within engine.health_timeout_s={self._probe_s}")
                await (self._recover(server) if self._household is None else self._revive(server, hangs=True))

    async def _generates(self, server: VllmServer, label: str) -> bool | None:
        """Whether it samples a token, or anything for others; None where another rank has had it give up all that it does."""
        before = await self._read_progress(server)
        try:
            part = await self._asking.generate(
                server, PROBE, Completion([], [], finish_reason=False, versions=[]), label=label, salt=self._salt()
            )
            return None if part.reason == ABORTED else True
        except (EndpointError, ValueError, RuntimeError):  # the latter two of an answer that is none
            return before != await self._read_progress(server)

    async def _read_progress(self, server: VllmServer) -> list[str]:
        """What it has computed so far, as it says itself; nothing where it does not."""
        try:
            answer = await server.call_in_loop(self._http, "/metrics", limit_s=self._probe_s, max_bytes=MAX_METRICS_BYTES)
        except EndpointError:
            return []
        return [line for line in answer.decode(errors="replace").splitlines() if line.startswith(STALE)]

    async def _revive(self, server: VllmServer, *, hangs: bool) -> None:
        if self._household is not None:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: self._household.restart(server.url, hangs=hangs)))

    async def _recover(self, server: VllmServer) -> None:
        """Give one that has come back the weights that are served, all of them, if they are this process's to give."""
        if self._sender is None or server.endpoint.rest_until > time.monotonic():
            return
        began = time.monotonic()
        try:
            await asyncio.wrap_future(run_in_daemon_thread(lambda: self._sender.add_server(server.url)))
        except EndpointError as fault:
            server.endpoint.failed(began=began)
            self.tell(f"engine {server.url}: {fault}")

    async def check_version(self, server: VllmServer) -> str:
        """What a server calls its weights. Through its engine core: one that hangs does not answer."""
        return server_label(await server.call_in_loop(self._http, "/weight_info", limit_s=self._probe_s))

    def mark_unhealthy(self, server: VllmServer, reason: str) -> None:
        """It is out until its weights were looked at; what it has to do is asked of others."""
        if reason != UNREACHABLE or not self.last_failure:
            self.last_failure = f"{server.url}: {reason}"
        if server.is_in:
            server.is_in = False
            server.fall.set_result(reason)
            self.tell(f"engine {server.url}: {reason}")
            self.record_failure()

    def record_failure(self) -> None:
        """Whether nobody is in, and since when: all who wait give up together, however late they have begun to ask."""
        if any(server.is_in for server in self._servers):
            self.dark_since = None
        elif self.dark_since is None:
            self.dark_since = time.monotonic()
            self.tell(f"no engine is well; replies wait for one up to {self._patience_s:g} s (engine.outage_timeout_s)")

    def readmit(self, server: VllmServer) -> None:
        if not server.is_in:
            server.is_in, server.fall = True, asyncio.get_running_loop().create_future()
            server.known.clear()
            server.heard = time.monotonic()
            self.record_failure()
