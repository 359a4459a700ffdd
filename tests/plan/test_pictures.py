"""The plan of a step's pictures against hand-made sums, and its constants against what they are of."""

from dataclasses import replace

from megatron_rl.config import BatchSettings, EngineSettings, ModelSettings, RunSettings, SelectSettings, Settings, TaskSettings
from megatron_rl.models.released import known_spec
from megatron_rl.plan.pictures import AHEAD, CACHED_BYTES, KEPT, pictures
from megatron_rl.rollout import renderer
from megatron_rl.rollout.vllm import core

MODEL = known_spec("Qwen/Qwen2.5-VL-7B-Instruct")
PIXEL = 3 * 2 * 4
"""Bytes in patches: three colors, two frames, fp32."""


def settings_of(**given: object) -> Settings:
    batch = {"prompts_per_step": 8, "group_size": 16, "micro_batch_tokens": 4000} | given.pop("batch", {})
    return Settings(
        model=ModelSettings(max_pixels=500_000), engine=EngineSettings(max_model_len=8000, max_images=4, tp=given.pop("tp", 1)),
        batch=BatchSettings(**batch), select=SelectSettings(**given.pop("select", {})),
        task=TaskSettings(name="number_line", **given), run=RunSettings(dir="there"),
    )  # fmt: skip


def test_one_process() -> None:
    """128 episodes of 4 x 500,000 pixels; a micro-batch of 4,000 tokens has 784 pixels of each."""
    step = 8 * 16 * 2_000_000
    flying, training = PIXEL * step, CACHED_BYTES + AHEAD * PIXEL * 4000 * 784
    assert CACHED_BYTES < flying < training
    assert pictures(MODEL, settings_of(), world_size=1) == KEPT * step + training


def test_eight_processes() -> None:
    """An engine plays one group; others may encode all of it, and this rank as much of others'."""
    found = pictures(MODEL, settings_of(batch={"micro_batch_tokens": 40_000}), world_size=8)
    group = 16 * 2_000_000
    remembered = PIXEL * group
    assert remembered < CACHED_BYTES
    assert found == KEPT * group + remembered + 3 * 2 * group + AHEAD * PIXEL * 40_000 * 784


def test_an_episode_has_as_many_pixels_as_it_may() -> None:
    """task.max_pixels, or engine.max_images of model.max_pixels, whichever is less."""
    assert pictures(MODEL, settings_of(max_pixels=600_000), world_size=1) == pictures(
        MODEL, replace(settings_of(), model=ModelSettings(max_pixels=150_000)), world_size=1
    )
    assert pictures(MODEL, settings_of(max_pixels=9_000_000), world_size=1) == pictures(MODEL, settings_of(), world_size=1)


def test_a_context_bounds_its_pixels() -> None:
    narrow = replace(settings_of(), engine=EngineSettings(max_model_len=1000, max_images=1000))
    step = 128 * 784_000
    assert PIXEL * step < CACHED_BYTES
    assert pictures(MODEL, narrow, world_size=1) == (KEPT + PIXEL) * step + AHEAD * PIXEL * 4000 * 784


def test_rounds_and_what_of_them_is_trained_on() -> None:
    """Pictures of all rounds are kept, patches fly a round at a time, beside those that are remembered; with rank_by_std one round's worth
    is trained on."""
    step = 8 * 16 * 2_000_000
    assert pictures(MODEL, settings_of(select={"max_generations": 3}), world_size=1) == KEPT * 3 * step + PIXEL * step + CACHED_BYTES
    of_all, of_best = (
        pictures(MODEL, settings_of(select={"max_generations": 3, "rank_by_std": best}, batch={"micro_batch_tokens": 10**6}), world_size=8)
        for best in (False, True)
    )
    group = 16 * 2_000_000
    assert of_all - of_best == 3 * 4 * group + AHEAD * PIXEL * (3 * group - group)


def test_an_engine_over_two_ranks_plays_for_both() -> None:
    """Two groups, of which this rank trains on half; others see all of it."""
    group = 16 * 2_000_000
    training = PIXEL * 2 * group + 3 * (2 * group + group) + AHEAD * PIXEL * 4000 * 784
    assert PIXEL * 2 * group < CACHED_BYTES
    assert pictures(MODEL, settings_of(tp=2), world_size=8) == KEPT * 2 * group + training


def test_what_is_remembered_is_what_renderer_and_engine_say() -> None:
    assert CACHED_BYTES == renderer._CACHED_BYTES + core.CACHED_PATCHES * 4 * 3 * 2 * 14 * 14
