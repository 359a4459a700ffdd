"""Exchanges a step's rollouts and images between ranks.

Token data is sent to all ranks. An image is sent only to the ranks that train on it, and at most
once to each node. Each rank keeps the images of the rollouts that it generated.
`ImageExchange.fetch` gives a rank access to images of other ranks: within a node through shared
memory, and between nodes by point-to-point transfer. A transferred image takes 3 bytes per pixel.
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
from megatron_rl.types import TOKEN_COLUMNS, Image, Rollout, TokenSequence, TopTokens

T = TypeVar("T")
SIBLING_MEMORY = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid")
"""Files that identify this machine and this PID namespace. Two processes can map each other's
shared memory (through /proc) if these files have the same contents for both processes.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class Transfer:
    """Transfer of an image between nodes, to the first rank on a node that needs the image."""

    key: str
    sender: int
    receiver: int


@dataclass(slots=True, frozen=True, kw_only=True)
class TransferPlan:
    """Transfers and shared-memory locations for a step's images, identical on every rank."""

    offsets: dict[int, dict[str, int]]
    """offsets[rank][image key] is the byte offset of the image in the shared memory of `rank`."""
    transfers: list[Transfer]
    """Transfers of images between nodes."""
    sources: dict[int, dict[str, int]]
    """sources[rank][image key] is the rank on the same node from which `rank` reads the image."""


class ImageExchange:
    """Exchanges rollouts and images between ranks.

    All ranks must call `all_gather`, `gather_rollouts` and `fetch` together.
    """

    def __init__(self, *, patch_size: int, group: dist.ProcessGroup | None = None) -> None:
        """Gather the node names of all ranks.

        Args:
            patch_size: Side length of an image patch in pixels.
            group: Process group for gathering rollouts. The group needs a long timeout
                (world.long_timeout_group), because some ranks finish rollouts much later than
                others.
        """
        self._patch_size, self._group = patch_size, group
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._nodes = all_gather_object(_node_name(), group=group)
        self._rank_by_rollout: dict[tuple[int, int], int] = {}
        """Rank that generated each rollout, keyed by (group, sample index)."""
        self._local_images: dict[str, Picture] = {}
        self._fetched: dict[str, memoryview] = {}
        self._memory_fd = -1
        """File descriptor of the shared memory that other ranks read; -1 if none is allocated."""

    def all_gather(self, mine: T) -> list[T]:
        """Gather one value from every rank and return the values in rank order on every rank."""
        return all_gather_large_object(mine, group=self._group)

    def gather_rollouts(self, mine: list[Rollout] | None) -> list[Rollout]:
        """Gather the rollouts of all ranks on every rank.

        Rollouts from other ranks are returned without image pixels. On ranks that are not the
        leader of an engine, pass None.
        """
        if self._size == 1:
            return list(mine or [])
        parts = all_gather_large_object(None if mine is None else _encode_rollouts(mine), group=self._group)
        rollouts: list[Rollout] = []
        for rank, words in enumerate(parts):
            if words is None:
                continue
            part = mine if rank == self._rank else _decode_rollouts(words)
            assert part is not None, "a rank without rollouts sends no words"
            self._rank_by_rollout.update(((rollout.group, rollout.sample_index), rank) for rollout in part)
            rollouts += part
        return rollouts

    def is_local(self, rollout: Rollout) -> bool:
        """Return True if this rank generated a rollout of the step, and so has its images."""
        return self._size == 1 or self._rank_by_rollout[rollout.group, rollout.sample_index] == self._rank

    def fetch(self, needed: Mapping[int, Sequence[Image]], rollouts: Sequence[Rollout]) -> None:
        """Make the images that each rank needs available on its node until `release` is called."""
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
        plan = plan_transfers({rank: [image.key for image in images] for rank, images in needed.items()}, holders, self._nodes, sizes)
        self._fill_local(plan, sizes)

    def _fill_local(self, plan: TransferPlan, sizes: Mapping[str, int]) -> None:
        offsets = plan.offsets.get(self._rank, {})
        own = memoryview(b"")
        if offsets:
            self._memory_fd = os.memfd_create("pictures")
            os.ftruncate(self._memory_fd, sum(sizes[key] for key in offsets))
            own = memoryview(mmap.mmap(self._memory_fd, 0))
        mine = [route for route in plan.transfers if self._rank in (route.sender, route.receiver)]
        for key in offsets.keys() - {route.key for route in mine if route.receiver == self._rank}:
            own[offsets[key] : offsets[key] + sizes[key]] = self._local_images[key].tobytes()
        self._transfer(mine, offsets, own, sizes)
        addresses = all_gather_object((os.getpid(), self._memory_fd))  # also a barrier, after which all shared memory is filled
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
        """Return the pixels of an image that this rank generated or fetched."""
        if image.pil is not None:
            return image.pil
        if image.key in self._local_images:
            return self._local_images[image.key]
        _, rows, columns = image.grid
        return pil.frombytes("RGB", (columns * self._patch_size, rows * self._patch_size), self._fetched[image.key])

    def release(self) -> None:
        """Free all images and shared memory of the step."""
        self._local_images.clear()
        self._fetched.clear()
        self._rank_by_rollout.clear()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1


