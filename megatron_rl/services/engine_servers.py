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
from megatron_rl.services.address import FOLDER, is_proven, token_file
from megatron_rl.services.service_launcher import LOOK_S, TELL_S, check_service, chosen, host_of
from megatron_rl.services.supervised_process import Kept, environment, free_port
from sandbox.token import write_token

ENGINES = "engines"
"""The name of their token's file: RUN/services/engines.token."""
RESTARTS = 5
"""Of one server in a row: with the next end it stays away."""
STEADY_S = 60.0
"""What a server must have served for, in one life, for its earlier ends to be forgotten."""
FIRST_REST_S, LONGEST_REST_S = 2.0, 60.0
"""Before the second start again in a row, twice as long with each further one; the first is at once."""

SHARED = "cores that they share with the ranks"


@dataclass(slots=True, kw_only=True)
class Engine:
    """One server, in one life or more."""

    name: str
    url: str
    command: Sequence[str]
    environment: dict[str, str]
    token: str
    log: Path
    kept: Kept | None = None
    """Its process, until it is known to have ended."""
    began: float = 0.0
    is_up: bool = False
    """It has answered in this life."""
    well_since: float | None = None
    ends: int = 0
    """In a row."""
    rest_until: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def start(self) -> None:
        """Its noise, where that is vLLM's own, is like no other's and like that of no earlier life."""
        self.began, self.is_up, self.well_since = time.monotonic(), False, None
        command = [*self.command, "--seed", str(secrets.randbelow(2**31))]
        self.kept = Kept(command, log=self.log, environment=self.environment)

    def answers(self) -> bool:
        """Return whether it takes requests; another server at its port does not know the token."""
        return is_proven(self.url, token=self.token)


