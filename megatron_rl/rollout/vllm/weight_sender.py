"""Sends weights from the trainer to the inference servers.

All ranks take part in gathering the weights, and one process sends them. Each server is paused,
receives all buckets, and resumes only after the update is finished and labeled. If a server fails
during an update, it stays unhealthy, so it never generates with partially updated weights. The last
update is kept in host memory, so that a server that rejoins can receive the whole update at any
time.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from threading import Lock, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from megatron_rl.clients.endpoint_pool import EndpointError, describe_error
from megatron_rl.rollout.vllm.server_api import LOAD_TIMEOUT_S, VllmServer
from megatron_rl.rollout.vllm.weight_receiver import split_into_buckets
from megatron_rl.rollout.vllm.weight_transport import TRANSPORTS, Bucket, Rendezvous, Transport, UpdateDigest, open_store, pack_bucket

T = TypeVar("T")
PAUSE_TIMEOUT_S = 30.0
"""Timeout in seconds for pausing a server, which first completes its current step."""
ABORT_UPDATE = Bucket(names=["?"], dtypes=["float32"], shapes=[[1]], num_bytes=-1)
"""Deliberately invalid bucket. A server that receives this bucket ends an update that a dead
trainer has left open.
"""


@dataclass(slots=True, kw_only=True)
class Connection:
    """Connection to one server. Methods raise EndpointError if the server fails."""

    server: VllmServer
    expected: Mapping[str, str]
    owner: str
    kind: str
    device: torch.device
    timeout_s: float
    transport: Transport | None = None
    lock: Lock = field(default_factory=Lock)
    """Lock that is held while weights are sent to the server."""

    def connect(self) -> None:
        """Unless already connected, check the server and create a process group with its workers.

        The server must have the fingerprint that this run requires.
        """
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
            lambda: TRANSPORTS[self.kind](meeting, store, rank=0, device=self.device), "/init_weight_transfer_engine", {"init_info": claim}
        )

    def start_update(self) -> None:
        """Pause the server and start an update; an unfinished update is aborted first."""
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
        """Broadcast a bucket to the server's workers."""
        transport = self.transport
        assert transport is not None, "start_update connects"
        self._on_both_ends(lambda: transport.broadcast(flat), "/update_weights", {"update_info": asdict(bucket)})

    def finish_update(self, label: str) -> None:
        """Finish the update, set the weight label, and resume the server.

        The image embeddings of the old weights are cleared before the new label is set, because a
        server with the new label is considered healthy. Cached prefixes are not cleared, because
        the cache salt separates the prefixes of different weights.
        """
        self.server.call("/reset_encoder_cache", {}, timeout_s=LOAD_TIMEOUT_S)
        self.server.call("/finish_weight_update", {"weight_version": label}, timeout_s=LOAD_TIMEOUT_S)
        self.server.call("/resume", {}, timeout_s=LOAD_TIMEOUT_S)

    def _on_both_ends(self, fn: Callable[[], T], path: str, body: object) -> T:
        """Run `fn` while the server processes the HTTP call; return the result of `fn`.

        If one of the two fails, this method does not wait for the other.
        """
        own, theirs = run_in_daemon_thread(fn), run_in_daemon_thread(lambda: self.server.call(path, body, timeout_s=LOAD_TIMEOUT_S))
        both: list[Future[Any]] = [own, theirs]
        done, late = wait(both, timeout=self.timeout_s, return_when=FIRST_EXCEPTION)
        try:
            for each in done:
                each.result()
        except (OSError, RuntimeError, ValueError) as error:
            raise EndpointError(f"{path}: {describe_error(error)}") from error
        if late:
            raise EndpointError(f"{path}: not finished within parallel.timeout_s={self.timeout_s:g}")
        return own.result()

    def abort(self) -> None:
        """Close the process group; the next `connect` creates a new group."""
        wire, self.transport = self.transport, None
        if wire is not None:
            wire.close()

    def release(self) -> None:
        """Release the server for other runs."""
        self.abort()
        try:
            self.server.call("/shutdown_weight_transfer_engine", {})
        except EndpointError:
            return


