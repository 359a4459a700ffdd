"""Patches are computed just before a micro-batch runs, one micro-batch ahead, by the rank that
encodes the images, and are freed afterwards."""

import gc
import threading
import time
import weakref
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.minibatches import pack_costs
from megatron_rl.config import AlgoSettings, OptimSettings
from megatron_rl.memory_plan.image_memory import NUM_PREFETCHED_MICRO_BATCHES
from megatron_rl.policy import patches
from megatron_rl.policy import policy as policy_module
from megatron_rl.policy.patches import images_of_rank, patch_bytes, prefetch
from megatron_rl.policy.policy import Policy
from megatron_rl.types import Image
from tests.support.packed_example import make_example_items
from tests.support.single_process_policy import make_policy_and_renderer, single_process_world


class Made:
    """An object made from a number, whose lifetime the test tracks."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_one_is_made_ahead_and_none_is_kept() -> None:
    """`prefetch` makes one object ahead in another thread, keeps no object that was used, and ends
    its thread."""
    begun, seen, alive = [], [], []

    def make(number: int) -> Made:
        begun.append((number, threading.current_thread() is threading.main_thread()))
        made = Made(number)
        alive.append(weakref.ref(made))
        return made

    for made in prefetch(make, range(6)):
        seen.append(made.number)
        due, end = min(len(seen) + 1, 6), time.monotonic() + 20
        while len(begun) < due and time.monotonic() < end:
            time.sleep(0.001)
        assert [number for number, _ in begun] == list(range(due)), "the next one, and no further"
        gc.collect()
        living = [number for number, each in enumerate(alive) if each() is not None]
        assert set(living) <= {made.number, made.number + 1}
    assert seen == list(range(6)) and not any(is_main for _, is_main in begun)
    del made
    assert not any(each() for each in alive)
    assert not any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def test_what_making_raises_is_raised_where_it_is_used() -> None:
    """An exception while an object is made is raised when that object is used."""

    def make(number: int) -> int:
        if number == 1:
            raise ValueError("of number 1")
        return number

    coming = prefetch(make, [0, 1, 2])
    assert next(coming) == 0
    with pytest.raises(ValueError, match="of number 1"):
        next(coming)


def image(key: str, patches: int) -> Image:
    return Image(None, None, (1, 2, patches // 2), key, merge=2)


def test_each_rank_encodes_its_own() -> None:
    """Images are assigned largest first to the rank with the fewest patches.

    A single rank keeps their order.
    """
    images = [image("a", 4), image("b", 16), image("c", 8), image("d", 4)]
    assert [[each.key for each in share] for share in images_of_rank(images, 2)] == [["b"], ["c", "a", "d"]]
    assert images_of_rank(images, 1) == [images]


@pytest.mark.parametrize("is_read", [True, False])
def test_pictures_alone_train_as_patches_do(random_model: Path, is_read: bool) -> None:
    """Images without patches give the same logprobs and the same update as images with patches, bit
    for bit. Batches have no patches before or after."""
    found = []
    with single_process_world():
        for whole in (True, False):
            policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=1e-3))
            contexts = make_example_items(renderer)
            if not whole:
                policy.network.pipeline._patches = partial(renderer.patches, load_image=attrgetter("pil"))
                renderer._images.clear()
                for each in contexts:
                    each.sequence.images = [seen.without_patches() for seen in each.sequence.images]
            found.append(played(policy, contexts, is_read=is_read))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_read", [True, False])
def test_patches_of_as_many_micro_batches_exist_as_the_plan_counts(
    random_model: Path, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the planned number of micro-batches have patches at the same time, and one image's
    patches exist beside them. Storages are counted whenever an image's patches are computed."""
    joined, made, seen = [], [], []
    empty = torch.empty

    def num_alive(storages: list[StorageWeakRef]) -> int:
        return sum(not storage.expired() for storage in storages)

    def watched(*sizes: object, **how: object) -> torch.Tensor:
        tensor = empty(*sizes, **how)
        joined.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def patches_of(image: Image) -> torch.Tensor:
        patch_PC = renderer.patches(image, attrgetter("pil")).clone()
        made.append(StorageWeakRef(patch_PC.untyped_storage()))
        seen.append((num_alive(joined), num_alive(made)))
        return patch_PC

    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings(lr=1e-3))
        contexts = make_example_items(renderer) * 3
        policy.network.pipeline._patches = patches_of
        monkeypatch.setattr(patches, "torch", SimpleNamespace(empty=watched, cuda=torch.cuda))
        played(policy, contexts, is_read=is_read)
    assert len(joined) > 4 and len(made) > len(joined), "several pictures in a micro-batch"
    assert max(seen) == (NUM_PREFETCHED_MICRO_BATCHES, 1) and num_alive(joined) == num_alive(made) == 0


def played(policy: Policy, contexts: list, *, is_read: bool) -> object:
    batches = policy.pack(contexts, max_tokens=200)
    assert len(batches) > 2 and sum(bool(batch.images) for batch in batches) > 1
    if is_read:
        result = [said.cpu().numpy().tobytes() for said in policy.logprobs(batches)]
    else:
        policy.update(batches, make_policy_objective(AlgoSettings()), step=0)
        result = {name: tensor.cpu().numpy().tobytes() for name, tensor in policy.hf_weights()}
    assert {batch.patch_PC for batch in batches} == {None}
    return result


def test_contexts_are_dealt_once_for_their_pictures_and_for_their_batches(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images assigned to this rank are those of the batches that it packs, and the sequences
    are ordered only once."""
    ordered = []
    monkeypatch.setattr(policy_module, "pack_costs", lambda *given, **how: ordered.append(1) or pack_costs(*given, **how))
    with single_process_world():
        policy, renderer = make_policy_and_renderer(random_model, OptimSettings())
        contexts = make_example_items(renderer) * 3
        dealt = policy.shard_across_dp(contexts, max_tokens=200)
        shown, batches = policy.images(dealt), policy.pack_local(dealt)
        assert len(ordered) == 1 and len(batches) > 2
        assert [image.key for image in shown[0]] == [image.key for batch in batches for image in batch.images]
        assert [batch.token_T.tolist() for batch in policy.pack(contexts, max_tokens=200)] == [batch.token_T.tolist() for batch in batches]


@pytest.mark.known_failure("pixels-lost-before-training")
def test_an_image_without_patches_is_named() -> None:
    """An image without patches raises an error with its key."""
    with pytest.raises(AssertionError, match="image a has no patches"):
        patch_bytes(image("a", 4))
