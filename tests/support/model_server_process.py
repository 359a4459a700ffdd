"""Starts a model server as a separate process, and creates images for requests to it."""

import base64
import io
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from tests.support import fork_server

IMAGE_SIDE = 84
"""Side of an image in pixels; such an image has three by three tokens and is never resized."""
NANO_ARGS = ("--kv-cache-mib", "32", "--max-model-len", "512", "--max-pixels", "12544")
START_S = 120.0
"""Timeout for the start of a server."""


@dataclass
class ServerProcess:
    url: str
    process: fork_server.Process
    headers: Mapping[str, str] = field(default_factory=dict)

    def post(self, path: str, body: object, *, timeout_s: float = 60) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s, trust_env=False, headers=self.headers)


def start_model_server(kind: str, model: Path, *words: object, variables: Mapping[str, str] = {}) -> ServerProcess:
    """Start a server and wait until it accepts requests.

    Raises AssertionError if it exits first. The port is 0 unless `words` specifies another.
    """
    script = fork_server.ROOT / "megatron_rl" / "tasks" / "lewis" / "server" / f"{kind}_app.py"
    process = fork_server.Process(script, "--model", model, "--port", 0, *NANO_ARGS, *words, environment=variables)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in process.output.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith("http://") and line.endswith("\n"):
                return ServerProcess(line.strip(), process)
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"{process.args} ended with {process.returncode}: {process.output.read_text()[-4000:]}")


@contextmanager
def running_model_server(kind: str, model: Path, *words: object, variables: Mapping[str, str] = {}) -> Iterator[ServerProcess]:
    server = start_model_server(kind, model, *words, variables=variables)
    try:
        yield server
    finally:
        server.process.kill()


def make_noise_image(seed: int, *, side: int = IMAGE_SIDE) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encode_png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
