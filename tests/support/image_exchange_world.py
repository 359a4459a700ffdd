"""Ranks of two nodes that generate rollouts with images and encode each other's images. Run under
torchrun by test_image_exchange.py.

    image_exchange_world.py OUT
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from PIL import Image as pil

from megatron_rl.distributed import image_exchange as gallery_module
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import connect, disconnect, raise_on_all_ranks, read_world
from megatron_rl.observe.recorder import save_images, write_rollouts
from megatron_rl.types import Image, Rollout, TokenSequence, Turn

PATCH_SIZE = 14


def make_picture(number: int) -> pil.Image:
    """Return noise of 4 x 2 or 6 x 4 patches, seeded by the number."""
    height, width = (56, 28) if number % 2 else (84, 56)
    return pil.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def make_image(number: int) -> Image:
    made = make_picture(number)
    return Image(made, None, (1, made.height // PATCH_SIZE, made.width // PATCH_SIZE), f"k{number}", merge=2)


def make_rollout(rank: int, sample_index: int, step: int) -> Rollout:
    """Create a rollout with an image shared by all ranks of a step, its own image in the prompt,
    and its own image in a turn's observation.
    """
    first = 1000 * step + 100 * rank + 10 * sample_index
    context, seen = TokenSequence(), [make_image(1000 * step + 999), make_image(first + 1), make_image(first + 2)]
    context.extend([5, 6, 7], images=tuple(seen[:2]))
    context.extend([8, 9], logprobs=[-0.1 * first, -1 / 3], versions=[step, step + 1])
    context.extend([10], images=(seen[2],))
    turn = Turn(0, (3, 5), "said", images=[seen[2]])
    return Rollout(task="t", example_id="e", group=rank, sample_index=sample_index, sequences=[context], turns=[turn], reward=float(first))


def read_fd_link(number: str) -> str:
    """Return the target of a file descriptor of this process.

    The descriptor that listed the folder is already closed.
    """
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def without_images(rollout: Rollout) -> Rollout:
    """Replace the images of a rollout by their keys, grids and merge sizes."""
    contexts = [replace(each, images=[seen.key for seen in each.images]) for each in rollout.sequences]
    turns = [replace(each, images=[(seen.key, seen.grid, seen.merge) for seen in each.images]) for each in rollout.turns]
    return replace(rollout, sequences=contexts, turns=turns)


def main(out: Path) -> None:
    world = read_world()
    connect(world, timeout_s=60)
    gallery_module._node_name = lambda: ("a node", world.rank // 2)
    gallery = ImageExchange(patch_size=PATCH_SIZE)
    for step in (1, 2):
        # Rank 1 leads no engine.
        rollouts = gallery.gather_rollouts(None if world.rank == 1 else [make_rollout(world.rank, sample, step) for sample in range(2)])
        expected = [make_rollout(rank, sample, step) for rank in (0, 2, 3) for sample in range(2)]
        assert [without_images(each) for each in rollouts] == [without_images(each) for each in expected]
        has = {(each.group == world.rank, seen.pil is not None) for each in rollouts for seen in each.images}
        assert has == ({(False, False)} if world.rank == 1 else {(True, True), (False, False)}), "no picture goes with the words"
        # Each rank encodes its own images and those of the rank two positions after it.
        needed = {
            rank: [seen for each in rollouts if each.group in (rank, (rank + 2) % 4) for seen in each.images] for rank in range(world.size)
        }
        gallery.fetch(needed, rollouts)
        for each in needed[world.rank]:
            assert gallery.image(each).tobytes() == make_picture(int(each.key[1:])).tobytes(), each.key
        raise_on_all_ranks(partial(save_images, out, rollouts))
        if world.is_main:
            write_rollouts(out / f"step_{step}.jsonl", {"kept": rollouts}, step=step, step_rollouts=rollouts)
        dist.barrier()
        gallery.release()
        assert "memfd:pictures" not in Path("/proc/self/maps").read_text(), "nothing of a step outlives it"
        assert not [number for number in os.listdir("/proc/self/fd") if "memfd:pictures" in read_fd_link(number)]
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
