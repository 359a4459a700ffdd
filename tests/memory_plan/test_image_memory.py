"""The plan of a step's image memory against sums by hand, and its constants against the modules
that define them."""

from dataclasses import replace

from megatron_rl.config import BatchSettings, EngineSettings, FilterSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.memory_plan.image_memory import (
    ENGINE_CACHE_PATCHES,
    NUM_PREFETCHED_MICRO_BATCHES,
    NUM_RENDER_THREADS,
    PIL_BYTES_PER_PIXEL,
    RENDER_BYTES_PER_PIXEL,
    RENDERER_CACHE_BYTES,
    plan_image_bytes,
)
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.rollout import renderer
from megatron_rl.rollout.vllm import engine_core
from tests.support.qwen3 import qwen3_4b_spec

MODEL = load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct")
PIXEL = 3 * 2 * 4
"""Bytes of a pixel in patches: three colors, two frames, fp32."""
ENGINE_BYTES = (1 << 20) * 4 * 3 * 2 * 14 * 14
MAKING_ALL = RENDER_BYTES_PER_PIXEL * NUM_RENDER_THREADS * 500_000


def settings_of(*, steps: int = 40, **given: object) -> Settings:
    batch = {"prompts_per_step": 8, "group_size": 16, "micro_batch_tokens": 4000} | given.pop("batch", {})
    return Settings(
        model=ModelSettings(max_pixels=500_000), engine=EngineSettings(max_model_len=8000, max_images=4, tp=given.pop("tp", 1)),
        batch=BatchSettings(**batch), filter=FilterSettings(**given.pop("filter", {})),
        task=TaskSettings(name="number_line", **given), run=RunSettings(dir="there", steps=steps),
    )  # fmt: skip


def test_one_process() -> None:
    """Memory of one process: 128 episodes of 4 x 500,000 pixels, as stored images and as rendered
    images. In the first step the caches are empty."""
    step = 8 * 16 * 2_000_000
    assert plan_image_bytes(MODEL, settings_of(steps=1), world_size=1) == (2 * PIL_BYTES_PER_PIXEL + PIXEL) * step + MAKING_ALL
    assert (
        plan_image_bytes(MODEL, settings_of(), world_size=1) == (2 * PIL_BYTES_PER_PIXEL + PIXEL) * step + RENDERER_CACHE_BYTES + MAKING_ALL
    )


def test_what_goes_on_over_an_update() -> None:
    """With max_staleness 2, two further batches of 128 episodes are in memory with images and
    patches. Each engine has an even share of them."""
    plain, ahead = (replace(settings_of(), run=RunSettings(dir="there", max_staleness=staleness)) for staleness in (0, 2))
    for world_size in (1, 4):
        more = 2 * (PIL_BYTES_PER_PIXEL + PIXEL) * 128 // world_size * 2_000_000
        assert plan_image_bytes(MODEL, ahead, world_size=world_size) == plan_image_bytes(MODEL, plain, world_size=world_size) + more


def test_an_engine_may_have_one_group_more_than_others() -> None:
    """With nine groups on eight engines, one engine runs two groups, and two groups of each further
    batch in flight."""
    nine = settings_of(batch={"prompts_per_step": 9})
    plain, ahead = (replace(nine, run=RunSettings(dir="there", max_staleness=staleness)) for staleness in (0, 2))
    more = plan_image_bytes(MODEL, ahead, world_size=8) - plan_image_bytes(MODEL, plain, world_size=8)
    assert more == 2 * (PIL_BYTES_PER_PIXEL + PIXEL) * 2 * 16 * 2_000_000


def test_eight_processes() -> None:
    """Memory of one of eight processes: an engine runs one group.

    Other ranks may encode all of it, and this rank encodes as much of theirs. A token has 784
    pixels.
    """
    settings = settings_of(batch={"micro_batch_tokens": 40_000})
    group, micro_batch = 16 * 2_000_000, 40_000 * 784
    training = RENDERER_CACHE_BYTES + 3 * 2 * group + NUM_PREFETCHED_MICRO_BATCHES * PIXEL * micro_batch + RENDER_BYTES_PER_PIXEL * 500_000
    assert plan_image_bytes(MODEL, settings, world_size=8) == PIL_BYTES_PER_PIXEL * group + training


def test_a_small_run_is_remembered_whole() -> None:
    """A small run fits the renderer's cache completely: two steps of two episodes, trained in one
    micro-batch."""
    settings = settings_of(steps=2, batch={"prompts_per_step": 1, "group_size": 2})
    step = 2 * 2_000_000
    training = (
        2 * (PIL_BYTES_PER_PIXEL + PIXEL) * step + NUM_PREFETCHED_MICRO_BATCHES * PIXEL * 4000 * 784 + RENDER_BYTES_PER_PIXEL * 500_000
    )
    assert 2 * (PIL_BYTES_PER_PIXEL + PIXEL) * step < RENDERER_CACHE_BYTES
    assert plan_image_bytes(MODEL, settings, world_size=1) == PIL_BYTES_PER_PIXEL * step + training


