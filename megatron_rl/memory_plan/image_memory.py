"""The plan of what a step's pictures take on the host, on a rank, if every episode has as many and as large as it may and groups are dealt
evenly (an engine that is faster may take more: rollout/load_balancer.py).

While engines roll out: each picture as Pillow has it, and the patches that vLLM is given, until its episode is over. While the policy is
trained: what is shown to other ranks and what they show (distributed/image_exchange.py), and the patches of the micro-batches that run and
come next (policy/patches.py). In both the renderer remembers pictures of any step. Pictures as they are stored are counted once an
episode, as large as what is shown: while an engine computes a step, threads render all of a round, and none of its episodes can let go.
Not counted: what is larger of them, the episodes of an evaluation, and what a task of the user's own keeps.
"""

from megatron_rl.config import Settings
from megatron_rl.models.model_spec import ModelSpec

PIL_BYTES_PER_PIXEL = 4
"""Bytes of a pixel in a Pillow picture, whose colors lie in words of 32 bits."""
TRANSFER_BYTES_PER_PIXEL = 3
"""Bytes of a pixel where ranks show it to each other."""
NUM_PREFETCHED_MICRO_BATCHES = 2
"""Micro-batches whose patches exist at once: the one that runs, and the next."""
RENDER_BYTES_PER_PIXEL, NUM_RENDER_THREADS = 15, 4
"""Bytes of a pixel beside picture and patches while these are made (measured: 43 with them), and pictures that are made at once."""
RENDERER_CACHE_BYTES = 1 << 30
"""Of pictures with their patches that the renderer remembers (rollout/renderer.py)."""
ENGINE_CACHE_PATCHES = 1 << 20
"""That the engine remembers until it sleeps (rollout/vllm/engine_core.py)."""


def plan_image_bytes(model: ModelSpec, settings: Settings, *, world_size: int) -> int:
    """Bytes of one rank, which leads an engine."""
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
    earlier = min(engine_bytes, of_patches * (step_pixels - round_pixels))  # rounds, whose patches the engine remembers
    before = min(
        RENDERER_CACHE_BYTES, (PIL_BYTES_PER_PIXEL + of_patches) * (settings.run.steps - 1) * seen
    )  # steps, of which the renderer remembers some
    rolling_out = (
        (PIL_BYTES_PER_PIXEL + of_patches) * round_pixels + earlier + before + RENDER_BYTES_PER_PIXEL * NUM_RENDER_THREADS * largest
    )
    remembered = min(RENDERER_CACHE_BYTES, (PIL_BYTES_PER_PIXEL + of_patches) * settings.run.steps * seen)
    training = remembered + shown + NUM_PREFETCHED_MICRO_BATCHES * of_patches * micro_batch + RENDER_BYTES_PER_PIXEL * largest
    under_way = settings.run.max_staleness * round_pixels  # of episodes that go on over an update, patches and all
    return PIL_BYTES_PER_PIXEL * step_pixels + (PIL_BYTES_PER_PIXEL + of_patches) * under_way + max(rolling_out, training)
