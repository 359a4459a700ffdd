"""Exchanges a step's rollouts and images between ranks.

Token data goes to all ranks. An image goes only to the ranks that train on it, and at most once to
each node. A rank keeps the images of the rollouts it generated. `ImageExchange.fetch` brings those
that other ranks encode: within a node by shared memory, between nodes by point-to-point transfer. A
transferred image takes 3 bytes per pixel.
"""

import mmap
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from PIL import Image as pil
from PIL.Image import Image as Picture

from megatron_rl.distributed.world import all_gather_large_object, all_gather_object
from megatron_rl.types import TOKEN_COLUMNS, Image, Rollout, TokenSequence

T = TypeVar("T")
SIBLING_MEMORY = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid")
"""Files with values that are equal for processes which can open each other's memory."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Transfer:
    """Transfer of an image from its holder to the first rank of another node that encodes it."""

    key: str
    sender: int
    receiver: int


@dataclass(slots=True, frozen=True, kw_only=True)
class TransferPlan:
    """Transfers and shared-memory locations of a step's images; the same on every rank."""

    offsets: dict[int, dict[str, int]]
    """Offset of each image in shared memory, by rank that shares or sends it and by image key."""
    transfers: list[Transfer]
    """Transfers between nodes."""
    sources: dict[int, dict[str, int]]
    """Rank on the same node that shares each image, by rank that needs it and by image key."""


class ImageExchange:
    """Exchanges rollouts and images. All ranks call `gather_rollouts` and `fetch` together."""

    def __init__(self, *, patch_size: int, group: dist.ProcessGroup | None = None) -> None:
        """Exchange node names with all ranks.

        Args:
            patch_size: Side of a patch in pixels.
            group: Group for gathering rollouts, which some ranks finish much later than others
                (world.long_timeout_group).
        """
        self._patch_size, self._group = patch_size, group
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._nodes = all_gather_object(_node_name(), group=group)
        self._rank_by_rollout: dict[tuple[int, int], int] = {}
        """The rank that last generated a rollout, by (group, sample index)."""
        self._local_images: dict[str, Picture] = {}
        self._fetched: dict[str, memoryview] = {}
        self._memory_fd = -1
        """File descriptor of the memory that other ranks read; -1 without one."""

    def broadcast_rollouts(self, mine: T) -> list[T]:
        """Return every rank's value in rank order, such as the state of its rollouts."""
        return all_gather_large_object(mine, group=self._group)

    def gather_rollouts(self, mine: list[Rollout] | None) -> list[Rollout]:
        """Return the rollouts of all ranks on every rank; those of other ranks come without pixels.

        Pass None on a rank that leads no engine.
        """
        if self._size == 1:
            return list(mine or [])
        parts = all_gather_large_object(None if mine is None else _encode_rollouts(mine), group=self._group)
        rollouts: list[Rollout] = []
        for rank, words in enumerate(parts):
            if words is None:
                continue
            part = mine if rank == self._rank else _decode_rollouts(words)
            self._rank_by_rollout.update(((rollout.group, rollout.sample_index), rank) for rollout in part)
            rollouts += part
        return rollouts

    def fetch(self, needed: Mapping[int, Sequence[Image]], rollouts: Sequence[Rollout]) -> None:
        """Bring the images that each rank needs to its node, until `release`."""
        if self._size == 1:
            return
        holders: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for rollout in rollouts:
            leader = self._rank_by_rollout[rollout.group, rollout.sample_index]
            for image in rollout.images:
                sizes[image.key] = 3 * image.num_patches * self._patch_size**2
                if holders.setdefault(image.key, leader) == self._rank and image.pil is not None:
                    self._local_images[image.key] = image.pil
        hanging = plan_transfers({rank: [image.key for image in images] for rank, images in needed.items()}, holders, self._nodes, sizes)
        self._fill_local(hanging, sizes)

    def _fill_local(self, plan: TransferPlan, sizes: Mapping[str, int]) -> None:
        shelf = plan.offsets.get(self._rank, {})
        own = memoryview(b"")
        if shelf:
            self._memory_fd = os.memfd_create("pictures")
            os.ftruncate(self._memory_fd, sum(sizes[key] for key in shelf))
            own = memoryview(mmap.mmap(self._memory_fd, 0))
        mine = [route for route in plan.transfers if self._rank in (route.sender, route.receiver)]
        for key in shelf.keys() - {route.key for route in mine if route.receiver == self._rank}:
            own[shelf[key] : shelf[key] + sizes[key]] = self._local_images[key].tobytes()
        self._transfer(mine, shelf, own, sizes)
        addresses = all_gather_object((os.getpid(), self._memory_fd))  # also a barrier: after it all memory is filled
        needs = plan.sources.get(self._rank, {})
        seen = {rank: own if rank == self._rank else _map_sibling_memory(*addresses[rank]) for rank in set(needs.values())}
        for key, rank in needs.items():
            offset = plan.offsets[rank][key]
            self._fetched[key] = seen[rank][offset : offset + sizes[key]]

    def _transfer(self, transfers: Sequence[Transfer], offsets: Mapping[str, int], own: memoryview, sizes: Mapping[str, int]) -> None:
        works = []
        for route in transfers:
            part = torch.frombuffer(own[offsets[route.key] : offsets[route.key] + sizes[route.key]], dtype=torch.uint8)
            if route.sender == self._rank:
                works.append(dist.isend(part, route.receiver))
            else:
                works.append(dist.irecv(part, route.sender))
        for work in works:
            work.wait()

    def image(self, image: Image) -> Picture:
        """Return the pixels of an image of this rank's rollouts, or of one that was fetched."""
        if image.pil is not None:
            return image.pil
        if image.key in self._local_images:
            return self._local_images[image.key]
        _, rows, columns = image.grid
        return pil.frombytes("RGB", (columns * self._patch_size, rows * self._patch_size), self._fetched[image.key])

    def release(self) -> None:
        """Free all images of the step."""
        self._local_images.clear()
        self._fetched.clear()
        self._rank_by_rollout.clear()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1


