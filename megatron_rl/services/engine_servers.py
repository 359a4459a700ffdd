"""Starts and restarts a run's own engine servers (engine.num_local_servers) on rank 0's node.

The servers are vLLM servers on GPUs or CPU cores that no rank uses; if there are too few cores,
servers and ranks share the cores. Rank 0 starts the servers before the run builds anything else,
and waits until the servers respond. A server that exits or hangs later is restarted with increasing
backoffs, until it has failed too many times in a row. rollout/health.py decides which servers
receive weights and requests. The output of server N is in RUN/services/engine_N.log. A supervisor
process (supervisor.py) terminates each server when the run ends, even after a crash.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch

from megatron_rl.config import EngineSettings, Settings, require
from megatron_rl.distributed.world import World, run_on_rank_zero
from megatron_rl.rollout.vllm.server_api import is_on_gpu, server_command_line
from megatron_rl.rollout.vllm.server_command import server_environment
from megatron_rl.services.address import SERVICES_FOLDER, has_proven_token, token_file
from megatron_rl.services.service_launcher import POLL_S, REPORT_INTERVAL_S, check_service, enabled_services, rank_zero_host
from megatron_rl.services.supervised_process import SupervisedProcess, find_free_port, make_environment
from megatron_rl_sandbox.token import write_token

ENGINES_TOKEN_NAME = "engines"
"""Name of the servers' token file (RUN/services/engines.token) without the suffix."""
MAX_RESTARTS = 5
"""Maximum number of consecutive restarts of a server; after one more failure, the server stays
down.
"""
STABLE_S = 60.0
"""Number of seconds that a started server must stay healthy before its earlier failures are
forgotten.
"""
MIN_BACKOFF_S, MAX_BACKOFF_S = 2.0, 60.0
"""Minimum and maximum backoff in seconds before a restart. After a first failure, the restart is
immediate. The backoff after a second consecutive failure is the minimum backoff, and it doubles
with each further failure up to the maximum.
"""

SHARED_CORES_TEXT = "cores shared with the ranks"


@dataclass(slots=True, kw_only=True)
class EngineServer:
    """One engine server with its current process."""

    name: str
    url: str
    command: Sequence[str]
    environment: dict[str, str]
    token: str
    log: Path
    process: SupervisedProcess | None = None
    """Process of the server; None before the first start and after a failure."""
    started_at: float = 0.0
    """Time of the last start, as a value of time.monotonic()."""
    is_ready: bool = False
    """True if the server has responded since its last start."""
    healthy_since: float | None = None
    """Time of the first healthy report since the last start, as a value of time.monotonic().

    None if no healthy report has been received since the last start.
    """
    consecutive_exits: int = 0
    """Number of consecutive failures (exits and hangs)."""
    restart_after: float = 0.0
    """Earliest time of the next restart, as a value of time.monotonic()."""
    lock: Lock = field(default_factory=Lock)

    def start(self) -> None:
        """Start the process with a new random seed.

        The seed makes vLLM's own sampling noise differ between servers and between starts.
        """
        self.started_at, self.is_ready, self.healthy_since = time.monotonic(), False, None
        command = [*self.command, "--seed", str(secrets.randbelow(2**31))]
        self.process = SupervisedProcess(command, log=self.log, environment=self.environment)

    def probe_ready(self) -> bool:
        """Return True if the server accepts requests.

        The server must prove that it knows the token, because another server may have taken the
        port.
        """
        return has_proven_token(self.url, token=self.token)


