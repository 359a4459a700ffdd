"""Tests 200 clients of a listener that dies midway, over connections that are cut: no score is lost
or wrong."""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_rl.errors import InfraError
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.tasks.lewis.listener_client import ListenerClient
from tests.chaos.proxy import Proxy
from tests.support.listener_clients import ENCODED_PICTURES, expected_probabilities, listener_settings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "fake_listener.py"


def started(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(port), "--delay-s", "0.02"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("http://")
    return process


def test_nothing_is_lost_when_lines_are_cut_and_a_listener_starts_anew(tmp_path: Path) -> None:
    """All of 600 scores arrive and equal the known ones: 200 clients ask three questions each, at
    two addresses. One piece in ten is cut off with its connection, in both directions; the listener
    behind both addresses is killed midway and restarts without the images."""
    port = find_free_port("127.0.0.1")
    answers: dict[tuple[int, int], tuple[tuple[int, ...], str, list[float]]] = {}

    async def one(number: int, urls: list[str]) -> None:
        client = ListenerClient(
            listener_settings(*urls, max_attempts=40, backoff_s=0.05, outage_timeout_s=60.0, timeout_s=30.0, chunk_size=2)
        )
        await begun(client)
        try:
            for turn in range(3):
                indices = (number % 12, (number + 1 + turn) % 12, (number + 5 + turn) % 12)
                question = f"Is it {number % 50} {turn}?"
                answer = await client.score_images([ENCODED_PICTURES[index] for index in indices], question)
                answers[number, turn] = indices, question, answer.yes_probabilities
        finally:
            await client.close()

    async def begun(client: ListenerClient) -> None:
        """Start the client, and repeat the start if its health check is cut off, as a run would be
        restarted."""
        for _ in range(20):
            try:
                return await client.start()
            except InfraError:
                await asyncio.sleep(0.05)
        raise AssertionError("no listener could be greeted in 20 tries")

    async def restarted(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        while len(answers) < 150:
            await asyncio.sleep(0.01)
        process.kill()
        process.wait()
        await asyncio.sleep(0.3)
        return await asyncio.to_thread(started, port)

    async def main(urls: list[str], process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        *_, again = await asyncio.gather(*(one(number, urls) for number in range(200)), restarted(process))
        return again

    with ExitStack() as closing:
        wires = [closing.enter_context(Proxy(port)), closing.enter_context(Proxy(port))]
        for wire in wires:
            wire.cut_share = 0.1
        process = started(port)
        try:
            process = asyncio.run(main([f"http://127.0.0.1:{wire.port}" for wire in wires], process))
        finally:
            process.kill()
            process.wait()
    assert len(answers) == 600 and sum(wire.num_cut for wire in wires) > 60
    for indices, question, told in answers.values():
        assert told == pytest.approx(expected_probabilities(indices, question))
