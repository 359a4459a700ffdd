"""Patches are made when a micro-batch is about to run, one ahead, by whoever encodes its pictures, and are gone afterwards."""

import gc
import threading
import time
import weakref
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_rl.algo.objective import objective
from megatron_rl.config import AlgoSettings, OptimSettings
from megatron_rl.policy.patches import carried, encoded_by, one_ahead
from megatron_rl.policy.policy import Policy
from megatron_rl.types import Image
from tests.support.one_process import policy_of, world_of_one
from tests.support.packed import example_contexts


class Made:
    """Something large, made of a number."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_one_is_made_ahead_and_none_is_kept() -> None:
    begun, seen, alive = [], [], []

    def make(number: int) -> Made:
        begun.append((number, threading.current_thread() is threading.main_thread()))
        made = Made(number)
        alive.append(weakref.ref(made))
        return made

    for made in one_ahead(make, range(6)):
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
    def make(number: int) -> int:
        if number == 1:
            raise ValueError("of number 1")
        return number

    coming = one_ahead(make, [0, 1, 2])
    assert next(coming) == 0
    with pytest.raises(ValueError, match="of number 1"):
        next(coming)


def image(key: str, patches: int) -> Image:
    return Image(None, None, (1, 2, patches // 2), key, merge=2)


def test_each_rank_encodes_its_own() -> None:
    """By hand: the largest first, to the rank with least. One rank takes them in order."""
    images = [image("a", 4), image("b", 16), image("c", 8), image("d", 4)]
    assert [[each.key for each in share] for share in encoded_by(images, 2)] == [["b"], ["c", "a", "d"]]
    assert encoded_by(images, 1) == [images]


@pytest.mark.parametrize("is_read", [True, False])
def test_pictures_alone_train_as_patches_do(random_model: Path, is_read: bool) -> None:
    """Bit for bit: logprobs, and the update. The batches have no patches before, and none after."""
    found = []
    with world_of_one():
        for whole in (True, False):
            policy, renderer = policy_of(random_model, OptimSettings(lr=1e-3))
            contexts = example_contexts(renderer)
            if not whole:
                policy.network._patches = partial(renderer.patches, picture_of=attrgetter("picture"))
                renderer._images.clear()
                for each in contexts:
                    each.context.images = [seen.without_patches() for seen in each.context.images]
            found.append(played(policy, contexts, is_read=is_read))
    assert found[0] == found[1]


def played(policy: Policy, contexts: list, *, is_read: bool) -> object:
    batches = policy.pack(contexts, max_tokens=200)
    assert len(batches) > 2 and sum(bool(batch.images) for batch in batches) > 1
    if is_read:
        result = [said.numpy().tobytes() for said in policy.logprobs(batches)]
    else:
        policy.update(batches, objective(AlgoSettings()), step=0)
        result = {name: tensor.numpy().tobytes() for name, tensor in policy.hf_weights()}
    assert {batch.patch_PC for batch in batches} == {None}
    return result


def test_an_image_without_patches_is_named() -> None:
    with pytest.raises(AssertionError, match="image a came without its patches"):
        carried(image("a", 4))
