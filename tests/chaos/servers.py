"""The servers that runs use.

A judge and an engine (both vLLM) stay up for all seeds (STANDING). A sandbox server and proxies are
created for each seed of the vqa run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.server_command import server_arguments, server_environment
from megatron_rl.services.supervised_process import kill_process_tree
from tests.chaos.proxy import Proxy
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.fake_judge_server import make_completion, serve_judge
from tests.support.free_port import free_port
from tests.support.vllm_servers import TOKEN, write_token_file

START_S = 400.0
ENGINE, PIXELS = {"kv_cache_mib": 32, "probe_s": 60}, {"min_pixels": 3136, "max_pixels": 4000}
"""Settings of the engine and of the runs that share it (runs.SHARED)."""
XGRAMMAR = '{"backend": "xgrammar", "disable_any_whitespace": true}'
LIES = {"type": json.dumps({"correct": "perhaps"}), "one": json.dumps({"correct": True})}
"""Responses of faulty judges: valid JSON with a verdict of the wrong type, and a judge that accepts
every answer.
"""


class Popen(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class Server:
    """A server with a fixed port. After it was killed, it is started again on the same port."""

    port: int
    question: str
    """Path that returns status 200 when the server is up."""
    log: Path
    process: Popen | None = None

    def is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            url, headers = f"http://127.0.0.1:{self.port}{self.question}", {"Authorization": f"Bearer {TOKEN}"}
            return httpx.get(url, timeout=5, headers=headers).status_code == 200
        return False

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_up():
            assert time.monotonic() < deadline and self.process.poll() is None, f"no server at {self.question}; {self.log}"
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server and all its descendants, which would not notice its death."""
        with contextlib.suppress(psutil.NoSuchProcess):
            kill_process_tree(psutil.Process(self.process.pid))
        self.process.kill()
        self.process.poll()

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)


@dataclass(slots=True)
class Judge(Server):
    model: Path = Path()

    def start(self) -> None:
        environment = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(self.log.parent)}
        options = ("--model", self.model, "--served-model-name", "judge", "--dtype", "float32", "--enforce-eager", "--max-model-len", 4096)
        options += ("--kv-cache-memory-bytes", 64 << 20, "--structured-outputs-config", XGRAMMAR)
        address = ("--host", "127.0.0.1", "--port", self.port)
        self.process = fork_server.Process(SUPPORT / "vllm_openai_server.py", *address, *options, environment=environment)


@dataclass(slots=True)
class Engine(Server):
    """The engine of runs that start no engine themselves.

    It reports which run uses it (rollout/vllm/worker_extension.py).
    """

    model: Path = Path()

    def start(self) -> None:
        renderer = Renderer(ModelSettings(path=str(self.model), **PIXELS))
        settings = EngineSettings(mode="server", urls=[f"http://127.0.0.1:{self.port}"], **ENGINE)
        given = {"banned_ids": renderer.banned_ids, "pixels": renderer.final_pixels, "cuda": False, "seed": 0, "timeout_s": 60}
        arguments = server_arguments(str(self.model), settings, **given)
        own = server_environment(settings, token_file=write_token_file(self.log.parent))
        environment = {**own, "TMPDIR": str(self.log.parent)}
        address = ("--host", "127.0.0.1", "--port", self.port)
        self.process = fork_server.Process(SUPPORT / "vllm_openai_server.py", *arguments, *address, environment=environment)


class Boxes(Server):
    def start(self) -> None:
        command = [sys.executable, "-m", "megatron_rl_sandbox", "serve", "--host", "127.0.0.1", "--port", str(self.port), "--size", "2"]
        self.process = _begun(command, self.log, {**os.environ, "TMPDIR": str(self.log.parent)})


def _begun(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)


@dataclass(slots=True)
class Servers:
    """The servers of a run by name, and the proxies of a vqa run."""

    named: dict[str, Server]
    wires: dict[str, Proxy] = field(default_factory=dict)
    liars: dict[str, int] = field(default_factory=dict)
    """Ports of the faulty judges, keyed by their response (LIES)."""

    def urls(self) -> dict[str, str]:
        if not self.wires:
            return {name: f"http://127.0.0.1:{server.port}" for name, server in self.named.items()}
        return {"judge": f"http://127.0.0.1:{self.wires['judge'].port}/v1", "sandbox": f"http://127.0.0.1:{self.wires['server'].port}"}

    def tell_truth(self) -> None:
        self.wires["judge"].lead_to(self.named["judge"].port)


STANDING = {"vqa": ("judge", Judge), "shared_engine": ("engine", Engine)}
"""Name and class of each run's server that stays up for all seeds."""


@contextmanager
def standing(run: str, home: Path) -> Iterator[Servers]:
    name, kind = STANDING[run]
    folder = home / name
    folder.mkdir(exist_ok=True)
    server = kind(free_port(), "/health", folder / f"{name}.log", model=home / "starts" / "nano")
    server.start()
    try:
        server.wait()
        yield Servers({name: server})
    finally:
        server.kill()


@contextmanager
def with_boxes(judge: Judge, folder: Path) -> Iterator[Servers]:
    """Start a sandbox server, proxies and faulty judges, and yield them together with the given
    judge.
    """
    boxes = Boxes(free_port(), "/health", folder / "server.log")
    boxes.start()
    with ExitStack() as stack:
        stack.callback(_end, boxes)
        servers = Servers({"judge": judge, "server": boxes})
        servers.wires["judge"] = stack.enter_context(Proxy(judge.port))
        servers.wires["server"] = stack.enter_context(Proxy(boxes.port))
        for name, words in LIES.items():
            url = stack.enter_context(serve_judge(lambda body, words=words: make_completion(words))).url
            servers.liars[name] = httpx.URL(url).port
        boxes.wait()
        yield servers


def _end(boxes: Boxes) -> None:
    boxes.send(signal.SIGCONT)
    boxes.send(signal.SIGTERM)
    try:
        boxes.process.wait(timeout=60)
    finally:
        boxes.process.kill()
        boxes.process.wait()
