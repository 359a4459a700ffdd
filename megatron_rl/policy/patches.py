"""The patches of a micro-batch's images: made when it is about to run, one micro-batch ahead, by the rank that encodes them."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.vision import balance_over_ranks
from megatron_rl.types import Image, MicroBatch

ImagePatchFn = Callable[[Image], torch.Tensor]
"""float32 [P, C] of an image, the same whoever asks and how often: Renderer.patches."""
T = TypeVar("T")


def patch_bytes(image: Image) -> torch.Tensor:
    """The patches of an image that has them still."""
    assert image.patch_PC is not None, f"image {image.key} came without its patches: hand in a renderer's"
    return image.patch_PC


def images_of_rank(images: Sequence[Image], ranks: int) -> list[list[Image]]:
    """The images of a micro-batch that each tensor-parallel rank encodes, in the order in which its tower takes them."""
    shares = balance_over_ranks([image.num_patches for image in images], ranks) if ranks > 1 else [range(len(images))]
    return [[images[number] for number in share] for share in shares]


def attach_patches(batch: MicroBatch, patches: ImagePatchFn, layout: Layout, *, like: torch.Tensor) -> MicroBatch:
    """The batch with the patches that this rank encodes, of the type of `like`; pinned where that is on a GPU."""
    mine = images_of_rank(batch.images, layout.tp)[layout.tp_rank]
    if not mine:
        return replace(batch, patch_PC=torch.empty(0, 0, dtype=like.dtype))
    if like.is_cuda:
        with torch.cuda.device(like.device):  # a thread begins on the first GPU, whichever is this rank's
            return replace(batch, patch_PC=_join_patches(mine, patches, dtype=like.dtype, pinned=True))
    return replace(batch, patch_PC=_join_patches(mine, patches, dtype=like.dtype, pinned=False))


def _join_patches(images: Sequence[Image], patches: ImagePatchFn, *, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """The patches of all of them. Each image's are copied to their place when they are made: none waits for the others'."""
    first = patches(images[0])
    joined_PC = torch.empty(sum(image.num_patches for image in images), first.shape[1], dtype=dtype, pin_memory=pinned)
    places = joined_PC.split([image.num_patches for image in images])
    places[0].copy_(first)
    del first
    for image, place_PC in zip(images[1:], places[1:], strict=True):
        place_PC.copy_(patches(image))
    return joined_PC


def prefetch(make: Callable[[T], T], items: Sequence[T]) -> Iterator[T]:
    """make(item) of each item, in order; the next is made in a thread while the one before is used, and nothing of those before is kept."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = thread.submit(make, items[0])
        for item in items[1:]:
            made = [coming.result()]
            coming = thread.submit(make, item)
            yield made.pop()
        made = [coming.result()]
        del coming
        yield made.pop()