def test_an_episode_has_as_many_pixels_as_it_may() -> None:
    """An episode has at most task.max_pixels, or engine.max_images times model.max_pixels,
    whichever is less."""
    narrow = replace(settings_of(), model=ModelSettings(max_pixels=150_000))
    difference = RENDER_BYTES_PER_PIXEL * NUM_RENDER_THREADS * (500_000 - 150_000)
    assert (
        plan_image_bytes(MODEL, settings_of(max_pixels=600_000), world_size=1) == plan_image_bytes(MODEL, narrow, world_size=1) + difference
    )
    assert plan_image_bytes(MODEL, settings_of(max_pixels=9_000_000), world_size=1) == plan_image_bytes(MODEL, settings_of(), world_size=1)


def test_a_context_bounds_its_pixels() -> None:
    """A sequence of 1,000 tokens holds at most 784,000 pixels, whatever engine.max_images is."""
    narrow = replace(settings_of(), engine=EngineSettings(max_model_len=1000, max_images=1000))
    assert (
        plan_image_bytes(MODEL, narrow, world_size=1)
        == (2 * PIL_BYTES_PER_PIXEL + PIXEL) * 128 * 784_000 + RENDERER_CACHE_BYTES + MAKING_ALL
    )


def test_rounds_and_what_of_them_is_trained_on() -> None:
    """With several generation batches, images of all batches are kept, and patches exist for one
    batch at a time, plus the cached patches of earlier batches. With prefer_high_std, one batch's
    worth of rollouts is trained on."""
    step, group = 8 * 16 * 2_000_000, 16 * 2_000_000
    flying = PIL_BYTES_PER_PIXEL * (3 + 1) * step + PIXEL * step + ENGINE_BYTES + RENDERER_CACHE_BYTES + MAKING_ALL
    assert PIXEL * 2 * step > ENGINE_BYTES
    assert plan_image_bytes(MODEL, settings_of(filter={"max_num_gen_batches": 3}), world_size=1) == flying
    of_all, of_best = (
        plan_image_bytes(
            MODEL,
            settings_of(filter={"max_num_gen_batches": 3, "prefer_high_std": best}, batch={"micro_batch_tokens": 10**6}),
            world_size=8,
        )
        for best in (False, True)
    )
    training = (
        RENDERER_CACHE_BYTES + 3 * 2 * 3 * group + NUM_PREFETCHED_MICRO_BATCHES * PIXEL * 3 * group + RENDER_BYTES_PER_PIXEL * 500_000
    )
    assert of_all == PIL_BYTES_PER_PIXEL * 3 * group + training
    assert of_best == PIL_BYTES_PER_PIXEL * (3 + 1) * group + PIXEL * 3 * group + RENDERER_CACHE_BYTES + MAKING_ALL, (
        "rolling out takes more"
    )


def test_an_engine_over_two_ranks_plays_for_both() -> None:
    """An engine on two ranks runs two groups.

    This rank trains on half of them, in one micro-batch; other ranks encode all of them.
    """
    group = 16 * 2_000_000
    training = (
        RENDERER_CACHE_BYTES + 3 * (2 * group + group) + NUM_PREFETCHED_MICRO_BATCHES * PIXEL * group + RENDER_BYTES_PER_PIXEL * 500_000
    )
    assert (
        plan_image_bytes(MODEL, settings_of(tp=2, batch={"micro_batch_tokens": 10**6}), world_size=8)
        == PIL_BYTES_PER_PIXEL * 2 * group + training
    )


def test_what_is_remembered_is_what_renderer_and_engine_say() -> None:
    """The plan's constants for caches and threads equal those of the renderer and the engine."""
    assert renderer._CACHED_BYTES == RENDERER_CACHE_BYTES and renderer._THREADS == NUM_RENDER_THREADS
    assert engine_core.CACHED_PATCHES == ENGINE_CACHE_PATCHES


def test_patches_of_qwen3_are_larger() -> None:
    """Patches of Qwen3-VL have 1,536 values each.

    The engine caches the same number of patches as for other families.
    """
    step, model = 8 * 16 * 2_000_000, qwen3_4b_spec()
    remembered = (1 << 20) * 4 * 1536
    assert PIXEL * 2 * step > remembered > ENGINE_BYTES
    flying = PIL_BYTES_PER_PIXEL * (3 + 1) * step + PIXEL * step + remembered + RENDERER_CACHE_BYTES + MAKING_ALL
    assert plan_image_bytes(model, settings_of(filter={"max_num_gen_batches": 3}), world_size=1) == flying
