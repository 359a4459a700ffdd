"""Tests that servers answer requests in progress after a signal."""

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest
from fastapi import FastAPI

from megatron_rl_sandbox.connections import ConnectionRegistry
from megatron_rl_sandbox.http import serve_until_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_in_progress_is_answered(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """One signal ends the server once the response is sent. The server is all that its event loop
    runs, so a server that ends too early cancels the request."""
    app, has_begun = FastAPI(), Event()

    @app.get("/slow")
    async def slow() -> str:
        has_begun.set()
        await asyncio.sleep(0.5)
        return "done"

    def stop_during_request(address: str) -> str:
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(httpx.get, f"{address}/slow", trust_env=False, timeout=30)
            assert has_begun.wait(30)
            os.kill(os.getpid(), number)
            return asked.result().json()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answer = thread.submit(stop_during_request, address)
        asyncio.run(serve_until_signal(app, listener, registry=ConnectionRegistry(), path="/v1"))
        assert answer.result() == "done"
    assert capsys.readouterr() == (f"{address}/v1\n", "")
