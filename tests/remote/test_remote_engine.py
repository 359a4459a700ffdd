"""Tests engines on real servers: the sampled tokens and their logprobs, with the same checks as a
colocated engine, and against a colocated engine.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.vllm.client import GenerateClient
from megatron_rl.types import TokenSequence
from tests.parity.test_engine import (
    check_sampled_frequencies,
    test_a_full_context_is_unfinished,
    test_a_refused_request_leaves_the_others_alone,
    test_a_stop_text_ends_a_turn_and_stays_in_it,
    test_exactly_the_stop_ids_end_a_turn,
    test_logprobs_are_those_of_the_policy,
    test_wrong_placeholders_are_refused,
)
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, generate_all, open_engine
from tests.support.packed_example import make_picture, make_prompts, user_message
from tests.support.vllm_servers import ENGINE_SETTINGS, connect_server_engine, serve_engines

__all__ = [
    "test_a_full_context_is_unfinished", "test_a_refused_request_leaves_the_others_alone", "test_a_stop_text_ends_a_turn_and_stays_in_it",
    "test_exactly_the_stop_ids_end_a_turn", "test_logprobs_are_those_of_the_policy",
    "test_wrong_placeholders_are_refused",
]  # fmt: skip


@pytest.fixture(scope="module")
def hf(random_model: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(urls: list[str], random_model: Path, renderer: Renderer) -> Iterator[ServerEngine]:
    with connect_server_engine(urls, renderer) as engine:
        engine.load_weights(iter(load_file(random_model / "model.safetensors").items()), version=4)
        yield engine


@pytest.mark.parametrize("num", [800, pytest.param(3000, marks=pytest.mark.long)])
def test_frequencies_follow_the_probabilities(
    num: int, engine: ServerEngine, hf: Qwen2_5_VLForConditionalGeneration, renderer: Renderer
) -> None:
    """The frequencies over all seeds match the probabilities of transformers' model."""
    check_sampled_frequencies(engine, hf, renderer, num=num)


def test_it_samples_what_the_engine_in_this_process_does(engine: ServerEngine, random_model: Path, renderer: Renderer) -> None:
    """For conversations with images, both servers sample the same tokens as a colocated engine,
    with equal logprobs, and label them with the version of the weights.
    """
    samplings = [SamplingSettings(max_tokens=24, temperature=1.0, seed=2**40 + index) for index in range(12)]
    contexts = (make_prompts(renderer) * 2)[: len(samplings)]
    with open_engine(random_model, renderer) as local:
        expected = generate_all(local, contexts, samplings)
    completions = generate_all(engine, contexts, samplings)
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.token_ids, ours.is_stopped) == (theirs.token_ids, theirs.is_stopped)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.weight_versions == [4] * len(ours.token_ids)


