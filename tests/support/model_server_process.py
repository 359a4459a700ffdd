"""Starts a model server as a separate process, and creates images for requests to it."""

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]

IMAGE_SIDE = 84
"""Side of an image in pixels; such an image has three by three tokens and is never resized."""
NANO_ARGS = ("--kv-cache-mib", "32", "--max-model-len", "512", "--max-pixels", "12544")


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen[str]
    headers: Mapping[str, str] = field(default_factory=dict)

    def post(self, path: str, body: object, *, timeout_s: float = 60) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s, trust_env=False, headers=self.headers)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def start_model_server(kind: str, model: Path, *words: object, variables: Mapping[str, str] = {}) -> ServerProcess:
    """Start a server and wait until it accepts requests.

    Raises AssertionError if it exits first. The port is 0 unless `words` specifies another.
    """
    program = f"megatron_rl.tasks.lewis.server.{kind}_app"
    command = [sys.executable, "-m", program, "--model", str(model), "--port", "0", *NANO_ARGS, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("http://"):
            return ServerProcess(line.strip(), process)
    raise AssertionError(f"{command} ended with {process.wait()}")


@contextmanager
def running_model_server(kind: str, model: Path, *words: object, variables: Mapping[str, str] = {}) -> Iterator[ServerProcess]:
    server = start_model_server(kind, model, *words, variables=variables)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def make_noise_image(seed: int, *, side: int = IMAGE_SIDE) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encode_png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
