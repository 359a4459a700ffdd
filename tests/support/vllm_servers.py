"""Starts real vLLM servers for tests, several at a time, and ends them however the test ends.

The servers are forked from a process that has already imported vLLM. Runs that start servers
themselves start interpreters.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.health import ServerControl
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.rollout.vllm.server_command import expected_fingerprint, server_arguments, server_environment
from megatron_rl.rollout.vllm.weight_sender import WeightSender
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl_sandbox.token import bearer_header
from tests.conftest import SUPPORT
from tests.support import fork_server

HOST, TOKEN = "127.0.0.1", "a-word-of-many-letters"
ENGINE_SETTINGS = EngineSettings(mode="server", urls=["http://127.0.0.1:1"], kv_cache_mib=32, max_model_len=1024, health_timeout_s=60)
"""Settings of the servers. Their addresses are only known once they have started."""
NO_PIXEL_LIMITS: Mapping[str, int] = {}
SCRIPT = SUPPORT / "vllm_openai_server.py"
STOP_S = 60.0
"""Seconds that a server gets to exit after SIGTERM."""


def write_token_file(folder: Path) -> Path:
    """Write a file with the token of all these servers and return its path."""
    (folder / "token").write_text(TOKEN)
    return folder / "token"


def start_vllm_server(
    model: Path,
    *,
    seed: int,
    folder: Path,
    settings: EngineSettings = ENGINE_SETTINGS,
    pixel_limits: Mapping[str, int] = NO_PIXEL_LIMITS,
) -> tuple[str, fork_server.Process]:
    """Start a server and return its address and process.

    `folder` receives its token file, and `pixel_limits` contains the model settings min_pixels and
    max_pixels.
    """
    renderer = Renderer(ModelSettings(path=str(model), **pixel_limits))
    port, given = find_free_port(HOST), {"banned_ids": renderer.banned_ids, "pixels": renderer.final_pixels}
    arguments = server_arguments(str(model), settings, **given, cuda=False, seed=seed, timeout_s=60)
    environment = server_environment(settings, token_file=write_token_file(folder))
    return f"http://{HOST}:{port}", fork_server.Process(SCRIPT, *arguments, "--host", HOST, "--port", port, environment=environment)


def wait_until_healthy(url: str, server: fork_server.Process, *, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False, headers=bearer_header(TOKEN)).is_success:
                return
        except httpx.HTTPError:
            assert server.poll() is None, f"a server has ended:\n{server.output.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"a server does not answer:\n{server.output.read_text()[-4000:]}"
        time.sleep(0.2)


@contextmanager
def serve_openai(model: Path, *, pixels: tuple[int, int]) -> Iterator[str]:
    """Start a server with the model's own weights and the image size limits of a run's engine.

    Yield its address including /v1.
    """
    renderer, settings, port = Renderer(ModelSettings(path=str(model))), EngineSettings(kv_cache_mib=32), find_free_port(HOST)
    arguments = server_arguments(str(model), settings, banned_ids=renderer.banned_ids, pixels=pixels, cuda=False, seed=0, timeout_s=60)
    arguments[arguments.index("--load-format") + 1] = "auto"
    for name in ("--logits-processors", "--middleware"):  # they require a run's own arguments and its token
        place = arguments.index(name)
        del arguments[place : place + 2]  # the most likely tokens of such a model are not banned ones
    environment = server_environment(settings, token_file="none")
    server = fork_server.Process(SCRIPT, *arguments, "--host", HOST, "--port", port, environment=environment)
    try:
        wait_until_healthy(f"http://{HOST}:{port}", server)
        yield f"http://{HOST}:{port}/v1"
    finally:
        server.terminate(deadline=time.monotonic() + STOP_S)  # a killed server leaves its engine process behind


@contextmanager
def serve_engines(
    model: Path,
    folder: Path,
    *,
    num_servers: int,
    settings: EngineSettings = ENGINE_SETTINGS,
    pixel_limits: Mapping[str, int] = NO_PIXEL_LIMITS,
) -> Iterator[list[str]]:
    """Start the servers and yield their addresses."""
    started = [
        start_vllm_server(model, seed=number, folder=folder, settings=settings, pixel_limits=pixel_limits) for number in range(num_servers)
    ]
    try:
        for url, server in started:
            wait_until_healthy(url, server)
        yield [url for url, _ in started]
    finally:
        deadline = time.monotonic() + STOP_S
        for _, server in started:
            server.terminate(deadline=deadline)


@contextmanager
def connect_server_engine(
    urls: Sequence[str], renderer: Renderer, *, name: str = "test", settings: EngineSettings = ENGINE_SETTINGS, bucket_bytes: int = 1 << 20
) -> Iterator[ServerEngine]:
    """Return a run's engine for these servers, which have no weights before the first
    load_weights.
    """
    own = [VllmServer(url, token=TOKEN) for url in urls]
    wanted = expected_fingerprint(settings, renderer.tokenizer.name_or_path, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)
    sender = WeightSender(
        own, expected=wanted, owner=f"{name} of a test", kind="gloo", device=torch.device("cpu"), bucket_bytes=bucket_bytes, timeout_s=20
    )
    sender.lock_servers()
    engine = ServerEngine(
        own, settings, name=name, special_tokens=renderer.special_tokens,
        decode_tokens=renderer.tokenizer.decode,
        all_gather=lambda mine: [mine], control=ServerControl(sender=sender),
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()
