"""A run of remote_run.py that starts two servers itself, of which it loses one now and then, at seeded moments:

    python killed_engines.py MODEL_FOLDER RUN_FOLDER SEED KILLS [WORD ...]

A moment is a phase (generation, pause, transfer), a way (killed, stopped, core killed, core stopped, ended), a server and a place in the
phase; all pairs of phase and way come in turn, in a shuffled order. With each update at most one comes, when both servers serve. One that
serves again is steady at once: kills come faster than a run gives up a server that ends in a row (services/engine_servers.py).
RUN_FOLDER/kills.jsonl has what was done, and what became of it.
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
from tests.support.remote_run import REMOTE, play

PHASES, WAYS = ("generation", "pause", "transfer"), ("killed", "stopped", "core killed", "core stopped", "ended")
BACK_S = 3000.0
"""Until both must serve again."""


@dataclass
class Kill:
    phase: str
    way: str
    server: int
    place: int
    """The request after the update, or the bucket of it, from 0."""
    version: int = -1
    """Of the update that it came with, or after."""
    down_s: float = -1.0
    """From the kill until both served again; -1: nobody waited for it."""


class Killer:
    """Its methods stand in the place of those of a run."""

    def __init__(self, folder: Path, *, seed: int, num: int) -> None:
        self.folder, self.left, self.kills = folder, moments(seed, num), []
        self.now, self.num_seen, self.version, self.since, self.household, self.struck = None, 0, 0, 0.0, None, None

    def load_weights(self, engine: ServerEngine, tensors: object, *, version: int) -> None:
        self.version = version
        if version > 0 and self.now is None and self.left:
            deadline = time.monotonic() + BACK_S
            while self.is_struck() or not all(server.is_in for server in engine._servers):
                assert time.monotonic() < deadline, f"not both are back after {self.kills[-1:]}"
                time.sleep(0.1)
            if self.kills:
                self.kills[-1].down_s = round(time.monotonic() - self.since, 1)
            self.now, self.num_seen = self.left.pop(0), 0
        load_weights(engine, tensors, version=version)
        (self.folder / "kills.jsonl").write_text("".join(json.dumps(asdict(kill)) + "\n" for kill in self.kills))

    def begin(self, line: Connection) -> None:
        self.maybe(line.server.url, "pause")
        begin(line)

    def send(self, line: Connection, bucket: object, flat: object) -> None:
        self.maybe(line.server.url, "transfer")
        send(line, bucket, flat)

    async def ask(self, asking: GenerateClient, server: object, turn: object, said: object, **labels: str) -> object:
        if turn.sampling.max_tokens > 1:  # the lookout asks for one
            asyncio.get_running_loop().call_later(0.02, self.maybe, server.url, "generation")
        return await ask(asking, server, turn, said, **labels)

    def maybe(self, url: str, phase: str) -> None:
        kill = self.now
        if kill is None or kill.phase != phase or self.household.urls[kill.server] != url:
            return
        self.num_seen += 1
        if self.num_seen > kill.place:
            self.now, self.since, kill.version = None, time.monotonic(), self.version
            self.kills.append(kill)
            print(f"killer: {kill}", flush=True)
            self.struck = self.household._engines[url].process
            strike(self.struck._supervisor.pid, kill.way)

    def is_struck(self) -> bool:
        """Whether the last kill was not noticed yet."""
        return self.struck is not None and any(each.process is self.struck for each in self.household._engines.values())


def moments(seed: int, num: int) -> list[Kill]:
    rng = random.Random(seed)
    pairs = list(itertools.product(PHASES, WAYS))
    rng.shuffle(pairs)
    chosen = list(itertools.islice(itertools.cycle(pairs), num))
    places = {"generation": 6, "pause": 1, "transfer": 4}
    return [Kill(phase, way, rng.randrange(2), rng.randrange(places[phase])) for phase, way in chosen]


def strike(keeper: int, way: str) -> None:
    """The server is its keeper's child; its engine's core is among the server's."""
    (server,) = psutil.Process(keeper).children()
    cores = [child for child in server.children() if "resource_tracker" not in " ".join(child.cmdline())]
    number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "ended": signal.SIGTERM}[way.rpartition(" ")[2]]
    for process in cores if way.startswith("core") else [server]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


load_weights, begin, send, ask = ServerEngine.load_weights, Connection.begin, Connection.send, GenerateClient.generate
start = EngineServers.start

if __name__ == "__main__":
    model, folder, seed, num, *more = sys.argv[1:]
    killer = Killer(Path(folder), seed=int(seed), num=int(num))

    def started(household: EngineServers) -> None:
        killer.household = household
        start(household)

    ServerEngine.load_weights = lambda engine, tensors, *, version: killer.load_weights(engine, tensors, version=version)
    Connection.begin, Connection.send = lambda line: killer.begin(line), lambda line, bucket, flat: killer.send(line, bucket, flat)
    GenerateClient.generate = lambda asking, server, turn, said, **labels: killer.ask(asking, server, turn, said, **labels)
    EngineServers.start = started
    engine_servers.STABLE_S = 0.0
    sys.argv[1:] = [model, folder, *REMOTE, "engine.num_local_servers=2", "engine.bucket_mib=0.5", *more]
    play()
