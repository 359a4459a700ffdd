"""Computes the patches of images ahead of time, on the rank that encodes the images."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.vision import balance_over_ranks
from megatron_rl.types import Image, MicroBatch

ImagePatchFn = Callable[[Image], torch.Tensor]
"""Function image -> patches, float32 [P, C]. For the same image it must return the same patches on
every rank and at every call, as Renderer.patches does.
"""
T = TypeVar("T")


def patch_bytes(image: Image) -> torch.Tensor:
    """Return the patches stored in an image; raise AssertionError if the patches were dropped."""
    assert image.patch_PC is not None, f"image {image.key} has no patches: pass an image from a renderer"
    return image.patch_PC


def images_of_rank(images: Sequence[Image], ranks: int) -> list[list[Image]]:
    """Assign the images of a micro-batch to tensor-parallel ranks.

    Returns one list of images per rank, in the order in which the rank encodes them.
    """
    shares = balance_over_ranks([image.num_patches for image in images], ranks) if ranks > 1 else [range(len(images))]
    return [[images[number] for number in share] for share in shares]


def attach_patches(batch: MicroBatch, patches: ImagePatchFn, layout: Layout, *, like: torch.Tensor) -> MicroBatch:
    """Return the batch with the patches of this rank's images added.

    The patches have the dtype of `like` and are on the host, in pinned memory if `like` is on a
    GPU.
    """
    mine = images_of_rank(batch.images, layout.tp)[layout.tp_rank]
    if not mine:
        return replace(batch, patch_PC=torch.empty(0, 0, dtype=like.dtype))
    if like.is_cuda:
        with torch.cuda.device(like.device):  # a new thread starts on GPU 0
            return replace(batch, patch_PC=_join_patches(mine, patches, dtype=like.dtype, pinned=True))
    return replace(batch, patch_PC=_join_patches(mine, patches, dtype=like.dtype, pinned=False))


def _join_patches(images: Sequence[Image], patches: ImagePatchFn, *, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Concatenate the patches of all images.

    The patches of each image are copied as soon as they are computed, so that the patches of at
    most one image are in memory twice.
    """
    first = patches(images[0])
    joined_PC = torch.empty(sum(image.num_patches for image in images), first.shape[1], dtype=dtype, pin_memory=pinned)
    places = joined_PC.split([image.num_patches for image in images])
    places[0].copy_(first)
    del first
    for image, place_PC in zip(images[1:], places[1:], strict=True):
        place_PC.copy_(patches(image))
    return joined_PC


def prefetch(make: Callable[[T], T], items: Sequence[T]) -> Iterator[T]:
    """Yield make(item) for each item in order while a thread computes the next result.

    The generator keeps no reference to results that it has yielded. `items` must not be empty.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = thread.submit(make, items[0])
        for item in items[1:]:
            made = [coming.result()]
            coming = thread.submit(make, item)
            yield made.pop()
        made = [coming.result()]
        del coming
        yield made.pop()
