"""The plan of what a step's pictures take on the host, on a rank, if every episode has as many and as large as it may and groups are dealt
evenly (an engine that is faster may take more: rollout/dealing.py).

While engines roll out: each picture as Pillow has it, and the patches that vLLM is given, until its episode is over. While the policy is
trained: what is shown to other ranks and what they show (gallery.py), and the patches of the micro-batches that run and come next
(policy/patches.py). Not counted: pictures before they are resized, which stay until their episode is over; and what the C library keeps of
freed memory. Measured growth was 1.65 to 1.87 times what stands here (benchmarks/host_memory_2026-11-22.md).
"""

from megatron_rl.config import Settings
from megatron_rl.models.spec import ModelSpec

KEPT = 4
"""Bytes of a pixel in a Pillow picture, whose colors lie in words of 32 bits."""
SENT = 3
"""Bytes of a pixel where ranks show it to each other."""
AHEAD = 3
"""Micro-batches whose patches exist at once: the one that runs, the next, and the parts that the next is joined of."""
CACHED_BYTES = (1 << 30) + (1 << 20) * 4 * 1176
"""Of patches that renderer and engine remember (rollout/renderer.py, rollout/vllm/core.py)."""


def pictures(model: ModelSpec, settings: Settings, *, world_size: int) -> int:
    """Bytes of one rank, which leads an engine."""
    vision, batch, select = model.vision, settings.batch, settings.select
    token_pixels = (vision.patch * vision.merge) ** 2
    of_patches = 4 * vision.channels * vision.temporal_patch  # fp32
    episode = settings.engine.max_images * settings.model.max_pixels
    episode = min(episode, settings.task.max_pixels or episode, settings.engine.max_model_len * token_pixels)
    num_engines = max(1, world_size // settings.engine.tp)
    round_pixels = episode * batch.group_size * -(-batch.prompts_per_step // num_engines)
    step_pixels = round_pixels * select.max_generations
    trained = batch.prompts_per_step * batch.group_size * (1 if select.rank_by_std else select.max_generations)
    share = episode * -(-trained // world_size)
    shown = 0 if world_size == 1 else SENT * (min(step_pixels, share * settings.engine.tp) + share)
    micro_batch = min(share, max(batch.micro_batch_tokens * token_pixels, episode))
    rolling_out = min(of_patches * step_pixels, of_patches * round_pixels + CACHED_BYTES)
    training = min(of_patches * step_pixels, CACHED_BYTES) + shown + AHEAD * of_patches * micro_batch
    return KEPT * step_pixels + max(rolling_out, training)
