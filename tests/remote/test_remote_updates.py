"""Tests weight updates of real servers: the weights are verified on arrival, and every token's
logprob is that of its own weight version, whatever the caches contain.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.clients.endpoint_pool import EndpointError
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.weight_sender import Connection, require_matching
from megatron_rl.types import Rollout
from tests.parity.test_engine_versions import EPISODES, LIMITS, VERSIONS, episode, gaps, policies
from tests.support.engine_logprob_oracle import LOGPROB_BOUND
from tests.support.packed_example import make_prompts
from tests.support.vllm_servers import connect_server_engine

__all__ = ["policies"]


@pytest.fixture(scope="module")
def engine(urls: list[str], policies: list[Policy], renderer: Renderer) -> Iterator[ServerEngine]:
    with connect_server_engine(urls, renderer, name="versions", bucket_bytes=100_000) as engine:
        yield engine


def played(engine: ServerEngine, renderer: Renderer, policies: list[Policy]) -> list[Rollout]:
    """Run all episodes.

    Each version except the last serves until another third of all turns is generated.
    """
    conversations = [TokenConversation(engine, renderer, LIMITS) for _ in range(EPISODES)]
    episodes: list[asyncio.Task[None]] = []

    def num_said() -> int:
        return sum(len(each.turns) for each in conversations)

    async def some(num: int) -> None:
        if not episodes:
            episodes.extend(asyncio.create_task(episode(each, index)) for index, each in enumerate(conversations))
        while num_said() < num:
            assert not any(each.done() and each.exception() for each in episodes), "an episode has failed"
            await asyncio.sleep(0.01)

    async def rest() -> None:
        await asyncio.gather(*episodes)

    for version, policy in enumerate(policies):
        engine.load_weights(policy.hf_weights(), version=version)
        engine.run(some(EPISODES * (version + 1) - 2) if version < VERSIONS - 1 else rest())
    made = [Rollout("t", "e", 0, index, sequences=each.sequences, turns=each.turns) for index, each in enumerate(conversations)]
    for rollout in made:
        rollout.drop_patches()
    return made


def test_every_token_is_of_its_version(engine: ServerEngine, renderer: Renderer, policies: list[Policy]) -> None:
    """Turns that an update interrupts continue with the new weights after the existing tokens. A
    trainer with a given version agrees with the logprobs of this version's tokens and with no
    others.
    """
    rollouts = played(engine, renderer, policies)
    versions = {version for rollout in rollouts for version in rollout.sequences[0].weight_versions if version >= 0}
    assert versions == set(range(VERSIONS))
    spans = [rollout.sequences[0].weight_versions[slice(*turn.token_span)] for rollout in rollouts for turn in rollout.turns]
    assert all(span == sorted(span) for span in spans)
    sampled_by = [{version for version in rollout.sequences[0].weight_versions if version >= 0} for rollout in rollouts]
    assert any(len(each) == VERSIONS for each in sampled_by), "an episode that spans all versions"
    found = gaps(rollouts, policies)
    print({key: f"{value:.1e}" for key, value in sorted(found.items())}, "cut:", sum(len(set(span)) > 1 for span in spans))
    assert max(found[version, version] for version in range(VERSIONS)) <= LOGPROB_BOUND
    assert min(value for (version, trainer), value in found.items() if version != trainer) > 100 * LOGPROB_BOUND, (
        "versions can be told apart"
    )
    assert engine.metrics().keys() == {"weight_sync/pause_s", "weight_sync/transfer_s"}
    assert 0 < engine.metrics()["weight_sync/transfer_s"] < engine.metrics()["weight_sync/pause_s"]


def without_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerEngine, "cache_salt", "the same")


def without_reset(patch: pytest.MonkeyPatch) -> None:
    end = Connection.finish_update

    def ended(line: Connection, label: str) -> None:
        call = line.server.call
        patch.setattr(line.server, "call", lambda path, *given, **more: None if "encoder" in path else call(path, *given, **more))
        end(line, label)
        patch.setattr(line.server, "call", call)

    patch.setattr(Connection, "finish_update", ended)


@pytest.mark.parametrize("mistake", [without_salt, without_reset])
def test_what_old_weights_computed_is_noticed(
    mistake: Callable, engine: ServerEngine, renderer: Renderer, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mistake(patch)
        rollouts = played(engine, renderer, policies)
    found = gaps(rollouts, policies)
    print({key: f"{value:.1e}" for key, value in sorted(found.items())})
    assert max(value for (version, trainer), value in found.items() if version == trainer) > 10 * LOGPROB_BOUND
    for server in engine._servers:
        server.call("/reset_encoder_cache", {})
        server.call("/reset_prefix_cache", {})


def test_a_bit_that_turns_over_on_the_way_is_noticed(engine: ServerEngine, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one bit of the weights changes during the transfer, the server that received it is
    unhealthy, and the other server continues. The next full update restores it.
    """
    tensors = load_file(random_model / "model.safetensors")
    bad = engine.urls[1]
    send, num = Connection.send_bucket, 0

    def flipped(line: Connection, bucket: object, flat: torch.Tensor) -> None:
        nonlocal num
        if line.server.url == bad:
            num += 1
            if num == 3:
                flat = flat.clone()
                flat[-20] ^= 1
        send(line, bucket, flat)

    monkeypatch.setattr(Connection, "send_bucket", flipped)
    engine.load_weights(iter(tensors.items()), version=11)
    assert num > 3 and [server.is_healthy for server in engine._servers] == [True, False]
    assert [label(engine, url).rpartition(".")[2] == "11" for url in engine.urls] == [True, False]
    engine.load_weights(iter(tensors.items()), version=12)
    assert [server.is_healthy for server in engine._servers] == [True, True]


