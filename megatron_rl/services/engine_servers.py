"""The engines that a run starts for itself (engine.num_local_servers): servers of vLLM beside rank 0, on devices that no rank has.

Rank 0 starts them before anything is built and waits until they answer. One that ends or hangs later is started again, after rests that
grow, until it has ended too often in a row; who is given weights, and asked, is the matter of rollout/health.py. What a server says is in
RUN/services/engine_N.log. However the run ends, its keeper (supervisor.py) ends it.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
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
from sandbox.token import write_token

ENGINES_TOKEN_NAME = "engines"
"""The name of their token's file: RUN/services/engines.token."""
MAX_RESTARTS = 5
"""Of one server in a row: with the next end it stays away."""
STABLE_S = 60.0
"""What a server must have served for, in one life, for its earlier ends to be forgotten."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 2.0, 60.0
"""Before the second start again in a row, twice as long with each further one; the first is at once."""

SHARED_CORES_TEXT = "cores that they share with the ranks"


@dataclass(slots=True, kw_only=True)
class EngineServer:
    """One server, in one life or more."""

    name: str
    url: str
    command: Sequence[str]
    environment: dict[str, str]
    token: str
    log: Path
    process: SupervisedProcess | None = None
    """Its process, until it is known to have ended."""
    started_at: float = 0.0
    is_ready: bool = False
    """It has answered in this life."""
    healthy_since: float | None = None
    consecutive_exits: int = 0
    """In a row."""
    restart_after: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def start(self) -> None:
        """Its noise, where that is vLLM's own, is like no other's and like that of no earlier life."""
        self.started_at, self.is_ready, self.healthy_since = time.monotonic(), False, None
        command = [*self.command, "--seed", str(secrets.randbelow(2**31))]
        self.process = SupervisedProcess(command, log=self.log, environment=self.environment)

    def probe_ready(self) -> bool:
        """Return whether it takes requests; another server at its port does not know the token."""
        return has_proven_token(self.url, token=self.token)


class EngineServers:
    """All of them; rank 0's."""

    def __init__(self, settings: Settings, *, host: str, num_ranks: int, cores: Sequence[Sequence[int]]) -> None:
        """`cores` of each server on a CPU; none where there are not enough."""
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
        return list(self._engines)

    def start(self) -> None:
        for engine in self._engines.values():
            engine.start()

    def are_ready(self) -> bool:
        """Whether all answer. ValueError: one has ended, or its time is over."""
        for engine in self._engines.values():
            if engine.is_ready:
                continue
            code, passed = engine.process.exit_code(), time.monotonic() - engine.started_at
            if code is not None:
                told = f"{engine.name} has ended with exit code {code}; {engine.process.log_tail()}"
                raise ValueError(f"engine.num_local_servers={len(self._engines)}: {told}")
            engine.is_ready = engine.probe_ready()
            if engine.is_ready:
                print(f"{engine.name}: {engine.url}, after {passed:.0f} s", flush=True)
            elif passed > self._startup_timeout_s:
                raise ValueError(
                    f"engine.startup_timeout_s={self._startup_timeout_s}: {engine.name} does not answer; {engine.process.log_tail()}"
                )
        late = [engine for engine in self._engines.values() if not engine.is_ready]
        if late and time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            told = f"after {self._reported_at - late[0].started_at:.0f} s; {late[0].process.log_tail()}"
            print(f"{', '.join(engine.name for engine in late)}: no answer yet, {told}", flush=True)
        return not late

    def report_alive(self, url: str) -> None:
        self._engines[url].is_ready = True

    def report_healthy(self, url: str) -> None:
        engine, now = self._engines[url], time.monotonic()
        engine.healthy_since = engine.healthy_since or now
        if now - engine.healthy_since >= STABLE_S:
            engine.consecutive_exits = 0

    def restart(self, url: str, *, is_unresponsive: bool) -> None:
        """See health.ServerSupervisor."""
        engine, now = self._engines[url], time.monotonic()
        with engine.lock:
            if self._is_stopped:
                return
            if engine.process is not None:
                self._stop_if_failed(engine, now, is_unresponsive=is_unresponsive)
            if engine.process is None and engine.consecutive_exits <= MAX_RESTARTS and now >= engine.restart_after:
                engine.start()

    def _stop_if_failed(self, engine: EngineServer, now: float, *, is_unresponsive: bool) -> None:
        """End what is left of one that has ended or hangs."""
        code = engine.process.exit_code()
        if code is not None:
            why = f"has ended with exit code {code}"
        elif engine.is_ready and is_unresponsive:
            why = "runs and does not answer"
        elif not engine.is_ready and now - engine.started_at > self._startup_timeout_s:
            why = f"does not answer within engine.startup_timeout_s={self._startup_timeout_s}"
        else:
            return
        words = engine.process.log_tail()
        engine.process.kill()
        engine.process, engine.consecutive_exits = None, engine.consecutive_exits + 1
        rest = min(MIN_BACKOFF_S * 2 ** (engine.consecutive_exits - 2), MAX_BACKOFF_S) if engine.consecutive_exits > 1 else 0.0
        engine.restart_after = now + rest
        then = (
            f"is started again in {rest:.0f} s"
            if engine.consecutive_exits <= MAX_RESTARTS
            else f"stays away after {engine.consecutive_exits} ends in a row"
        )
        print(f"{engine.name} ({engine.url}): {why}, and {then}; {words}", flush=True)

    def stop(self) -> None:
        def ended(engine: EngineServer) -> None:
            with engine.lock:
                if engine.process is not None:
                    engine.process.stop()

        self._is_stopped = True
        with ThreadPoolExecutor(max_workers=len(self._engines)) as threads:
            list(threads.map(ended, self._engines.values()))
        self._token_file.unlink(missing_ok=True)