class Engines:
    """All of them; rank 0's."""

    def __init__(self, settings: Settings, *, host: str, num_ranks: int, cores: Sequence[Sequence[int]]) -> None:
        """`cores` of each server on a CPU; none where there are not enough."""
        self._start_s, self._is_over, self._told = settings.engine.startup_timeout_s, False, time.monotonic()
        self._engines: dict[str, Engine] = {}
        words, on_gpu = server_command_line(settings), is_on_gpu(settings.engine)
        self._token_file = token_file(Path(settings.run.dir), ENGINES)
        token, more = write_token(self._token_file), server_environment(settings.engine, token_file=self._token_file)
        for number, place in enumerate(settings.engine.places(num_ranks=num_ranks)):
            own = environment(os.environ, place if on_gpu else []) | more
            binding: list[str] = []
            if cores:
                binding = ["taskset", "--cpu-list", ",".join(map(str, cores[number]))]
                own["OMP_NUM_THREADS"] = str(len(cores[number]) // settings.engine.tp)
            port = free_port(host)
            self._engines[f"http://{host}:{port}"] = Engine(
                name=f"engine {number}", url=f"http://{host}:{port}", command=[*binding, *words, "--host", host, "--port", str(port)],
                environment=own, token=token, log=Path(settings.run.dir) / FOLDER / f"engine_{number}.log",
            )  # fmt: skip

    @property
    def urls(self) -> list[str]:
        return list(self._engines)

    def start(self) -> None:
        for engine in self._engines.values():
            engine.start()

    def are_up(self) -> bool:
        """Whether all answer. ValueError: one has ended, or its time is over."""
        for engine in self._engines.values():
            if engine.is_up:
                continue
            code, passed = engine.kept.code(), time.monotonic() - engine.began
            if code is not None:
                told = f"{engine.name} has ended with exit code {code}; {engine.kept.last_words()}"
                raise ValueError(f"engine.num_local_servers={len(self._engines)}: {told}")
            engine.is_up = engine.answers()
            if engine.is_up:
                print(f"{engine.name}: {engine.url}, after {passed:.0f} s", flush=True)
            elif passed > self._start_s:
                raise ValueError(f"engine.startup_timeout_s={self._start_s}: {engine.name} does not answer; {engine.kept.last_words()}")
        late = [engine for engine in self._engines.values() if not engine.is_up]
        if late and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            told = f"after {self._told - late[0].began:.0f} s; {late[0].kept.last_words()}"
            print(f"{', '.join(engine.name for engine in late)}: no answer yet, {told}", flush=True)
        return not late

    def report_alive(self, url: str) -> None:
        self._engines[url].is_up = True

    def is_healthy(self, url: str) -> None:
        engine, now = self._engines[url], time.monotonic()
        engine.well_since = engine.well_since or now
        if now - engine.well_since >= STEADY_S:
            engine.ends = 0

    def restart(self, url: str, *, hangs: bool) -> None:
        """See health.ServerSupervisor."""
        engine, now = self._engines[url], time.monotonic()
        with engine.lock:
            if self._is_over:
                return
            if engine.kept is not None:
                self._notice(engine, now, hangs=hangs)
            if engine.kept is None and engine.ends <= RESTARTS and now >= engine.rest_until:
                engine.start()

    def _notice(self, engine: Engine, now: float, *, hangs: bool) -> None:
        """End what is left of one that has ended or hangs."""
        code = engine.kept.code()
        if code is not None:
            why = f"has ended with exit code {code}"
        elif engine.is_up and hangs:
            why = "runs and does not answer"
        elif not engine.is_up and now - engine.began > self._start_s:
            why = f"does not answer within engine.startup_timeout_s={self._start_s}"
        else:
            return
        words = engine.kept.last_words()
        engine.kept.kill()
        engine.kept, engine.ends = None, engine.ends + 1
        rest = min(FIRST_REST_S * 2 ** (engine.ends - 2), LONGEST_REST_S) if engine.ends > 1 else 0.0
        engine.rest_until = now + rest
        then = f"is started again in {rest:.0f} s" if engine.ends <= RESTARTS else f"stays away after {engine.ends} ends in a row"
        print(f"{engine.name} ({engine.url}): {why}, and {then}; {words}", flush=True)

    def end(self) -> None:
        def ended(engine: Engine) -> None:
            with engine.lock:
                if engine.kept is not None:
                    engine.kept.end()

        self._is_over = True
        with ThreadPoolExecutor(max_workers=len(self._engines)) as threads:
            list(threads.map(ended, self._engines.values()))
        self._token_file.unlink(missing_ok=True)


def shares(cores: Sequence[int], settings: EngineSettings, *, num_ranks: int) -> tuple[list[int], list[list[int]]]:
    """Of a CPU's cores: those of the ranks, and those of each server; nothing where there are fewer than processes that compute.

    Example: 2 cores, a rank and a server -> [0], [[1]].
    """
    size = len(cores) // (num_ranks + settings.num_local_servers * settings.tp)
    if size == 0:
        return [], []
    each = size * settings.tp
    first = len(cores) - settings.num_local_servers * each
    return list(cores[:first]), [list(cores[place : place + each]) for place in range(first, len(cores), each)]


def placed(settings: EngineSettings, *, num_ranks: int) -> str:
    """Where the servers would be on this node, in words."""
    if is_on_gpu(settings):
        return ", ".join(f"GPU {'-'.join(map(str, place))}" for place in settings.places(num_ranks=num_ranks))
    _, own = shares(sorted(os.sched_getaffinity(0)), settings, num_ranks=num_ranks)
    return ", ".join(f"core {'-'.join(map(str, cores))}" for cores in own) or SHARED


def check_started(settings: Settings, *, num_ranks: int) -> None:
    """ValueError: an engine or a service that the run starts has no place on this node, beside so many ranks."""
    num_gpus = torch.cuda.device_count()
    check_engines(settings.engine, num_ranks=num_ranks, num_gpus=num_gpus)
    for name, service in chosen(settings.services).items():
        check_service(name, service, num_taken=num_taken(settings.engine, num_ranks=num_ranks), num_gpus=num_gpus)


def num_taken(settings: EngineSettings, *, num_ranks: int) -> int:
    """GPUs that the run computes on, on rank 0's node: its first ones."""
    return num_ranks + settings.num_local_servers * settings.tp


def check_engines(settings: EngineSettings, *, num_ranks: int, num_gpus: int) -> None:
    """ValueError: this node has fewer GPUs than its ranks and the servers need."""
    most, host = max(0, num_gpus - num_ranks) // settings.tp, socket.gethostname()
    needed = num_taken(settings, num_ranks=num_ranks)
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
def engines(settings: Settings, world: World, *, go_on: Callable[[], None]) -> Iterator[tuple[list[str], Engines | None]]:
    """The servers inside the block: their addresses, and on the main rank their keeper. All ranks together; `go_on` may end the wait for
    them by raising. On a CPU the ranks of this node keep to cores of their own meanwhile."""
    own: list[Engines] = []
    with ExitStack() as running:

        def begin() -> list[int]:
            cores = [] if is_on_gpu(settings.engine) else sorted(os.sched_getaffinity(0))
            for_ranks, for_servers = shares(cores, settings.engine, num_ranks=world.local_size)
            try:
                own.append(Engines(settings, host=host_of(world), num_ranks=world.local_size, cores=for_servers))
            except OSError as error:
                raise ValueError(f"MASTER_ADDR={host_of(world)}: {error}; give an address of {socket.gethostname()}") from error
            running.callback(own[0].end)
            own[0].start()
            return for_ranks

        cores = run_on_rank_zero(begin)
        while not run_on_rank_zero(lambda: own[0].are_up()):
            go_on()
            time.sleep(LOOK_S)
        if cores and world.node == 0:
            running.callback(bind, os.sched_getaffinity(0))
            bind(cores)
        yield run_on_rank_zero(lambda: own[0].urls), own[0] if own else None


def bind(cores: Sequence[int]) -> None:
    """All threads of this process, and those that they will start."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it has ended
            continue