def test_what_real_servers_say_that_they_hold_is_compared(engine: ServerEngine, random_model: Path) -> None:
    """vLLM's own /weight_checker computes the SHA-256 of every parameter (on CPUs). After an
    update, both servers report the same values. A server with one changed parameter differs only in
    this parameter and would not become healthy.
    """
    tensors, (first, second) = load_file(random_model / "model.safetensors"), engine._servers
    engine.load_weights(iter(tensors.items()), version=15)
    began = time.perf_counter()
    held = first.checksums()
    print(f"{len(held)} parameters in {time.perf_counter() - began:.3f} s")
    assert held == second.checksums() and len(held) > 20 and all(name.startswith("dp0:pp0:pcp0:tp0:") for name in held)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    changed = {**tensors, name: tensors[name].nextafter(tensors[name] + 1)}
    engine._control.sender.send(iter(changed.items()), "versions.changed", urls=[second.url])
    line = rf"has different weights from {first.url}: 1 tensor\(s\) differ, starting with dp0.*layers.0.mlp.down_proj.weight"
    with pytest.raises(EndpointError, match=line):
        require_matching(second.checksums(), held, reference_url=first.url)
    engine.load_weights(iter(tensors.items()), version=16)
    assert held == second.checksums() and all(server.is_healthy for server in engine._servers)


def label(engine: ServerEngine, url: str) -> str:
    async def asked() -> str:
        return await engine._health_monitor.check_version(next(server for server in engine._servers if server.url == url))

    return engine.run(asked())


@pytest.mark.parametrize("mistake", ["missing", "unknown", "misshapen"])
def test_an_update_that_is_none_is_not_served(engine: ServerEngine, random_model: Path, mistake: str) -> None:
    """No server accepts the update, and the log names the reason. The next update is accepted."""
    tensors = load_file(random_model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    changed = {
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
        "unknown": tensors | {name.replace("layers.0.", "layers.77."): tensors[name]},
        "misshapen": tensors | {name: tensors[name][1:]},
    }[mistake]
    said: list[str] = []
    engine._health_monitor.log = said.append
    engine.load_weights(iter(changed.items()), version=20)
    assert not any(server.is_healthy for server in engine._servers)
    text = {"missing": "were not sent", "unknown": "no parameter for", "misshapen": "was sent with shape"}[mistake]
    assert len(said) == 3 and all(text in line for line in said[:2]) and said[2].startswith("no engine is healthy"), said
    engine.load_weights(iter(tensors.items()), version=21)
    assert all(server.is_healthy for server in engine._servers)


def test_two_runs_do_not_have_one_engine(engine: ServerEngine, urls: list[str], renderer: Renderer) -> None:
    """A second run is refused with the owner of the server, and the first run continues."""
    with pytest.raises(ValueError, match=f"^engine.urls={urls[0]}: cannot be used .*this engine is in use by versions of a test"):
        connect_server_engine(urls, renderer, name="other").__enter__()


def test_one_that_has_other_weights_is_given_those_that_are_served(engine: ServerEngine, random_model: Path, renderer: Renderer) -> None:
    """A server with other weights, such as a restarted one, gets no requests until it has received
    all weights and reports their label. Its interrupted requests are completed.
    """
    engine.load_weights(iter(load_file(random_model / "model.safetensors").items()), version=40)
    said: list[str] = []
    engine._health_monitor.log = said.append
    context, server = make_prompts(renderer)[1], engine._servers[0]

    async def main() -> list[Completion]:
        samplings = [SamplingSettings(300, 1.0, seed=index) for index in range(6)]
        turns = [asyncio.create_task(engine.generate(context.token_ids, context.images, sampling)) for sampling in samplings]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.call, "/update_weight_version", {"new_version": "default"})
        return await asyncio.gather(*turns)

    async def until_back() -> str:
        """Wait until the server is healthy again.

        The turns may have ended before its health check.
        """
        while not said or not all(each.is_healthy for each in engine._servers):
            await asyncio.sleep(0.1)
        return await engine._health_monitor.check_version(server)

    completions = engine.run(main())
    assert all(completion.weight_versions == [40] * len(completion.token_ids) for completion in completions)
    assert engine.run(until_back()) == engine.weights_label
    assert said == [f"engine {server.url}: has weights default, not {engine.weights_label}"]
