"""Tests 500 random episodes per tool protocol: the trained tokens are the sampled tokens, the ids
decode to the messages, and images and positions equal those of transformers.
"""

import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL.Image import Resampling
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from megatron_rl.config import ModelSettings
from megatron_rl.models.mrope import mrope_positions
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Rollout, Status, StopReason
from tests.support.random_episodes import PROTOCOLS, RandomEnv, RandomPolicy, render_chatml, run_random_episode

NUM = 500
MIN_PIXELS, MAX_PIXELS = 3136, 12800
SETTINGS = EpisodeSettings(temperature=1.0, max_turns=6, max_new_tokens=40, max_sequence_tokens=2000, max_images=5, seed=0)


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS))


@pytest.fixture(scope="module")
def hf(random_model: Path) -> Qwen2_5_VLModel:
    """Return the model without weights; only its positions are used."""
    with torch.device("meta"):
        return Qwen2_5_VLModel(Qwen2_5_VLConfig.from_pretrained(random_model))


@pytest.mark.known_failure("history-retokenized")
@pytest.mark.known_failure("observations-learned")
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_random_transcripts(renderer: Renderer, hf: Qwen2_5_VLModel, protocol: ToolProtocol) -> None:
    ends, num_images, num_misfits = set(), 0, 0
    for seed in range(NUM):
        draw = random.Random(seed)
        limits, engine = replace(SETTINGS, max_sequence_tokens=draw.randrange(600, 2000)), RandomPolicy(renderer, draw)
        rollout, world = run_random_episode(seed, renderer=renderer, engine=engine, protocol=protocol, settings=limits)
        if rollout.status is Status.FAILED:
            assert "raise engine.max_model_len" in rollout.reason and engine.replies == []
            num_misfits += 1
            continue
        check_sampled(rollout, engine)
        check_text(rollout, engine, world, renderer)
        check_images(rollout, world, renderer)
        check_positions(rollout, renderer, hf)
        ends.add(rollout.stop_reason)
        num_images += sum(len(turn.images) for turn in rollout.turns)
    assert ends == {StopReason.DONE, StopReason.MAX_TURNS, StopReason.MAX_IMAGES, StopReason.MAX_TOKENS}, "every limit was met"
    assert num_misfits < NUM / 3, "most questions have room"
    assert num_images > NUM / 2, "observations held pictures"


def check_sampled(rollout: Rollout, engine: RandomPolicy) -> None:
    """Check that the loss mask is 1 exactly at the sampled tokens, and that the engine's input of
    every turn, including the images, is what the sequence records.
    """
    (context,) = rollout.sequences
    sampled = [0] * len(context.token_ids)
    for turn, asked, shown, said in zip(rollout.turns, engine.prompts, engine.prompt_images, engine.replies, strict=True):
        start, end = turn.token_span
        assert context.token_ids[:start] == asked and context.token_ids[start:end] == said
        assert context.images[: len(shown)] == shown
        assert context.rollout_logprobs[start:end] == [-1.0 - number for number in range(end - start)]
        sampled[start:end] = [1] * (end - start)
    assert context.loss_mask == sampled
    assert [value for value, mask in zip(context.rollout_logprobs, sampled, strict=True) if not mask] == [0.0] * sampled.count(0)


def check_text(rollout: Rollout, engine: RandomPolicy, world: RandomEnv, renderer: Renderer) -> None:
    """Check that the ids decode to the conversation as written by hand."""
    (context,) = rollout.sequences
    names = [name for name in renderer.tokenizer.get_added_vocab() if name.startswith("<|")]
    images = list(context.images)
    text = render_chatml(world.sent_messages[0], images, special_tokens=names)
    for number, ids in enumerate(engine.replies):
        text += renderer.tokenizer.decode(ids)
        if number + 1 < len(engine.replies):
            text += (
                ("" if ids[-1] == renderer.end_id else "<|im_end|>")
                + "\n"
                + render_chatml(world.sent_messages[number + 1], images, special_tokens=names)
            )
    assert renderer.tokenizer.decode(context.token_ids) == text
    assert not images, "every image has its place"


def check_images(rollout: Rollout, world: RandomEnv, renderer: Renderer) -> None:
    """Check that each image has one run of placeholders, as long as its grid requires, and that
    each image is the image of its message, resized once and within the limits.

    Qwen makes no side shorter than 28 pixels, even if the area exceeds the limit for that
    reason.
    """
    (context,) = rollout.sequences
    own = renderer.image_token_id
    runs = [len(list(run)) for is_image, run in groupby(context.token_ids, key=lambda token: token == own) if is_image]
    grids = np.array([image.grid for image in context.images]).reshape(-1, 3)
    assert runs == (grids.prod(1) // 4).tolist()
    shown = [
        part["image"] for messages in world.sent_messages for message in messages for part in message["content"] if part["type"] == "image"
    ]
    assert len(context.images) <= len(shown), "the last observation may not have fitted"
    for image, picture in zip(context.images, shown, strict=False):
        frames, rows, columns = image.grid
        assert image.patch_PC.shape == (frames * rows * columns, 3 * 2 * 14 * 14)
        assert image.pil.size == (14 * columns, 14 * rows)
        assert MIN_PIXELS <= 14 * 14 * rows * columns <= MAX_PIXELS or min(image.pil.size) == 28
        resized = picture.convert("RGB").resize(image.pil.size, Resampling.BICUBIC)
        assert image.pil.tobytes() == resized.tobytes()


def check_positions(rollout: Rollout, renderer: Renderer, hf: Qwen2_5_VLModel) -> None:
    (context,) = rollout.sequences
    ids = torch.tensor([context.token_ids])
    grid = torch.tensor([image.grid for image in context.images]) if context.images else None
    expected, _ = hf.get_rope_index(ids, mm_token_type_ids=(ids == renderer.image_token_id).int(), image_grid_thw=grid)
    assert torch.equal(mrope_positions(context.token_ids, context.images, renderer.image_token_id), expected[:, 0])
