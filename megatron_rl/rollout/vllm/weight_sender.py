"""The trainer's end of the way to the servers' weights: one process's, the others only take part in making the tensors.

A server is paused, given all buckets, and finished with the update's label; only then it goes on. One that fails on the way stays out, half
an update is never served. What was sent last is kept in main memory: who comes back is given all of it, at any time.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from threading import Lock, Thread
from urllib.parse import urlsplit

import torch

from megatron_rl.clients.endpoint_pool import EndpointError, describe_error
from megatron_rl.rollout.vllm.server_api import LOAD_TIMEOUT_S, VllmServer
from megatron_rl.rollout.vllm.weight_receiver import split_into_buckets
from megatron_rl.rollout.vllm.weight_transport import TRANSPORTS, Bucket, Rendezvous, Transport, UpdateDigest, open_store, pack_bucket

PAUSE_TIMEOUT_S = 30.0
"""What a server may take to end the step that it computes."""
ABORT_UPDATE = Bucket(names=["?"], dtypes=["float32"], shapes=[[1]], num_bytes=-1)
"""No update: a server that has one open from a trainer that is gone takes it for over."""


@dataclass(slots=True, kw_only=True)
class Connection:
    """A connection to one server. Every call raises EndpointError where the server fails."""

    server: VllmServer
    expected: Mapping[str, str]
    owner: str
    kind: str
    timeout_s: float
    transport: Transport | None = None
    lock: Lock = field(default_factory=Lock)
    """Held by whoever gives it weights."""

    def connect(self) -> None:
        """See that it is what this run wants, and meet its workers in a new group, where there is none."""
        if self.transport is not None:
            return
        try:
            self.server.check(self.expected)
        except ValueError as error:
            raise EndpointError(str(error)) from error
        size = 1 + self.server.num_workers()
        meeting = Rendezvous(address=local_address_towards(self.server.url), port=0, size=size, kind=self.kind, timeout_s=self.timeout_s)
        store = open_store(meeting, rank=0)
        meeting = replace(meeting, port=store.port)
        claim = asdict(meeting) | {"owner": self.owner}
        self.transport = self._on_both_ends(
            lambda: TRANSPORTS[self.kind](meeting, store, rank=0), "/init_weight_transfer_engine", {"init_info": claim}
        )

    def start_update(self) -> None:
        self.connect()
        self.server.call("/pause", {}, timeout_s=PAUSE_TIMEOUT_S, mode="abort", clear_cache="false")
        try:
            self.server.call("/start_weight_update", {}, timeout_s=LOAD_TIMEOUT_S)
        except EndpointError as fault:
            if "already" not in str(fault):
                raise
            self._abort_open_update()
            self.server.call("/start_weight_update", {}, timeout_s=LOAD_TIMEOUT_S)

    def _abort_open_update(self) -> None:
        try:
            self.server.call("/update_weights", {"update_info": asdict(ABORT_UPDATE)}, timeout_s=LOAD_TIMEOUT_S)
        except EndpointError:
            return

    def send_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._on_both_ends(lambda: self.transport.broadcast(flat), "/update_weights", {"update_info": asdict(bucket)})

    def finish_update(self, label: str) -> None:
        """Pictures that old weights have encoded go before it has the new label, by which it would be let in; prefixes are told apart by
        their salt."""
        self.server.call("/reset_encoder_cache", {}, timeout_s=LOAD_TIMEOUT_S)
        self.server.call("/finish_weight_update", {"weight_version": label}, timeout_s=LOAD_TIMEOUT_S)
        self.server.call("/resume", {}, timeout_s=LOAD_TIMEOUT_S)

    def _on_both_ends(self, fn: Callable[[], object], path: str, body: object) -> object:
        """What is done at this end while the server does it at the other; who fails does not leave the other one waiting."""
        own, theirs = run_in_daemon_thread(fn), run_in_daemon_thread(lambda: self.server.call(path, body, timeout_s=LOAD_TIMEOUT_S))
        done, late = wait((own, theirs), timeout=self.timeout_s, return_when=FIRST_EXCEPTION)
        try:
            for each in done:
                each.result()
        except (OSError, RuntimeError, ValueError) as error:
            raise EndpointError(f"{path}: {describe_error(error)}") from error
        if late:
            raise EndpointError(f"{path}: no end within parallel.timeout_s={self.timeout_s:g}")
        return own.result()

    def abort(self) -> None:
        """Its group is of no use any more."""
        wire, self.transport = self.transport, None
        if wire is not None:
            wire.close()

    def release(self) -> None:
        """Another run may have it."""
        self.abort()
        try:
            self.server.call("/shutdown_weight_transfer_engine", {})
        except EndpointError:
            return


def run_in_daemon_thread(act: Callable[[], object]) -> "Future[object]":
    """In a thread that nobody waits for when the process ends: it may hang on a server that has died."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except (OSError, RuntimeError, EndpointError, ValueError) as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class WeightSender:
    """To all servers. Its calls may come from any thread. Updates wait for each other, and not for a server that has come back and is being
    given the last one: it is left out, and given the next one when it has that."""

    def __init__(
        self, servers: Sequence[VllmServer], *, expected: Mapping[str, str], owner: str, kind: str, bucket_bytes: int, timeout_s: float
    ) -> None:
        """`expected` is what they must be (command.nature_of), `owner` says whose they are while this lives, `kind` is one of
        transfer.WIRES."""
        own = {"expected": expected, "owner": owner, "kind": kind, "timeout_s": timeout_s}
        self._connections = {server.url: Connection(server=server, **own) for server in servers}
        self._bucket_bytes = bucket_bytes
        self._lock = Lock()
        self._last_update: list[tuple[Bucket, torch.Tensor]] = []
        self._label = ""
        self.pause_s = self.transfer_s = 0.0
        """Of the last update: how long the servers stood, and how much of that their weights took."""

    def lock_servers(self) -> None:
        """ValueError: a server is another run's."""
        for url, line in self._connections.items():
            try:
                line.connect()
            except EndpointError as fault:
                raise ValueError(f"engine.urls={url}: cannot be had ({fault}); end the run that has it, or start another one") from fault

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], label: str, *, urls: Collection[str]) -> tuple[list[str], dict[str, str]]:
        """The update called `label` to these servers: those that hold it, and why the others do not. All tensors are read in any case."""
        with self._lock, ExitStack() as held_back:
            began = time.perf_counter()
            lines, faults = [], {}
            for line in (self._connections[url] for url in urls):
                if line.lock.acquire(blocking=False):
                    held_back.callback(line.lock.release)
                    lines.append(line)
                else:
                    faults[line.server.url] = "is still being given the weights before these"
            lines, more = self._for_each(lines, Connection.start_update)
            faults, sent = faults | more, time.perf_counter()
            is_first, self._label, self._last_update = not self._label, label, []
            digest, held = UpdateDigest(), None
            for bucket in split_into_buckets(tensors, self._bucket_bytes):
                digest.add(bucket)
                if held is not None:
                    lines, faults = self._send_buckets(lines, faults, held)
                held = pack_bucket(bucket)
            lines, faults = self._send_buckets(lines, faults, (replace(held[0], digest=digest.hexdigest()), held[1]))
            self.transfer_s = time.perf_counter() - sent
            if is_first and len(lines) > 1:
                lines, more = self._check_same_label(lines)
                faults |= more
            lines, more = self._for_each(lines, lambda line: line.finish_update(label))
            self.pause_s = time.perf_counter() - began
            return [line.server.url for line in lines], faults | more

    def _send_buckets(
        self, lines: list[Connection], faults: dict[str, str], each: tuple[Bucket, torch.Tensor]
    ) -> tuple[list[Connection], dict[str, str]]:
        self._last_update.append((each[0], each[1].cpu()))
        left, more = self._for_each(lines, lambda line: line.send_bucket(*each))
        return left, faults | more

    def _check_same_label(self, lines: list[Connection]) -> tuple[list[Connection], dict[str, str]]:
        """Those that hold, by vLLM's own word, what the first of them holds, and what is to be said of the others."""
        sums: dict[str, dict[str, str]] = {}

        def ask(line: Connection) -> None:
            sums[line.server.url] = line.server.checksums()

        def compare(line: Connection) -> None:
            require_matching(sums[line.server.url], sums[first.server.url], reference_url=first.server.url)

        lines, faults = self._for_each(lines, ask)
        if not lines:
            return lines, faults
        first = lines[0]
        lines, more = self._for_each(lines, compare)
        return lines, faults | more

    def _for_each(self, lines: list[Connection], act: Callable[[Connection], None]) -> tuple[list[Connection], dict[str, str]]:
        """Side by side; those for which it went well, and what is to be said of the others."""

        def done(line: Connection) -> str:
            try:
                act(line)
            except EndpointError as fault:
                line.abort()
                return str(fault)
            return ""

        if not lines:
            return [], {}
        with ThreadPoolExecutor(max_workers=len(lines)) as threads:
            said = dict(zip([line.server.url for line in lines], threads.map(done, lines), strict=True))
        return [line for line in lines if not said[line.server.url]], {url: fault for url, fault in said.items() if fault}

    def add_server(self, url: str) -> None:
        """Give one that has come back what was sent last, in a new group. EndpointError: it would not take it, or nothing was sent yet."""
        line = self._connections[url]
        with ExitStack() as held_back:
            with self._lock:
                if not self._last_update:
                    raise EndpointError("no weights were sent yet")
                kept, label = list(self._last_update), self._label
                held_back.enter_context(line.lock)
            line.abort()
            try:
                line.start_update()
                for bucket, flat in kept:
                    line.send_bucket(bucket, flat)
                line.finish_update(label)
            except EndpointError:
                line.abort()
                raise

    def release(self) -> None:
        for line in self._connections.values():
            line.release()


def require_matching(mine: Mapping[str, str], theirs: Mapping[str, str], *, reference_url: str) -> None:
    """EndpointError: checksums differ. Servers that span other numbers of processes (engine.tp) cut their weights otherwise, as the names
    of the parts say (dp0:pp0:pcp0:tp0:...): these are not compared."""
    if mine.keys() != theirs.keys():
        return
    if names := sorted(name for name in mine if mine[name] != theirs[name]):
        raise EndpointError(f"holds other weights than {reference_url}: {len(names)} differ, {names[0]} first (/weight_checker)")


def local_address_towards(url: str) -> str:
    """This node's address on the way to a server: what the server finds it by. Nothing is sent."""
    place = urlsplit(url)
    try:
        family, kind, _, _, way = socket.getaddrinfo(place.hostname, place.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(way)
            return probe.getsockname()[0]
    except OSError as error:
        raise EndpointError(describe_error(error)) from error