def split_cores(cores: Sequence[int], settings: EngineSettings, *, num_ranks: int) -> tuple[list[int], list[list[int]]]:
    """Of a CPU's cores: those of the ranks, and those of each server; nothing where there are fewer than processes that compute.

    Example: 2 cores, a rank and a server -> [0], [[1]].
    """
    size = len(cores) // (num_ranks + settings.num_local_servers * settings.tp)
    if size == 0:
        return [], []
    each = size * settings.tp
    first = len(cores) - settings.num_local_servers * each
    return list(cores[:first]), [list(cores[place : place + each]) for place in range(first, len(cores), each)]


def describe_placement(settings: EngineSettings, *, num_ranks: int) -> str:
    """Where the servers would be on this node, in words."""
    if is_on_gpu(settings):
        return ", ".join(f"GPU {'-'.join(map(str, place))}" for place in settings.places(num_ranks=num_ranks))
    _, own = split_cores(sorted(os.sched_getaffinity(0)), settings, num_ranks=num_ranks)
    return ", ".join(f"core {'-'.join(map(str, cores))}" for cores in own) or SHARED_CORES_TEXT


def check_started(settings: Settings, *, num_ranks: int) -> None:
    """ValueError: an engine or a service that the run starts has no place on this node, beside so many ranks."""
    num_gpus = torch.cuda.device_count()
    check_engines(settings.engine, num_ranks=num_ranks, num_gpus=num_gpus)
    for name, service in enabled_services(settings.services).items():
        check_service(name, service, num_used_gpus=num_used_gpus(settings.engine, num_ranks=num_ranks), num_gpus=num_gpus)


def num_used_gpus(settings: EngineSettings, *, num_ranks: int) -> int:
    """GPUs that the run computes on, on rank 0's node: its first ones."""
    return num_ranks + settings.num_local_servers * settings.tp


def check_engines(settings: EngineSettings, *, num_ranks: int, num_gpus: int) -> None:
    """ValueError: this node has fewer GPUs than its ranks and the servers need."""
    most, host = max(0, num_gpus - num_ranks) // settings.tp, socket.gethostname()
    needed = num_used_gpus(settings, num_ranks=num_ranks)
    remedy = (
        f"{needed - num_ranks} GPUs are needed beside those of the {num_ranks} ranks, and {host} has {num_gpus} in all; start {most}"
        if most else f"{host} has {num_gpus} GPUs, and its {num_ranks} ranks leave none; start fewer ranks, or use engine.mode=colocated"
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
    """The servers inside the block: their addresses, and on the main rank their keeper. All ranks together; `raise_if_stopped` may end the
    wait for them by raising. On a CPU the ranks of this node keep to cores of their own meanwhile."""
    own: list[EngineServers] = []
    with ExitStack() as running:

        def begin() -> list[int]:
            cores = [] if is_on_gpu(settings.engine) else sorted(os.sched_getaffinity(0))
            for_ranks, for_servers = split_cores(cores, settings.engine, num_ranks=world.local_size)
            try:
                own.append(EngineServers(settings, host=rank_zero_host(world), num_ranks=world.local_size, cores=for_servers))
            except OSError as error:
                raise ValueError(f"MASTER_ADDR={rank_zero_host(world)}: {error}; give an address of {socket.gethostname()}") from error
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


def bind_threads(core_ids: Sequence[int]) -> None:
    """All threads of this process, and those that they will start."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), core_ids)
        except ProcessLookupError:  # it has ended
            continue
