"""Settings of listener clients, and a listener server in a thread, over a real socket."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server

import uvicorn

from megatron_rl.config import ListenerSettings
from megatron_rl.tasks.lewis.listener_client import ImageFile
from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import make_uvicorn_config
from tests.support.fake_listener import FakeEngineHolder, build_app, yes_probability
from tests.support.model_server_process import encode_png, make_noise_image

PICTURES = [make_noise_image(seed, side=28) for seed in range(12)]
ENCODED_PICTURES = [ImageFile(encode_png(picture)) for picture in PICTURES]


@contextmanager
def serve_listener(engine: FakeEngineHolder, *roots: Path, **options: object) -> Iterator[str]:
    """Run the application in a thread, over a real socket."""

    with create_server(("127.0.0.1", 0)) as place:
        server = uvicorn.Server(make_uvicorn_config(build_app(engine, *roots, **options), ConnectionRegistry()))
        server.config.timeout_graceful_shutdown = 0
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def listener_settings(*urls: str, **changes: object) -> ListenerSettings:
    return ListenerSettings(
        **{"urls": list(urls), "backoff_s": 0.01, "timeout_s": 20.0, "outage_timeout_s": 5.0, "max_attempts": 3, **changes}
    )


def expected_probabilities(indices: tuple[int, ...], question: str) -> list[float]:
    return [yes_probability(PICTURES[index], question) for index in indices]
