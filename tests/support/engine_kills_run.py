"""A run of server_engine_run.py that starts two servers itself and loses one of them at seeded
moments.

    python engine_kills_run.py MODEL_FOLDER RUN_FOLDER SEED KILLS [WORD ...]

A kill has a phase (generation, pause, transfer), a method (killed, stopped, core killed, core
stopped, ended), a server and a position in the phase. All pairs of phase and method are used in
turn, in a shuffled order. At most one kill happens per update, and only when both servers are
healthy. A server counts as stable as soon as it is healthy again, because otherwise the run would
give up a server that ends several times in a row (services/engine_servers.py).
RUN_FOLDER/kills.jsonl contains each kill and its outcome.
"""

import asyncio
import itertools
import json
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.client import GenerateClient
from megatron_rl.rollout.vllm.weight_sender import Connection
from megatron_rl.services import engine_servers
from megatron_rl.services.engine_servers import EngineServers
from tests.support.server_engine_run import SERVER_ENGINE_OVERRIDES, run_cli

PHASES, METHODS = ("generation", "pause", "transfer"), ("killed", "stopped", "core killed", "core stopped", "ended")
RECOVERY_TIMEOUT_S = 3000.0
"""Maximum seconds until both servers are healthy again."""


@dataclass
class EngineKill:
    phase: str
    method: str
    server: int
    position: int
    """Zero-based index of the request after the update, or of the update's bucket."""
    version: int = -1
    """Version of the update during or after which the kill happened."""
    down_s: float = -1.0
    """Seconds from the kill until both servers were healthy again; -1 if this was not measured."""


class EngineKiller:
    """Contains replacements for methods of a run."""

    def __init__(self, folder: Path, *, seed: int, num: int) -> None:
        self.folder, self.remaining, self.kills = folder, draw_kills(seed, num), []
        self.current, self.num_seen, self.version, self.killed_at, self.supervisor, self.killed_process = None, 0, 0, 0.0, None, None

    def load_weights(self, engine: ServerEngine, tensors: object, *, version: int) -> None:
        self.version = version
        if version > 0 and self.current is None and self.remaining:
            deadline = time.monotonic() + RECOVERY_TIMEOUT_S
            while self.is_unnoticed() or not all(server.is_healthy for server in engine._servers):
                assert time.monotonic() < deadline, f"not both are back after {self.kills[-1:]}"
                time.sleep(0.1)
            if self.kills:
                self.kills[-1].down_s = round(time.monotonic() - self.killed_at, 1)
            self.current, self.num_seen = self.remaining.pop(0), 0
        load_weights(engine, tensors, version=version)
        (self.folder / "kills.jsonl").write_text("".join(json.dumps(asdict(kill)) + "\n" for kill in self.kills))

    def begin(self, connection: Connection) -> None:
        self.kill_if_due(connection.server.url, "pause")
        begin(connection)

    def send(self, connection: Connection, bucket: object, flat: object) -> None:
        self.kill_if_due(connection.server.url, "transfer")
        send(connection, bucket, flat)

    async def ask(self, client: GenerateClient, server: object, request: object, partial: object, **labels: str) -> object:
        if request.sampling.max_tokens > 1:  # the health monitor requests one
            asyncio.get_running_loop().call_later(0.02, self.kill_if_due, server.url, "generation")
        return await ask(client, server, request, partial, **labels)

    def kill_if_due(self, url: str, phase: str) -> None:
        kill = self.current
        if kill is None or kill.phase != phase or self.supervisor.urls[kill.server] != url:
            return
        self.num_seen += 1
        if self.num_seen > kill.position:
            self.current, self.killed_at, kill.version = None, time.monotonic(), self.version
            self.kills.append(kill)
            print(f"killer: {kill}", flush=True)
            self.killed_process = self.supervisor._engines[url].process
            send_kill_signal(self.killed_process._supervisor.pid, kill.method)

    def is_unnoticed(self) -> bool:
        """Return True while the last kill has not been noticed."""
        return self.killed_process is not None and any(each.process is self.killed_process for each in self.supervisor._engines.values())


def draw_kills(seed: int, num: int) -> list[EngineKill]:
    rng = random.Random(seed)
    pairs = list(itertools.product(PHASES, METHODS))
    rng.shuffle(pairs)
    chosen = list(itertools.islice(itertools.cycle(pairs), num))
    places = {"generation": 6, "pause": 1, "transfer": 4}
    return [EngineKill(phase, way, rng.randrange(2), rng.randrange(places[phase])) for phase, way in chosen]


def send_kill_signal(supervisor_pid: int, method: str) -> None:
    """Send the signal to the server, which is the child of its supervisor, or to its engine core,
    which is a child of the server.
    """
    (server,) = psutil.Process(supervisor_pid).children()
    cores = [child for child in server.children() if "resource_tracker" not in " ".join(child.cmdline())]
    number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "ended": signal.SIGTERM}[method.rpartition(" ")[2]]
    for process in cores if method.startswith("core") else [server]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


load_weights, begin, send, ask = ServerEngine.load_weights, Connection.start_update, Connection.send_bucket, GenerateClient.generate
start = EngineServers.start

if __name__ == "__main__":
    model, folder, seed, num, *more = sys.argv[1:]
    killer = EngineKiller(Path(folder), seed=int(seed), num=int(num))

    def started(household: EngineServers) -> None:
        killer.supervisor = household
        start(household)

    ServerEngine.load_weights = lambda engine, tensors, *, version: killer.load_weights(engine, tensors, version=version)
    Connection.start_update, Connection.send_bucket = (
        lambda line: killer.begin(line),
        lambda line, bucket, flat: killer.send(line, bucket, flat),
    )
    GenerateClient.generate = lambda asking, server, turn, said, **labels: killer.ask(asking, server, turn, said, **labels)
    EngineServers.start = started
    engine_servers.STABLE_S = 0.0
    sys.argv[1:] = [model, folder, *SERVER_ENGINE_OVERRIDES, "engine.num_local_servers=2", "engine.bucket_mib=0.5", *more]
    run_cli()