def run_in_daemon_thread(act: Callable[[], T]) -> "Future[T]":
    """Run `act` in a daemon thread and return its future.

    A daemon thread does not delay the exit of the process, even if the thread waits for a server
    that does not respond.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except (OSError, RuntimeError, EndpointError, ValueError) as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


class WeightSender:
    """Sends weight updates to all servers. Methods may be called from any thread.

    Only one update is sent at a time. If a server that has rejoined is still receiving the previous
    update, the new update does not wait for it. The server receives the new update later.
    """

    def __init__(
        self, servers: Sequence[VllmServer], *,
        expected: Mapping[str, str], owner: str, kind: str, device: torch.device, bucket_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        """Create the connections without opening them.

        Args:
            servers: Servers that receive the weights.
            expected: Fingerprint that the servers must have (server_command.expected_fingerprint).
            owner: Name of the trainer process. The servers belong to this process while it is
                alive.
            kind: Kind of transport, a key of weight_transport.TRANSPORTS.
            device: Device of this process, on which the weights are.
            bucket_bytes: Size of the buckets in bytes.
            timeout_s: Timeout in seconds of the process groups and of each of their operations
                (parallel.timeout_s).
        """
        own = {"expected": expected, "owner": owner, "kind": kind, "device": device, "timeout_s": timeout_s}
        self._connections = {server.url: Connection(server=server, **own) for server in servers}
        self._bucket_bytes = bucket_bytes
        self._lock = Lock()
        self._last_update: list[tuple[Bucket, torch.Tensor]] = []
        self._label = ""
        self.transfer_s = 0.0
        """Number of seconds that the last update spent on sending weights."""

    def lock_servers(self) -> None:
        """Connect to all servers, so that no other run can use them.

        Raises:
            ValueError: A server belongs to another run, or cannot be used.
        """
        for url, line in self._connections.items():
            try:
                line.connect()
            except EndpointError as fault:
                raise ValueError(
                    f"engine.urls={url}: cannot be used ({fault}); stop the run that uses this server, or start another server"
                ) from fault

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], label: str, *, urls: Collection[str]) -> tuple[list[str], dict[str, str]]:
        """Send an update, with the weight label `label`, to the servers at `urls`.

        All tensors are consumed, even if no server receives them. Returns the URLs of the servers
        that received the update, and the failure reasons of the other servers, keyed by URL.
        """
        with self._lock, ExitStack() as held_back:
            lines, faults = [], {}
            for line in (self._connections[url] for url in urls):
                if line.lock.acquire(blocking=False):
                    held_back.callback(line.lock.release)
                    lines.append(line)
                else:
                    faults[line.server.url] = "is still receiving the previous weights"
            lines, more = self._for_each(lines, Connection.start_update)
            faults, sent = faults | more, time.perf_counter()
            is_first, self._label, self._last_update = not self._label, label, []
            # Hold one bucket back, because the last bucket is sent with the digest of the update.
            digest, held = UpdateDigest(), None
            for bucket in split_into_buckets(tensors, self._bucket_bytes):
                digest.add(bucket)
                if held is not None:
                    lines, faults = self._send_buckets(lines, faults, held)
                held = pack_bucket(bucket)
            assert held is not None, "an update has tensors"
            lines, faults = self._send_buckets(lines, faults, (replace(held[0], digest=digest.hexdigest()), held[1]))
            self.transfer_s = time.perf_counter() - sent
            if is_first and len(lines) > 1:
                lines, more = self._check_same_checksums(lines)
                faults |= more
            lines, more = self._for_each(lines, lambda line: line.finish_update(label))
            return [line.server.url for line in lines], faults | more

    def _send_buckets(
        self, lines: list[Connection], faults: dict[str, str], each: tuple[Bucket, torch.Tensor]
    ) -> tuple[list[Connection], dict[str, str]]:
        self._last_update.append((each[0], each[1].cpu()))
        left, more = self._for_each(lines, lambda line: line.send_bucket(*each))
        return left, faults | more

    def _check_same_checksums(self, lines: list[Connection]) -> tuple[list[Connection], dict[str, str]]:
        """Return the connections to servers with the same weight checksums as the first server.

        The second result contains the failure reasons of the other servers, keyed by URL.
        """
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
        """Run `act` on all connections in parallel.

        Returns the connections for which `act` succeeded, and the failure reasons of the other
        servers, keyed by URL. Failed connections are aborted.
        """

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
        """Send the last update to a server that rejoins, in a new process group.

        Raises:
            EndpointError: The server fails to receive the update, or no update has been sent yet.
        """
        line = self._connections[url]
        with ExitStack() as held_back:
            with self._lock:
                if not self._last_update:
                    raise EndpointError("no weights have been sent yet")
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
        """Release all servers for other runs."""
        for line in self._connections.values():
            line.release()


def require_matching(mine: Mapping[str, str], theirs: Mapping[str, str], *, reference_url: str) -> None:
    """Raise EndpointError if the checksums of two servers differ.

    Servers with different tensor-parallel sizes (engine.tp) are not compared. They shard their
    weights differently, and their checksums have different names (dp0:pp0:pcp0:tp0:...).
    """
    if mine.keys() != theirs.keys():
        return
    if names := sorted(name for name in mine if mine[name] != theirs[name]):
        raise EndpointError(
            f"has different weights from {reference_url}: {len(names)} tensor(s) differ, starting with {names[0]} (/weight_checker)"
        )


def local_address_towards(url: str) -> str:
    """Return the local address at which the server at `url` can reach this node.

    The address is the source address of the route to the server. No packet is sent.
    """
    place = urlsplit(url)
    try:
        family, kind, _, _, way = socket.getaddrinfo(place.hostname, place.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(way)
            return probe.getsockname()[0]
    except OSError as error:
        raise EndpointError(describe_error(error)) from error
