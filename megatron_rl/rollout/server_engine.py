"""Rollout engine that sends requests to vLLM servers in other processes, on any node.

A new episode is assigned to the least busy server. The episode stays on this server, because the
server has cached the episode's sequence. If a weight update or a failure interrupts a request, the
request is sent again with the tokens sampled so far, to the same server or to another server. On
CPUs, resending does not change the sampling noise, which depends only on seed and position
(vllm/sampler.py). Weights are identified by a label, which consists of the run's name and the
weight version. With the sampled tokens, a server returns the label of the weights that it used.

The event loop runs in its own thread, so episodes continue while the trainer computes.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from megatron_rl.clients.endpoint_pool import EndpointError, KeyRefused
from megatron_rl.config import EngineSettings, require
from megatron_rl.errors import AccessDenied, InfraError, InfraTimeout
from megatron_rl.rollout.engine import Completion, SamplingSettings, placeholder_offsets
from megatron_rl.rollout.health import MISSED_UPDATE, HealthMonitor, ServerControl
from megatron_rl.rollout.server_backend import ServerBackend
from megatron_rl.rollout.vllm.client import ABORTED, GenerateClient, GenerateRequest, PartialCompletion, find_stop
from megatron_rl.types import Image, SpecialTokens
from megatron_rl_sandbox.bounded_http import BoundedClient

T = TypeVar("T")
MAX_ATTEMPTS = 5
"""Number of failed requests for one turn after which the episode fails."""
POLL_S, ABORT_RETRY_S = 0.1, 0.3
"""Seconds between two searches for a healthy server, and between two abort requests to a server."""
KEEPALIVE_S = 2.0
"""Number of seconds for which idle connections are kept open. This is less than uvicorn's
keep-alive timeout of 5 seconds.
"""


class ServerEngine:
    """Rollout engine that distributes the requests of one rank over all inference servers.

    Every rank has a ServerEngine. Only the rank that sends the weights has a `control.sender`.
    """

    def __init__(
        self, servers: Sequence[ServerBackend], settings: EngineSettings, *,
        name: str, special_tokens: SpecialTokens, decode_tokens: Callable[[list[int]], str],
        all_gather: Callable[[object], list], control: ServerControl, first_server: int = 0, log: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """Start the event loop's thread and the health monitor.

        Args:
            servers: All servers.
            settings: Engine settings.
            name: Unique name of the run, which is the prefix of its weight labels.
            special_tokens: Ids of the image placeholder and of the tokens that end a turn.
            decode_tokens: Returns the text of token ids.
            all_gather: Gathers the values of all ranks on every rank.
            control: Updates and restarts the servers; empty on ranks that do not send weights.
            first_server: Index of the server to prefer if several servers are equally busy.
            log: Prints one line.
        """
        self._servers, self._settings, self._name = list(servers), settings, name
        self._special_tokens, self._decode_tokens = special_tokens, decode_tokens
        self._all_gather, self._control, self._log = all_gather, control, log
        self._order = {server.url: (number - first_server) % len(servers) for number, server in enumerate(servers)}
        self.weight_version = 0
        self._metrics: dict[str, float] = {}
        self._server_by_task: WeakKeyDictionary[asyncio.Task, ServerBackend] = WeakKeyDictionary()
        self._num_in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self.run(self._set_up())

    async def _set_up(self) -> None:
        probe_s = self._settings.health_timeout_s
        self._http = BoundedClient(token=self._servers[0].token, keepalive_s=KEEPALIVE_S)  # all servers share one token
        make_client = partial(GenerateClient, http=self._http, special_tokens=self._special_tokens, connect_s=probe_s)
        self._client = make_client(limit_s=self._settings.request_timeout_s)
        self._slots = asyncio.Semaphore(self._settings.max_num_seqs * len(self._servers))
        self._is_serving = asyncio.Event()
        self._health_monitor = HealthMonitor(
            self._servers, self._settings, http=self._http, client=make_client(limit_s=probe_s), cache_salt=lambda: self.cache_salt,
            expected_label=lambda: self.weights_label if self._is_serving.is_set() else "", control=self._control, log=self._log,
        )  # fmt: skip
        self._health_monitor.start()

    def run(self, main: Coroutine[object, object, T]) -> T:
        """Run `main` in the event loop's thread and return its result.

        Tasks that `main` leaves running continue, even between two calls of `run`.
        """
        future = asyncio.run_coroutine_threadsafe(main, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted; has no effect on a finished future

    def run_alone(self, main: Coroutine[object, object, T]) -> T:
        """Run `main` as `run` does: a server engine has no other ranks."""
        return self.run(main)

    @property
    def weights_label(self) -> str:
        """Label of the current weights."""
        return f"{self._name}.{self.weight_version}"

    @property
    def cache_salt(self) -> str:
        """Prefix-cache salt, which separates prefixes computed with different weights."""
        return self.weights_label

    @property
    def urls(self) -> list[str]:
        """URLs of all servers."""
        return [server.url for server in self._servers]

    def metrics(self) -> dict[str, float]:
        """Return the times of the last weight update in seconds.

        weight_sync/pause_s is the time for which requests were paused. weight_sync/transfer_s is
        the part of this time that was spent sending the weights; only the rank that sends the
        weights returns this metric.
        """
        return dict(self._metrics)

    @property
    def busy_s(self) -> float:
        """Seconds for which this process had requests in flight, averaged over the servers."""
        now = time.perf_counter()
        return statistics.fmean(server.busy_timer.busy_seconds(now) for server in self._servers)

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one response that continues `token_ids`, like ColocatedEngine.generate.

        Raises:
            InfraError: MAX_ATTEMPTS requests failed.
            InfraTimeout: No server was healthy for engine.outage_timeout_s.
            AccessDenied: A server rejects this run's token.
        """
        limit = self._settings.max_images
        require(len(images) <= limit, "engine.max_images", limit, f"a sequence contains {len(images)} images; raise this limit")
        placeholder_offsets(token_ids, images, image_token_id=self._special_tokens.image_token_id)
        num_remaining = self._settings.max_model_len - len(token_ids)
        request = GenerateRequest(list(token_ids), list(images), replace(sampling, max_tokens=min(sampling.max_tokens, num_remaining)))
        completion, failed_urls = Completion([], [], is_stopped=False, weight_versions=[]), []
        while len(completion.token_ids) < request.sampling.max_tokens:
            async with self._slots:
                server = await self._select_server(failed_urls)
                version, label = self.weight_version, self.weights_label
                reply = self._client.generate(server, request, completion, label=label, salt=self.cache_salt)
                try:
                    part = await self._await_reply(reply, server)
                except KeyRefused:
                    continue  # the next _select_server raises AccessDenied
                except EndpointError as fault:
                    self._health_monitor.last_failure = f"{server.url}: {fault}"
                    failed_urls.append(server.url)
                    if len(failed_urls) == MAX_ATTEMPTS:
                        raise InfraError(f"{server.url}: {fault}; failed after {MAX_ATTEMPTS} attempts") from fault
                    continue
            is_stopped = self._append_part(completion, part, sampling, version=version)
            if is_stopped or part.finish_reason != ABORTED:
                return replace(completion, is_stopped=is_stopped)
        return completion

    def _append_part(self, completion: Completion, part: PartialCompletion, sampling: SamplingSettings, *, version: int) -> bool:
        """Append the tokens of `part`; return True if a stop token or stop string ends the turn."""
        before = len(completion.token_ids) + part.num_from_first_request
        completion.token_ids.extend(part.token_ids)
        completion.logprobs.extend(part.logprobs)
        completion.weight_versions.extend([version] * len(part.token_ids))
        completion.routed_experts.extend(part.routed_experts)
        end = find_stop(completion.token_ids, before, sampling.stop, self._decode_tokens) if before and sampling.stop else None
        if end is not None:
            num_dropped = len(completion.token_ids) - end
            del completion.routed_experts[max(0, len(completion.routed_experts) - num_dropped) :]
            for column in (completion.token_ids, completion.logprobs, completion.weight_versions):
                del column[end:]
        return end is not None or part.finish_reason == "stop"

    async def _select_server(self, failed_urls: Sequence[str]) -> ServerBackend:
        """Return the episode's current server if it is healthy, else the least busy healthy server.

        The server that failed last is avoided if another server is available. Raises InfraTimeout
        and AccessDenied under the same conditions as `generate`.
        """
        task, backing_off_since = asyncio.current_task(), None
        assert task is not None, "episodes run as tasks"
        while True:
            await self._is_serving.wait()
            if denial := next((server.access_error for server in self._servers if server.access_error), ""):
                raise AccessDenied(denial)
            now = time.monotonic()
            candidates = [server for server in self._servers if server.is_healthy and server.endpoint.backoff_until <= now]
            candidates = [server for server in candidates if server.url not in failed_urls[-1:]] or candidates
            if self._server_by_task.get(task) in candidates:
                return self._server_by_task[task]
            if candidates:
                server = min(candidates, key=lambda each: (each.endpoint.in_flight, self._order[each.url]))
                self._server_by_task[task] = server
                return server
            backing_off_since = backing_off_since or now  # all healthy servers are backing off
            since = backing_off_since if self._health_monitor.unhealthy_since is None else self._health_monitor.unhealthy_since
            if now - since > self._settings.outage_timeout_s:
                waited = f"none of {', '.join(self.urls)} was healthy for {self._settings.outage_timeout_s:g} s (engine.outage_timeout_s)"
                raise InfraTimeout(f"{waited}; the last failure: {self._health_monitor.last_failure}")
            await asyncio.sleep(POLL_S)

    async def _await_reply(self, request: Coroutine[object, object, PartialCompletion], server: ServerBackend) -> PartialCompletion:
        """Await a server's reply to a request.

        Raises:
            EndpointError: The request failed, or the server was marked unhealthy before the reply
                arrived.
        """
        task, failure = asyncio.ensure_future(request), server.failure  # readmission replaces the future, maybe before this task resumes
        assert failure is not None, "a healthy server has one"
        server.busy_timer.start(time.perf_counter())
        self._num_in_flight += 1
        server.endpoint.in_flight += 1
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EndpointError(failure.result())
            return task.result()
        finally:
            task.cancel()
            server.endpoint.in_flight -= 1
            self._num_in_flight -= 1
            server.busy_timer.stop(time.perf_counter())

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send weights to all servers. All ranks must call this method together.

        Turns in progress are interrupted and continue with the new weights. If a server fails to
        receive all weights, the server is marked unhealthy, and no error is raised.
        """
        began = time.perf_counter()
        self.run(self._pause_requests())
        self._all_gather(None)
        outcome = None
        if self._control.sender is None:
            for _ in tensors:
                pass
        else:
            outcome = self._control.sender.send(tensors, f"{self._name}.{version}", urls=self._update_targets())
        ((updated, faults),) = [each for each in self._all_gather(outcome) if each is not None]
        self.weight_version = version
        self.run(self._resume_requests(updated, faults))
        self._metrics = {"weight_sync/pause_s": time.perf_counter() - began}
        if self._control.sender is not None:
            self._metrics["weight_sync/transfer_s"] = self._control.sender.transfer_s

    def _update_targets(self) -> list[str]:
        """Return the URLs of the servers that receive an update.

        Servers that do not respond are skipped, unless no server responds.
        """
        answering = [server.url for server in self._servers if server.is_healthy or server.is_responding]
        return answering or self.urls

    async def _pause_requests(self) -> None:
        """Stop new requests and abort requests in flight, which return the tokens sampled so far.

        A turn that was waiting for another turn to send an image may still send a request after the
        pause has begun. Requests are therefore aborted repeatedly until none is in flight.
        """
        self._is_serving.clear()
        began = time.monotonic()
        while self._num_in_flight:
            for server in [each for each in self._servers if each.is_healthy and each.endpoint.in_flight]:
                try:
                    await server.abort_requests(self._http, limit_s=self._settings.health_timeout_s)
                except EndpointError as fault:
                    self._health_monitor.mark_unhealthy(server, str(fault))
                if time.monotonic() - began > self._settings.health_timeout_s:
                    self._health_monitor.mark_unhealthy(
                        server, f"did not abort its requests within engine.health_timeout_s={self._settings.health_timeout_s}"
                    )
            await asyncio.sleep(ABORT_RETRY_S if time.monotonic() - began > ABORT_RETRY_S else 0.01)

    async def _resume_requests(self, updated: Sequence[str], faults: Mapping[str, str]) -> None:
        for server in self._servers:
            if server.url in updated:
                self._health_monitor.readmit(server)
            else:
                self._health_monitor.mark_unhealthy(server, faults.get(server.url, MISSED_UPDATE))
        self._is_serving.set()
        self._health_monitor.update_outage()

    async def _shut_down(self) -> None:
        await self._health_monitor.stop()
        await self._http.close()

    def sleep(self) -> None:
        """Do nothing: the servers have their own devices."""

    wake = sleep

    def close(self) -> None:
        """Stop the event loop and release the servers, which keep running for the next run."""
        self.run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._control.sender is not None:
            self._control.sender.release()
