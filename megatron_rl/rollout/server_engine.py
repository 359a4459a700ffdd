"""Engines in other processes, on this node or others: servers of vLLM behind the same `await generate(...)` as the engine in this process.

An episode stays with its server, whose caches know it; a new one goes to the least busy. What a server does not end, because its weights
change or it falls, is asked for again with the tokens that are there, of this server or another: noise depends on seed and place alone, so
nothing else changes. Weights are told apart by a label, the run's name and their version, which each server says with all that it samples.

The event loop has a thread of its own, so that episodes go on while the trainer computes.
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
from megatron_rl.rollout.health import UNREACHABLE, HealthMonitor, ServerSupervisor
from megatron_rl.rollout.vllm.client import ABORTED, GenerateClient, GenerateRequest, PartialCompletion, find_stop
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.rollout.vllm.weight_sender import WeightSender
from megatron_rl.types import Image
from sandbox.bounded_http import BoundedClient

T = TypeVar("T")
TRIES = 5
"""Of one turn, before its episode fails."""
LOOK_S, AGAIN_S = 0.1, 0.3
"""Between two looks for a server that is well; two requests to give up what one still has."""
RETENTION_S = 2.0
"""Idle connections; uvicorn closes its own after 5."""


class ServerEngine:
    """All servers, as one rank's episodes see them. Every rank has one; `sender` is that of the rank that gives them their weights."""

    def __init__(
        self, servers: Sequence[VllmServer], settings: EngineSettings, *,
        name: str, image_token_id: int, stop_ids: list[int], decode: Callable[[list[int]], str],
        meet: Callable[[object], list], sender: WeightSender | None, household: ServerSupervisor | None = None, place: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """`name` is the run's alone, and begins the label of its weights. `meet` brings what every rank says to all. `household`, beside
        `sender`: those of servers that the run starts itself. `place`: the server that is asked first where several are as busy."""
        self._servers, self._settings, self._name = list(servers), settings, name
        self._image_token_id, self._stop_ids, self._decode = image_token_id, stop_ids, decode
        self._meet, self._sender, self._household, self._tell = meet, sender, household, tell
        self._order = {server.url: (number - place) % len(servers) for number, server in enumerate(servers)}
        self.weight_version = 0
        self._figures: dict[str, float] = {}
        self._homes: WeakKeyDictionary[asyncio.Task, VllmServer] = WeakKeyDictionary()
        self._num_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self.run(self._set_up())

    async def _set_up(self) -> None:
        probe_s = self._settings.health_timeout_s
        self._http = BoundedClient(token=self._servers[0].token, keepalive_s=RETENTION_S)  # one token is that of all
        asking = partial(GenerateClient, http=self._http, image_token_id=self._image_token_id, stop_ids=self._stop_ids, connect_s=probe_s)
        self._asking = asking(limit_s=self._settings.request_timeout_s)
        self._slots = asyncio.Semaphore(self._settings.max_num_seqs * len(self._servers))
        self._is_open = asyncio.Event()
        self._lookout = HealthMonitor(
            self._servers, http=self._http, asking=asking(limit_s=probe_s), probe_s=probe_s, salt=lambda: self.salt,
            wanted=lambda: self.label if self._is_open.is_set() else "", sender=self._sender, household=self._household, tell=self._tell,
            patience_s=self._settings.outage_timeout_s,
        )  # fmt: skip
        self._lookout.start()

    def run(self, main: Coroutine[object, object, T]) -> T:
        """Run `main` to its end, in the loop's thread. What it leaves behind goes on meanwhile, and while nothing is run."""
        future = asyncio.run_coroutine_threadsafe(main, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where this thread was interrupted; one that is done stays as it is

    run_alone = run

    @property
    def label(self) -> str:
        """What the weights that are served now are called by the servers."""
        return f"{self._name}.{self.weight_version}"

    @property
    def salt(self) -> str:
        """Of the prefixes that a server has cached: none serves other weights than computed it."""
        return self.label

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def metrics(self) -> dict[str, float]:
        """Of the last update of the weights: how long nobody could ask, and how much of that the weights took to come."""
        return dict(self._figures)

    @property
    def busy_s(self) -> float:
        """In which turns of this process were under way; of several servers the mean."""
        now = time.perf_counter()
        return statistics.fmean(server.work.seconds(now) for server in self._servers)

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        """Sample one turn after `token_ids`, whose image placeholders are expanded, as LocalEngine.generate does.

        Raises InfraError after TRIES servers in trouble, InfraTimeout where none was well for engine.outage_timeout_s, AccessDenied where
        one asks for a key.
        """
        limit = self._settings.max_images
        require(len(images) <= limit, "engine.max_images", limit, f"a context holds {len(images)} images; raise it")
        placeholder_offsets(token_ids, images, image_token_id=self._image_token_id)
        room = self._settings.max_model_len - len(token_ids)
        turn = GenerateRequest(list(token_ids), list(images), replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        said, faults = Completion([], [], finish_reason=False, versions=[]), []
        while len(said.token_ids) < turn.sampling.max_tokens:
            async with self._slots:
                server = await self._server(faults)
                version, label = self.weight_version, self.label
                asked = self._asking.generate(server, turn, said, label=label, salt=self.salt)
                try:
                    part = await self._in_time(asked, server)
                except KeyRefused:
                    continue  # the next look for a server names it
                except EndpointError as fault:
                    self._lookout.last_failure = f"{server.url}: {fault}"
                    faults.append(server.url)
                    if len(faults) == TRIES:
                        raise InfraError(f"{server.url}: {fault}; {TRIES} tries") from fault
                    continue
            is_stopped = self._adds(said, part, sampling, version=version)
            if is_stopped or part.reason != ABORTED:
                return replace(said, finish_reason=is_stopped)
        return said

    def _adds(self, said: Completion, part: PartialCompletion, sampling: SamplingSettings, *, version: int) -> bool:
        """Take what a server sampled; whether a stop id or text ends it."""
        before = len(said.token_ids) + part.first
        said.token_ids.extend(part.token_ids)
        said.logprobs.extend(part.logprobs)
        said.versions.extend([version] * len(part.token_ids))
        end = find_stop(said.token_ids, before, sampling.stop, self._decode) if before and sampling.stop else None
        if end is not None:
            for column in (said.token_ids, said.logprobs, said.versions):
                del column[end:]
        return end is not None or part.reason == "stop"

    async def _server(self, faults: Sequence[str]) -> VllmServer:
        """The episode's own, if it is in; else the least busy one, if possible none that has just failed. InfraTimeout, AccessDenied: see
        generate."""
        task, resting_since = asyncio.current_task(), None
        while True:
            await self._is_open.wait()
            if denial := next((server.denial for server in self._servers if server.denial), ""):
                raise AccessDenied(denial)
            now = time.monotonic()
            able = [server for server in self._servers if server.is_in and server.endpoint.rest_until <= now]
            able = [server for server in able if server.url not in faults[-1:]] or able
            if self._homes.get(task) in able:
                return self._homes[task]
            if able:
                server = min(able, key=lambda each: (each.endpoint.in_flight, self._order[each.url]))
                self._homes[task] = server
                return server
            resting_since = resting_since or now  # those that are in
            since = resting_since if self._lookout.dark_since is None else self._lookout.dark_since
            if now - since > self._settings.outage_timeout_s:
                waited = f"none of {', '.join(self.urls)} was well for {self._settings.outage_timeout_s:g} s (engine.outage_timeout_s)"
                raise InfraTimeout(f"{waited}; the last failure: {self._lookout.last_failure}")
            await asyncio.sleep(LOOK_S)

    async def _in_time(self, asked: Coroutine[object, object, PartialCompletion], server: VllmServer) -> PartialCompletion:
        """Await a request to a server. EndpointError as soon as the server is marked unhealthy."""
        task, fall = asyncio.ensure_future(asked), server.fall  # it may be back, with another one, before this task goes on
        server.work.begin(time.perf_counter())
        self._num_open += 1
        server.endpoint.in_flight += 1
        try:
            await asyncio.wait({task, fall}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EndpointError(fall.result())
            return task.result()
        finally:
            task.cancel()
            server.endpoint.in_flight -= 1
            self._num_open -= 1
            server.work.end(time.perf_counter())

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Give all servers these weights. Turns that are under way stop where they are, and go on with them. All ranks together.

        A server that does not take them, proven, is out; RuntimeError never.
        """
        began = time.perf_counter()
        self.run(self._hold())
        self._meet(None)
        outcome = None
        if self._sender is None:
            for _ in tensors:
                pass
        else:
            outcome = self._sender.send(tensors, f"{self._name}.{version}", to=self._reached())
        ((held, faults),) = [each for each in self._meet(outcome) if each is not None]
        self.weight_version = version
        self.run(self._go_on(held, faults))
        self._figures = {"weight_sync/pause_s": time.perf_counter() - began}
        if self._sender is not None:
            self._figures["weight_sync/transfer_s"] = self._sender.transfer_s

    def _reached(self) -> list[str]:
        """Those that are given an update: who does not answer is not waited for. All of them where none does, or none was looked at."""
        answering = [server.url for server in self._servers if server.is_in or server.answers]
        return answering or self.urls

    async def _hold(self) -> None:
        """Nobody asks any more, and all that was asked has come back, with the tokens that are there. Turns that waited for
        a picture may ask after this began: they are given up in the next round."""
        self._is_open.clear()
        began = time.monotonic()
        while self._num_open:
            for server in [each for each in self._servers if each.is_in and each.endpoint.in_flight]:
                try:
                    await server.call_in_loop(self._http, "/abort_requests", {}, limit_s=self._settings.health_timeout_s)
                except EndpointError as fault:
                    self._lookout.mark_unhealthy(server, str(fault))
                if time.monotonic() - began > self._settings.health_timeout_s:
                    self._lookout.mark_unhealthy(
                        server, f"does not give up what it has within engine.health_timeout_s={self._settings.health_timeout_s}"
                    )
            await asyncio.sleep(AGAIN_S if time.monotonic() - began > AGAIN_S else 0.01)

    async def _go_on(self, held: Sequence[str], faults: Mapping[str, str]) -> None:
        for server in self._servers:
            if server.url in held:
                self._lookout.readmit(server)
            else:
                self._lookout.mark_unhealthy(server, faults.get(server.url, UNREACHABLE))
        self._is_open.set()
        self._lookout.record_failure()

    async def _end(self) -> None:
        await self._lookout.end()
        await self._http.close()

    def sleep(self) -> None:
        """It has devices of its own."""

    wake = sleep

    def close(self) -> None:
        """Leave the servers to whoever comes next."""
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._sender is not None:
            self._sender.release()