def plan_transfers(
    needed: Mapping[int, Sequence[str]], holders: Mapping[str, int], nodes: Sequence[object], sizes: Mapping[str, int]
) -> TransferPlan:
    """Return the rank that shares or sends each image.

    Example: rank 0 holds "a"; ranks 1, 2 and 3 need it; 2 and 3 are on another node. Rank 0 shares
    it with rank 1 and sends it to rank 2, which shares it with rank 3.

    Args:
        needed: Keys of the images that each rank needs.
        holders: Rank that holds each image, by key.
        nodes: Node of each rank.
        sizes: Size of each image in bytes, by key.
    """
    keys: dict[int, dict[str, None]] = {}
    routes: list[Transfer] = []
    shown: dict[tuple[object, str], int] = {}
    places: dict[int, dict[str, int]] = {}
    for rank in sorted(needed):
        for key in needed[rank]:
            holder, place = holders[key], (nodes[rank], key)
            if holder == rank:
                continue
            if nodes[holder] == nodes[rank]:
                shown[place] = holder
            elif place not in shown:
                shown[place] = rank
                routes.append(Transfer(key=key, sender=holder, receiver=rank))
                keys.setdefault(rank, {})[key] = None
            keys.setdefault(holder, {})[key] = None
            places.setdefault(rank, {})[key] = shown[place]
    return TransferPlan(offsets={rank: _image_offsets(mine, sizes) for rank, mine in keys.items()}, transfers=routes, sources=places)


def _image_offsets(keys: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    offsets, end = {}, 0
    for key in keys:
        offsets[key] = end
        end += sizes[key]
    return offsets


def _map_sibling_memory(pid: int, descriptor: int) -> memoryview:
    """Map another process's shared memory, which exists as long as one process maps it."""
    with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _node_name() -> tuple[str, int]:
    boot, namespace = map(Path, SIBLING_MEMORY)
    return boot.read_text(), namespace.stat().st_ino


TokenData = tuple[Rollout, list[tuple]]
"""A rollout without sequences, and each of its sequences as `_pack_context` encodes it."""


def _encode_rollouts(rollouts: Sequence[Rollout]) -> list[TokenData]:
    """Return the rollouts without pixels, in compact form.

    A token takes 5 bytes, a sampled one 17.
    """
    bare = {image.key: replace(image, pil=None, patch_PC=None) for rollout in rollouts for image in rollout.images}

    def without(images: Sequence[Image]) -> list[Image]:
        return [bare[image.key] for image in images]

    words = []
    for rollout in rollouts:
        turns = [replace(turn, images=without(turn.images)) for turn in rollout.turns]
        flat = [_pack_context(context, without(context.images)) for context in rollout.sequences]
        words.append((replace(rollout, sequences=[], turns=turns), flat))
    return words


def _decode_rollouts(words: Sequence[TokenData]) -> list[Rollout]:
    return [replace(rollout, sequences=[_unpack_context(*flat) for flat in contexts]) for rollout, contexts in words]


def _pack_context(context: TokenSequence, images: list[Image]) -> tuple:
    """Return the sequence as arrays, with logprobs and weight versions of sampled tokens only."""
    sampled = [place for place, is_sampled in enumerate(context.loss_mask) if is_sampled]
    return (
        array("i", context.token_ids),
        bytes(context.loss_mask),
        array("d", [context.rollout_logprobs[place] for place in sampled]),
        array("i", [context.weight_versions[place] for place in sampled]),
        images,
        {name: array("d", getattr(context, name)) for name in TOKEN_COLUMNS},
    )


def _unpack_context(
    token_ids: array, mask: bytes, logprobs: array, versions: array, images: list[Image], attached: dict[str, array]
) -> TokenSequence:
    context = TokenSequence(token_ids.tolist(), list(mask), [0.0] * len(mask), [-1] * len(mask), images)
    places = (place for place, is_sampled in enumerate(mask) if is_sampled)
    for place, logprob, version in zip(places, logprobs, versions, strict=True):
        context.rollout_logprobs[place], context.weight_versions[place] = logprob, version
    for name, column in attached.items():
        setattr(context, name, column.tolist())
    return context
