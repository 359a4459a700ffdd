"""Host memory plan for the images of a step on one rank.

The plan assumes that every episode has the maximum number and size of images and that groups are
distributed evenly. An engine that is faster than the others may get more groups than
planned (rollout/load_balancer.py).

During the rollout, each image exists as a Pillow image and as the patches passed to vLLM until its
episode ends. During training, host memory contains the images exchanged with other ranks
(distributed/image_exchange.py) and the patches of the current and the next micro-batch
(policy/patches.py). In both phases, the renderer's cache may also contain images from earlier
steps. Source images are counted once per episode, at the size of the rendered images. All
images of a generation batch are rendered before the first episode ends, so the source images of all
episodes are in memory at the same time.

The plan does not count the additional size of large source images, the episodes of an evaluation,
or the memory of user-defined tasks.
"""

from megatron_rl.config import Settings
from megatron_rl.models.model_spec import ModelSpec

PIL_BYTES_PER_PIXEL = 4
"""Bytes per pixel of a Pillow image, which stores colors in 32-bit words."""
TRANSFER_BYTES_PER_PIXEL = 3
"""Bytes per pixel of images exchanged between ranks."""
NUM_PREFETCHED_MICRO_BATCHES = 2
"""Number of micro-batches with patches in memory: the current and the next one."""
RENDER_BYTES_PER_PIXEL, NUM_RENDER_THREADS = 15, 4
"""Temporary bytes per pixel during rendering, and number of images rendered at the same time.

The temporary bytes come on top of the bytes of the image and its patches. A total of 43 bytes per
pixel was measured.
"""
RENDERER_CACHE_BYTES = 1 << 30
"""Bytes of the renderer's cache for images and their patches (rollout/renderer.py)."""
ENGINE_CACHE_PATCHES = 1 << 20
"""Number of patches that the engine caches until it goes to sleep (rollout/vllm/engine_core.py)."""


def plan_image_bytes(model: ModelSpec, settings: Settings, *, world_size: int) -> int:
    """Return the bytes of host memory for images on a rank that runs an engine."""
    vision, batch, select = model.vision, settings.batch, settings.filter
    token_pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    of_patches = 4 * vision.in_channels * vision.temporal_patch_size  # fp32
    episode = settings.engine.max_images * settings.model.max_pixels
    episode = min(episode, settings.task.max_pixels or episode, settings.engine.max_model_len * token_pixels)
    largest = min(settings.model.max_pixels, episode)
    num_engines = max(1, world_size // settings.engine.tp)
    round_pixels = episode * batch.group_size * -(-batch.prompts_per_step // num_engines)
    step_pixels = round_pixels * select.max_num_gen_batches
    trained = batch.prompts_per_step * batch.group_size * (1 if select.prefer_high_std else select.max_num_gen_batches)
    share = episode * -(-trained // world_size)
    seen = step_pixels + (share if world_size > 1 else 0)
    shown = 0 if world_size == 1 else TRANSFER_BYTES_PER_PIXEL * (min(step_pixels, share * settings.engine.tp) + share)
    micro_batch = min(share, max(batch.micro_batch_tokens * token_pixels, episode))
    engine_bytes = ENGINE_CACHE_PATCHES * vision.patch_dim * 4
    earlier = min(engine_bytes, of_patches * (step_pixels - round_pixels))  # generation batches with patches in the engine's cache
    before = min(
        RENDERER_CACHE_BYTES, (PIL_BYTES_PER_PIXEL + of_patches) * (settings.run.steps - 1) * seen
    )  # steps with images in the renderer's cache
    rolling_out = (
        (PIL_BYTES_PER_PIXEL + of_patches) * round_pixels + earlier + before + RENDER_BYTES_PER_PIXEL * NUM_RENDER_THREADS * largest
    )
    remembered = min(RENDERER_CACHE_BYTES, (PIL_BYTES_PER_PIXEL + of_patches) * settings.run.steps * seen)
    training = remembered + shown + NUM_PREFETCHED_MICRO_BATCHES * of_patches * micro_batch + RENDER_BYTES_PER_PIXEL * largest
    under_way = settings.run.max_staleness * round_pixels  # episodes that continue across an update, with their patches
    return PIL_BYTES_PER_PIXEL * step_pixels + (PIL_BYTES_PER_PIXEL + of_patches) * under_way + max(rolling_out, training)
