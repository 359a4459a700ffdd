"""Tests the interface of rollout/server_backend.py with a real vLLM server."""

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_backend import ServerBackend
from megatron_rl.rollout.vllm.client import ABORTED
from megatron_rl.rollout.vllm.server_api import VllmServer
from megatron_rl_sandbox.bounded_http import BoundedClient
from tests.support.packed_example import user_message
from tests.support.vllm_servers import TOKEN, connect_server_engine

LIMIT_S = 20.0


def test_a_server_keeps_the_contract(urls: list[str], random_model: Path, renderer: Renderer) -> None:
    """The label is that of the received weights, the counters change only with generated tokens,
    and an abort returns the tokens sampled so far.
    """
    context = renderer.prompt([user_message("Count.")])
    with connect_server_engine(urls[:1], renderer, name="contract") as engine:
        engine.load_weights(iter(load_file(random_model / "model.safetensors").items()), version=6)
        (server,) = engine._servers

        async def use(server: ServerBackend) -> list[str]:
            http = engine._http
            assert await server.read_weight_label(http, limit_s=LIMIT_S) == "contract.6"
            idle = [await server.read_progress(http, limit_s=LIMIT_S) for _ in range(2)]
            await engine.generate(context.token_ids, [], SamplingSettings(max_tokens=3, temperature=1.0, seed=1))
            busy = await server.read_progress(http, limit_s=LIMIT_S)
            assert idle[0] == idle[1] != busy and len(busy) == len(idle[0]) > 0
            reasons: list[str] = []
            append = engine._append_part

            def note(completion: object, part: object, *rest: object, **more: object) -> bool:
                reasons.append(part.finish_reason)
                return append(completion, part, *rest, **more)

            engine._append_part = note
            long = SamplingSettings(max_tokens=800, temperature=1.0, seed=2)
            reply = asyncio.create_task(engine.generate(context.token_ids, [], long))
            while await server.read_progress(http, limit_s=LIMIT_S) == busy:
                await asyncio.sleep(0.01)
            await server.abort_requests(http, limit_s=LIMIT_S)
            completion = await reply
            assert reasons[0] == ABORTED and 0 < len(completion.token_ids) == len(completion.weight_versions)
            return reasons

        assert len(engine.run(use(server))) >= 2, "what was cut off went on"


def test_a_server_that_is_not_there_is_an_endpoint_error() -> None:
    async def use(server: ServerBackend) -> None:
        http = BoundedClient(token=TOKEN)
        for call in (server.read_weight_label, server.read_progress, server.abort_requests):
            with pytest.raises(EndpointError, match=r"^/\w+: "):
                await call(http, limit_s=2.0)
        await http.close()

    asyncio.run(use(VllmServer("http://127.0.0.1:9", token=TOKEN)))