@pytest.mark.known_failure("two-image-processors")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_picture_is_read_as_the_renderer_made_it(tp: int, random_model: Path, tmp_path: Path) -> None:
    """The server must not resize an image again. With narrow limits, a second resize would shrink
    it from 7 x 5 to 5 x 4 tokens. The server runs with one process, or with two processes that
    split the model. Oracle: a colocated engine.
    """
    limits = {"min_pixels": 19_600, "max_pixels": 20_000}
    renderer = Renderer(ModelSettings(path=str(random_model), **limits))
    context = renderer.prompt([user_message("what is this?", make_picture(0, 168, 112).resize((150, 100)))])
    assert context.images[0].num_tokens == 35
    sampling = SamplingSettings(max_tokens=12, temperature=1.0, seed=5)
    with open_engine(random_model, renderer) as local:
        (expected,) = generate_all(local, [context], [sampling])
    given = {"settings": replace(ENGINE_SETTINGS, tp=tp)}
    started = serve_engines(random_model, tmp_path, num_servers=1, pixel_limits=limits, **given)
    with started as urls, connect_server_engine(urls, renderer, name="narrow", **given) as engine:
        engine.load_weights(iter(load_file(random_model / "model.safetensors").items()), version=0)
        (completion,) = generate_all(engine, [context], [sampling])
    assert completion.token_ids == expected.token_ids and completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record for each image of a request the server, and the image's key if the image itself was
    sent, else ''.
    """
    told: list[tuple[str, str]] = []
    shown = GenerateClient.image_reference

    async def watched(asking: GenerateClient, image: object, server: object) -> dict[str, object]:
        made = await shown(asking, image, server)
        told.append((server.url, image.key if made["url"] else ""))
        return made

    monkeypatch.setattr(GenerateClient, "image_reference", watched)
    return told


def test_a_picture_is_sent_once_to_each_server(engine: ServerEngine, renderer: Renderer, sent: list[tuple[str, str]]) -> None:
    """Later requests refer to the image by its key, including the rest of the same turn. A server
    that has dropped the image receives it again.
    """
    context = renderer.prompt([user_message("Look.", make_picture(51, 112, 56))])

    async def episode() -> None:
        for turn in range(3):
            completion = await engine.generate(context.token_ids, context.images, SamplingSettings(8, 1.0, seed=turn))
            context.extend(completion.token_ids, logprobs=completion.logprobs)
            more = renderer.observation(context, [user_message("And this?", make_picture(52 + turn, 84, 56))])
            context.extend(more.token_ids, images=tuple(more.images))
            if turn == 1:
                for server in engine._servers:
                    await asyncio.to_thread(server.call, "/reset_mm_cache", {})

    engine.run(episode())
    keys = [image.key for image in context.images]
    assert {url for url, _ in sent} <= {sent[0][0]}, "an episode stays with its server"
    third = ["", "", keys[2], *keys[:3], "", "", ""]  # refused, then resent with all images for the first token, then the rest
    assert [key for _, key in sent] == [keys[0], "", "", keys[1], "", "", *third]


def test_a_group_that_begins_together_sends_its_picture_once(
    engine: ServerEngine, renderer: Renderer, random_model: Path, sent: list[tuple[str, str]]
) -> None:
    """The image is sent once to each server. The sampled tokens equal those of a colocated engine,
    including the first token of the turn that sends the image.
    """
    contexts = [renderer.prompt([user_message("Look.", make_picture(61, 112, 56))]) for _ in range(8)]
    samplings = [SamplingSettings(12, 1.0, seed=index) for index in range(8)]
    with open_engine(random_model, renderer) as local:
        expected = generate_all(local, contexts, samplings)
    completions = generate_all(engine, contexts, samplings)
    (key,) = {context.images[0].key for context in contexts}
    assert sorted(each for each in sent if each[1]) == sorted((url, key) for url in engine.urls)
    assert len(sent) == 8 + 2, "who sends it asks twice"
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.token_ids, ours.is_stopped) == (theirs.token_ids, theirs.is_stopped)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_a_stop_text_over_the_first_token_of_who_sends_a_picture(engine: ServerEngine, renderer: Renderer, random_model: Path) -> None:
    """A stop text that spans the first token of the turn that sends the image, and the second
    token, is found although no single request sampled it whole. It ends the turn at the second
    token, as in a colocated engine.
    """
    context = renderer.prompt([user_message("Look.", make_picture(62, 112, 56))])
    with open_engine(random_model, renderer) as local:
        for seed in range(40):
            (said,) = generate_all(local, [context], [SamplingSettings(2, 1.0, seed=seed)])
            first, second = (renderer.tokenizer.decode([token]) for token in said.token_ids)
            if (first + second).isascii() and first and second:
                break
        sampling = SamplingSettings(12, 1.0, seed=seed, stop=(first[-1] + second[0],))
        (expected,) = generate_all(local, [context], [sampling])
    assert (len(expected.token_ids), expected.is_stopped) == (2, True) and context.images[0].key not in engine._servers[0].known_images
    (completion,) = generate_all(engine, [context], [sampling])
    assert (completion.token_ids, completion.is_stopped) == (expected.token_ids, True)


def test_episodes_are_spread_over_the_servers(engine: ServerEngine, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is assigned to the least busy server and stays there."""
    asked: dict[int, list[str]] = {}
    ask = GenerateClient.generate

    async def watched(asking: GenerateClient, server: object, turn: object, said: object, **labels: str) -> object:
        asked.setdefault(turn.sampling.seed // 10, []).append(server.url)
        return await ask(asking, server, turn, said, **labels)

    monkeypatch.setattr(GenerateClient, "generate", watched)

    async def episode(index: int) -> None:
        context = make_prompts(renderer)[0]
        for turn in range(2):
            completion = await engine.generate(context.token_ids, [], SamplingSettings(4, 1.0, seed=10 * index + turn))
            context.extend(completion.token_ids, logprobs=completion.logprobs)

    async def main() -> None:
        await asyncio.gather(*(episode(index) for index in range(6)))

    engine.run(main())
    assert all(len(set(urls)) == 1 for urls in asked.values()) and len(asked) == 6
    homes = [urls[0] for urls in asked.values()]
    assert sorted(homes.count(url) for url in engine.urls) == [3, 3]


def test_a_turn_that_was_cut_is_what_it_would_have_been(engine: ServerEngine, renderer: Renderer) -> None:
    """Turns that are interrupted repeatedly by a pause, as in weight updates, have the same ids,
    logprobs and ends as uninterrupted turns. Stop texts, whole or split between requests, and stop
    ids are included.
    """
    contexts = make_prompts(renderer) * 2
    stop = ("z", "the", "ing ")
    samplings = [SamplingSettings(80, 2.0, seed=index, stop=stop if index % 2 else ()) for index in range(len(contexts))]
    expected = generate_all(engine, contexts, samplings)
    cuts = 0

    async def main() -> list:
        nonlocal cuts
        turns = [asyncio.create_task(engine.generate(s.token_ids, s.images, each)) for s, each in zip(contexts, samplings, strict=True)]
        while not all(turn.done() for turn in turns):
            await asyncio.sleep(0.05)
            await engine._pause_requests()
            cuts += 1
            engine._is_serving.set()
        return [turn.result() for turn in turns]

    completions = engine.run(main())
    assert cuts > 2
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.token_ids, ours.is_stopped) == (theirs.token_ids, theirs.is_stopped)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=LOGPROB_BOUND)
        assert len(ours.weight_versions) == len(ours.token_ids)


def test_what_is_given_up_is_given_up_on_the_server(engine: ServerEngine, renderer: Renderer) -> None:
    context: TokenSequence = make_prompts(renderer)[0]

    async def main() -> list[str]:
        long = asyncio.create_task(engine.generate(context.token_ids, [], SamplingSettings(900, 1.0, seed=1)))
        await asyncio.sleep(0.5)
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await asyncio.sleep(1.0)
        answers = [await engine._http.request("GET", f"{url}/metrics", timeout_s=60.0, max_bytes=16 << 20) for url in engine.urls]
        return [line for answer in answers for line in answer.text.splitlines() if line.startswith("vllm:num_requests_running")]

    running = engine.run(main())
    assert len(running) == 2 and all(line.endswith(" 0.0") for line in running)
