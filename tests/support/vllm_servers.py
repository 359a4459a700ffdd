"""Starts real vLLM servers for tests, several at a time, and ends them however the test ends."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rollout.health import ServerControl
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl.rollout.vllm.server_command import PROGRAM, expected_fingerprint, server_arguments, server_environment
from megatron_rl.rollout.vllm.weight_sender import WeightSender
from megatron_rl.services.supervised_process import SupervisedProcess, find_free_port
from sandbox.token import bearer_header
from tests.conftest import ROOT

HOST, TOKEN = "127.0.0.1", "a-word-of-many-letters"
ENGINE_SETTINGS = EngineSettings(mode="server", urls=["http://127.0.0.1:1"], kv_cache_mib=32, health_timeout_s=60)
"""Settings of the servers. Their addresses are only known once they have started."""
NO_PIXEL_LIMITS: Mapping[str, int] = {}


def write_token_file(folder: Path) -> Path:
    """Write a file with the token of all these servers and return its path."""
    (folder / "token").write_text(TOKEN)
    return folder / "token"


def start_vllm_server(
    model: Path,
    *,
    seed: int,
    log: Path,
    port: int = 0,
    settings: EngineSettings = ENGINE_SETTINGS,
    pixel_limits: Mapping[str, int] = NO_PIXEL_LIMITS,
) -> tuple[str, SupervisedProcess]:
    """Start a server and return its address and process.

    `pixel_limits` contains the model settings min_pixels and max_pixels.
    """
    renderer = Renderer(ModelSettings(path=str(model), **pixel_limits))
    port, given = port or find_free_port(HOST), {"banned_ids": renderer.banned_ids, "pixels": renderer.final_pixels}
    arguments = server_arguments(str(model), settings, **given, cuda=False, seed=seed, timeout_s=60)
    own = server_environment(settings, token_file=write_token_file(log.parent))
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return f"http://{HOST}:{port}", SupervisedProcess(
        [*PROGRAM, *arguments, "--host", HOST, "--port", str(port)], log=log, environment=environment
    )


def wait_until_healthy(url: str, process: SupervisedProcess, log: Path, *, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False, headers=bearer_header(TOKEN)).is_success:
                return
        except httpx.HTTPError:
            assert process.exit_code() is None, f"a server has ended:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"a server does not answer:\n{log.read_text()[-4000:]}"
        time.sleep(0.2)


@contextmanager
def serve_openai(model: Path, log: Path, *, pixels: tuple[int, int]) -> Iterator[str]:
    """Start a server with the model's own weights and the image size limits of a run's engine.

    Yield its address including /v1.
    """
    renderer, settings, port = Renderer(ModelSettings(path=str(model))), EngineSettings(kv_cache_mib=32), find_free_port(HOST)
    arguments = server_arguments(str(model), settings, banned_ids=renderer.banned_ids, pixels=pixels, cuda=False, seed=0, timeout_s=60)
    arguments[arguments.index("--load-format") + 1] = "auto"
    for name in ("--logits-processors", "--middleware"):  # they require a run's own arguments and its token
        place = arguments.index(name)
        del arguments[place : place + 2]  # the most likely tokens of such a model are not banned ones
    environment = {**os.environ, **server_environment(settings, token_file="none"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    kept = SupervisedProcess([*PROGRAM, *arguments, "--host", HOST, "--port", str(port)], log=log, environment=environment)
    try:
        wait_until_healthy(f"http://{HOST}:{port}", kept, log)
        yield f"http://{HOST}:{port}/v1"
    finally:
        kept.kill()


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
    logs = [folder / f"{number}.log" for number in range(num_servers)]
    started = [
        (*start_vllm_server(model, seed=number, log=log, settings=settings, pixel_limits=pixel_limits), log)
        for number, log in enumerate(logs)
    ]
    try:
        for url, kept, log in started:
            wait_until_healthy(url, kept, log)
        yield [url for url, _, _ in started]
    finally:
        for _, kept, _ in started:
            kept.stop()  # killing one of several processes leaves shared memory behind


@contextmanager
def connect_server_engine(
    urls: Sequence[str], renderer: Renderer, *, name: str = "test", settings: EngineSettings = ENGINE_SETTINGS, bucket_bytes: int = 1 << 20
) -> Iterator[ServerEngine]:
    """Return a run's engine for these servers, which have no weights before the first
    load_weights.
    """
    own = [VllmServer(url, token=TOKEN) for url in urls]
    wanted = expected_fingerprint(settings, renderer.tokenizer.name_or_path, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)
    sender = WeightSender(own, expected=wanted, owner=f"{name} of a test", kind="gloo", bucket_bytes=bucket_bytes, timeout_s=20)
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