def plan_transfers(
    needed: Mapping[int, Sequence[str]], holders: Mapping[str, int], nodes: Sequence[object], sizes: Mapping[str, int]
) -> TransferPlan:
    """Plan which ranks share images on their node and which ranks send images to other nodes.

    Example: rank 0 has the image "a", and ranks 1, 2 and 3 need the image. Ranks 0 and 1 are on one
    node, and ranks 2 and 3 are on another node. Rank 0 then shares the image with rank 1 and sends
    the image to rank 2, and rank 2 shares the image with rank 3.

    Args:
        needed: Keys of the images that each rank needs, keyed by rank.
        holders: Rank that has each image, keyed by image key.
        nodes: Node of each rank, in rank order.
        sizes: Size of each image in bytes, keyed by image key.
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
    """Map another process's shared memory. The memory persists while any process maps it."""
    with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _node_name() -> tuple[str, int]:
    boot, namespace = map(Path, SIBLING_MEMORY)
    return boot.read_text(), namespace.stat().st_ino


TokenData = tuple[Rollout, list[tuple], tuple | None]
"""A rollout without its sequences, its sequences as encoded by `_pack_context`, and the final state
in the same form.
"""


def _encode_rollouts(rollouts: Sequence[Rollout]) -> list[TokenData]:
    """Encode rollouts compactly, without image pixels.

    An observed token takes 5 bytes, and a sampled token takes 17 bytes.
    """
    bare = {image.key: replace(image, pil=None, patch_PC=None) for rollout in rollouts for image in rollout.images}

    def without(images: Sequence[Image]) -> list[Image]:
        return [bare[image.key] for image in images]

    words = []
    for rollout in rollouts:
        turns = [replace(turn, images=without(turn.images)) for turn in rollout.turns]
        flat = [_pack_context(context, without(context.images)) for context in rollout.sequences]
        final = rollout.final_state
        flat_final = None if final is None else _pack_context(final, without(final.images))
        words.append((replace(rollout, sequences=[], turns=turns, final_state=None), flat, flat_final))
    return words


def _decode_rollouts(words: Sequence[TokenData]) -> list[Rollout]:
    return [
        replace(
            rollout,
            sequences=[_unpack_context(*flat) for flat in contexts],
            final_state=None if final is None else _unpack_context(*final),
        )
        for rollout, contexts, final in words
    ]


def _pack_context(context: TokenSequence, images: list[Image]) -> tuple:
    """Encode a sequence as arrays, with logprobs and weight versions of sampled tokens only."""
    sampled = [place for place, is_sampled in enumerate(context.loss_mask) if is_sampled]
    return (
        array("i", context.token_ids),
        bytes(context.loss_mask),
        array("d", [context.rollout_logprobs[place] for place in sampled]),
        array("i", [context.weight_versions[place] for place in sampled]),
        images,
        {name: array("d", getattr(context, name)) for name in TOKEN_COLUMNS},
        context.teacher_top,
        context.routed_experts,
    )


def _unpack_context(
    token_ids: array, mask: bytes, logprobs: array, versions: array, images: list[Image], attached: dict[str, array],
    teacher_top: TopTokens | None, routed_experts: list[bytes],
) -> TokenSequence:  # fmt: skip
    context = TokenSequence(token_ids.tolist(), list(mask), [0.0] * len(mask), [-1] * len(mask), images, routed_experts)
    places = (place for place, is_sampled in enumerate(mask) if is_sampled)
    for place, logprob, version in zip(places, logprobs, versions, strict=True):
        context.rollout_logprobs[place], context.weight_versions[place] = logprob, version
    for name, column in attached.items():
        setattr(context, name, column.tolist())
    context.teacher_top = teacher_top
    return context
