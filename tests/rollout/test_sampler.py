"""Tests the sampling noise of a turn: it depends only on the turn's seed and the token's position
in the turn, not on the engine or the number of requests.

vLLM takes seconds to import, so a base class and the upkeep of its rows are stand-ins here.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from megatron_rl.rollout.vllm.sampler import BANNED_IDS_KEY, NUM_SAMPLED_KEY, SEED_KEY, make_logits_processor, mix_seeds

STEP = 0x9E3779B97F4A7C15
"""Increment between consecutive states of SplitMix64."""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> object:
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = sys.modules["vllm.v1.sample.logits_processor"]
    stand_in.LogitsProcessor = object
    stand_in.process_dict_updates = lambda rows, added, row: rows.update({index: row(*given) for index, given in added.items()})
    return make_logits_processor()(SimpleNamespace(additional_config={BANNED_IDS_KEY: [3]}), "cpu", False)


def noise(processor: object, requests: list[tuple[dict[str, int], list[int]]]) -> list[int]:
    """Return the noise seed of the next token of each request.

    A request is given by its extra_args and the tokens that it has sampled so far.
    """
    processor.update_state({index: (SimpleNamespace(extra_args=extra), [], tokens) for index, (extra, tokens) in enumerate(requests)})
    return processor.noise_seeds(len(requests)).tolist()


def test_a_turn_that_is_asked_for_in_parts_has_the_noise_of_one_that_is_not(processor: object) -> None:
    whole = [noise(processor, [({SEED_KEY: 7}, [0] * number)])[0] for number in range(8)]
    assert len({*whole}) == 8
    for cut in range(8):
        rest = [noise(processor, [({SEED_KEY: 7, NUM_SAMPLED_KEY: cut}, [0] * number)])[0] for number in range(8 - cut)]
        assert rest == whole[cut:]


def test_requests_of_one_step_have_their_own_noise(processor: object) -> None:
    requests = [({SEED_KEY: 7}, [0] * 3), ({SEED_KEY: 8, NUM_SAMPLED_KEY: 2}, []), ({SEED_KEY: -1}, [0])]
    assert noise(processor, requests) == [noise(processor, [request])[0] for request in requests]


def test_no_seeds_noise_is_anothers_from_a_later_token_on() -> None:
    """Neighboring seeds, seeds that differ by multiples of the per-position increment, and seeds
    that differ only in their upper half have different noise at every position: 148 seeds at 64
    positions.
    """
    seeds = [*range(50), *((STEP * number) % (1 << 64) for number in range(1, 50)), *(number << 32 for number in range(1, 50))]
    found = mix_seeds(np.repeat(np.array(seeds, dtype=np.uint64), 64), np.tile(np.arange(64, dtype=np.uint64), len(seeds)))
    assert found.min() >= 0 and np.unique(found).size == found.size == 148 * 64