class EngineServers:
    """All engine servers of a run; only rank 0 has an instance."""

    def __init__(self, settings: Settings, *, host: str, num_ranks: int, cores: Sequence[Sequence[int]]) -> None:
        """Prepare the servers without starting them.

        Args:
            settings: Settings of the run.
            host: Host at which the servers listen.
            num_ranks: Number of ranks on this node; they use the node's first devices.
            cores: CPU cores for each server; empty if there are too few cores, or if the servers
                use GPUs.
        """
        self._startup_timeout_s, self._is_stopped, self._reported_at = settings.engine.startup_timeout_s, False, time.monotonic()
        self._engines: dict[str, EngineServer] = {}
        words, on_gpu = server_command_line(settings), is_on_gpu(settings.engine)
        self._token_file = token_file(Path(settings.run.dir), ENGINES_TOKEN_NAME)
        token, more = write_token(self._token_file), server_environment(settings.engine, token_file=self._token_file)
        for number, place in enumerate(settings.engine.places(num_ranks=num_ranks)):
            own = make_environment(os.environ, place if on_gpu else []) | more
            binding: list[str] = []
            if cores:
                binding = ["taskset", "--cpu-list", ",".join(map(str, cores[number]))]
                own["OMP_NUM_THREADS"] = str(len(cores[number]) // settings.engine.tp)
            port = find_free_port(host)
            self._engines[f"http://{host}:{port}"] = EngineServer(
                name=f"engine {number}", url=f"http://{host}:{port}", command=[*binding, *words, "--host", host, "--port", str(port)],
                environment=own, token=token, log=Path(settings.run.dir) / SERVICES_FOLDER / f"engine_{number}.log",
            )  # fmt: skip

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return list(self._engines)

    def start(self) -> None:
        """Start all servers."""
        for engine in self._engines.values():
            engine.start()

    def are_ready(self) -> bool:
        """Return True if all servers have responded.

        Raises:
            ValueError: A server has exited, or has not responded within engine.startup_timeout_s.
        """
        for engine in self._engines.values():
            if engine.is_ready:
                continue
            assert engine.process is not None, "not started"
            code, passed = engine.process.exit_code(), time.monotonic() - engine.started_at
            if code is not None:
                told = f"{engine.name} exited with code {code}; {engine.process.log_tail()}"
                raise ValueError(f"engine.num_local_servers={len(self._engines)}: {told}")
            engine.is_ready = engine.probe_ready()
            if engine.is_ready:
                print(f"{engine.name}: ready at {engine.url} after {passed:.0f} s", flush=True)
            elif passed > self._startup_timeout_s:
                raise ValueError(
                    f"engine.startup_timeout_s={self._startup_timeout_s}: {engine.name} does not respond; {engine.process.log_tail()}"
                )
        late = [engine for engine in self._engines.values() if not engine.is_ready]
        if late and time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            assert late[0].process is not None
            self._reported_at = time.monotonic()
            told = f"after {self._reported_at - late[0].started_at:.0f} s; {late[0].process.log_tail()}"
            print(f"{', '.join(engine.name for engine in late)}: no response yet, {told}", flush=True)
        return not late

    def report_alive(self, url: str) -> None:
        """Record that the server has responded."""
        self._engines[url].is_ready = True

    def report_healthy(self, url: str) -> None:
        """Record that the server is healthy.

        The number of consecutive failures is reset once the server has been healthy for STABLE_S
        seconds.
        """
        engine, now = self._engines[url], time.monotonic()
        engine.healthy_since = engine.healthy_since or now
        if now - engine.healthy_since >= STABLE_S:
            engine.consecutive_exits = 0

    def restart(self, url: str, *, is_unresponsive: bool) -> None:
        """Restart a server that does not respond; implements health.ServerSupervisor."""
        engine, now = self._engines[url], time.monotonic()
        with engine.lock:
            if self._is_stopped:
                return
            if engine.process is not None:
                self._stop_if_failed(engine, now, is_unresponsive=is_unresponsive)
            if engine.process is None and engine.consecutive_exits <= MAX_RESTARTS and now >= engine.restart_after:
                engine.start()

    def _stop_if_failed(self, engine: EngineServer, now: float, *, is_unresponsive: bool) -> None:
        """Kill all processes of a server that has exited or hangs, and set its backoff."""
        assert engine.process is not None
        code = engine.process.exit_code()
        if code is not None:
            why = f"exited with code {code}"
        elif engine.is_ready and is_unresponsive:
            why = "is running but does not respond"
        elif not engine.is_ready and now - engine.started_at > self._startup_timeout_s:
            why = f"did not respond within engine.startup_timeout_s={self._startup_timeout_s}"
        else:
            return
        words = engine.process.log_tail()
        engine.process.kill()
        engine.process, engine.consecutive_exits = None, engine.consecutive_exits + 1
        rest = min(MIN_BACKOFF_S * 2 ** (engine.consecutive_exits - 2), MAX_BACKOFF_S) if engine.consecutive_exits > 1 else 0.0
        engine.restart_after = now + rest
        then = (
            f"restarting in {rest:.0f} s"
            if engine.consecutive_exits <= MAX_RESTARTS
            else f"not restarted after {engine.consecutive_exits} consecutive failures"
        )
        print(f"{engine.name} ({engine.url}): {why}; {then}; {words}", flush=True)

    def stop(self) -> None:
        """Stop all servers and delete their token."""

        def ended(engine: EngineServer) -> None:
            with engine.lock:
                if engine.process is not None:
                    engine.process.stop()

        self._is_stopped = True
        with ThreadPoolExecutor(max_workers=len(self._engines)) as threads:
            list(threads.map(ended, self._engines.values()))
        self._token_file.unlink(missing_ok=True)


def split_cores(cores: Sequence[int], settings: EngineSettings, *, num_ranks: int) -> tuple[list[int], list[list[int]]]:
    """Return the CPU cores for the ranks and the CPU cores for each server.

    Both lists are empty if there are fewer cores than ranks and engine workers in total. Example: 2
    cores, 1 rank and 1 server -> [0], [[1]].
    """
    size = len(cores) // (num_ranks + settings.num_local_servers * settings.tp)
    if size == 0:
        return [], []
    each = size * settings.tp
    first = len(cores) - settings.num_local_servers * each
    return list(cores[:first]), [list(cores[place : place + each]) for place in range(first, len(cores), each)]


def describe_placement(settings: EngineSettings, *, num_ranks: int) -> str:
    """Describe the devices that the servers would use on this node."""
    if is_on_gpu(settings):
        return ", ".join(f"GPU {'-'.join(map(str, place))}" for place in settings.places(num_ranks=num_ranks))
    _, own = split_cores(sorted(os.sched_getaffinity(0)), settings, num_ranks=num_ranks)
    return ", ".join(f"core {'-'.join(map(str, cores))}" for cores in own) or SHARED_CORES_TEXT


def check_started(settings: Settings, *, num_ranks: int) -> None:
    """Check that this node has devices for the engines and services that the run starts.

    Raises:
        ValueError: The node has too few devices for the ranks and engines, or `check_service`
            rejects a service.
    """
    num_gpus = torch.cuda.device_count()
    check_engines(settings.engine, num_ranks=num_ranks, num_gpus=num_gpus)
    for name, service in enabled_services(settings.services).items():
        check_service(name, service, num_used_gpus=num_used_gpus(settings.engine, num_ranks=num_ranks), num_gpus=num_gpus)


def num_used_gpus(settings: EngineSettings, *, num_ranks: int) -> int:
    """Return the number of GPUs that ranks and engines use on rank 0's node.

    The ranks and engines use the node's first GPUs.
    """
    return num_ranks + settings.num_local_servers * settings.tp


def check_engines(settings: EngineSettings, *, num_ranks: int, num_gpus: int) -> None:
    """Raise ValueError if this node has fewer GPUs than its ranks and the engine servers need."""
    most, host = max(0, num_gpus - num_ranks) // settings.tp, socket.gethostname()
    needed = num_used_gpus(settings, num_ranks=num_ranks)
    remedy = (
        f"{needed - num_ranks} GPUs are needed in addition to {num_ranks} for the ranks, but {host} has {num_gpus} in total; start {most}"
        if most else f"{host} has {num_gpus} GPUs, and its {num_ranks} ranks use them all; start fewer ranks, or use engine.mode=colocated"
    )  # fmt: skip
    require(
        not settings.num_local_servers or not is_on_gpu(settings) or needed <= num_gpus,
        "engine.num_local_servers",
        settings.num_local_servers,
        remedy,
    )


@contextmanager
def run_engine_servers(
    settings: Settings, world: World, *, raise_if_stopped: Callable[[], None]
) -> Iterator[tuple[list[str], EngineServers | None]]:
    """Start the engine servers, yield their addresses, and stop the servers on exit.

    All ranks must enter the block together. Yields (addresses, servers), where `servers` is None on
    ranks other than rank 0. On CPUs, the ranks of rank 0's node are bound to separate cores inside
    the block, if there are enough cores.

    Args:
        settings: Settings of the run.
        world: Ranks of the run.
        raise_if_stopped: Called while waiting for the servers; may raise an exception to end the
            wait.
    """
    own: list[EngineServers] = []
    with ExitStack() as running:

        def begin() -> list[int]:
            cores = [] if is_on_gpu(settings.engine) else sorted(os.sched_getaffinity(0))
            for_ranks, for_servers = split_cores(cores, settings.engine, num_ranks=world.local_size)
            try:
                own.append(EngineServers(settings, host=rank_zero_host(world), num_ranks=world.local_size, cores=for_servers))
            except OSError as error:
                raise ValueError(f"MASTER_ADDR={rank_zero_host(world)}: {error}; set it to an address of {socket.gethostname()}") from error
            running.callback(own[0].stop)
            own[0].start()
            return for_ranks

        cores = run_on_rank_zero(begin)
        while not run_on_rank_zero(lambda: own[0].are_ready()):
            raise_if_stopped()
            time.sleep(POLL_S)
        if cores and world.node == 0:
            running.callback(bind_threads, os.sched_getaffinity(0))
            bind_threads(cores)
        yield run_on_rank_zero(lambda: own[0].urls), own[0] if own else None


def bind_threads(core_ids: Collection[int]) -> None:
    """Bind all existing and future threads of this process to these cores."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), core_ids)
        except ProcessLookupError:  # the thread has ended
            continue
