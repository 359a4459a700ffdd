"""Tests which engine runs which group: the assignment by position, and two rollout managers in two
threads that share a store.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Rollout, StopReason
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, DelayedEngine, make_rollout_manager, strip_timings


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model)))


@pytest.mark.parametrize(
    ("num_groups", "size", "num_engines", "max_episodes", "held"),
    [
        (32, 8, 2, 256, 16),  # an even share of 128 episodes: all at once
        (32, 8, 2, 64, 8),  # 64 fit, which is half of the share
        (32, 8, 2, 100, 12),  # 12 whole groups fit
        (32, 8, 2, 1, 8),  # at least half of the share
        (5, 4, 2, 8, 2),  # 3 for each engine, 2 of them at once
        (1, 4, 3, 1, 1),  # two engines have none
        (500, 1, 4, 60, 63),  # 125 for each
        (32, 8, 1, 64, 32),  # a single engine
    ],
)
def test_every_engine_begins_with_what_it_holds(num_groups: int, size: int, num_engines: int, max_episodes: int, held: int) -> None:
    groups = [40 + number for number in range(num_groups)]
    hands = [
        EngineRank(index=index, num_engines=num_engines, max_episodes=max_episodes).assign(
            groups, dict.fromkeys(groups, size), assignment_id=1
        )
        for index in range(num_engines)
    ]
    for index, hand in enumerate(hands):
        assert hand.own_groups == groups[: held * num_engines][index::num_engines], "by their numbers"
        assert (hand.remaining, hand.capacity) == (groups[held * num_engines :], held * size)


def test_some_of_a_round_are_dealt_as_all_of_it() -> None:
    """When only some groups of a batch are run again, the groups that were assigned by position go
    to the same engines as before.
    """
    seats = [EngineRank(index=index, num_engines=2, max_episodes=8) for index in range(2)]
    hands = [seat.assign(range(10, 18), {12: 1, 13: 2, 16: 1}, assignment_id=1) for seat in seats]
    assert [(hand.own_groups, hand.remaining, hand.group_size, hand.capacity) for hand in hands] == [([12, 16], [], 2, 8), ([13], [], 2, 8)]
    hands = [seat.assign(range(10, 18), {12: 1, 13: 4, 16: 1}, assignment_id=1) for seat in seats]
    assert [(hand.own_groups, hand.remaining, hand.group_size, hand.capacity) for hand in hands] == [([12], [16], 4, 8), ([13], [16], 4, 8)]


def played_by(renderer: Renderer, engines: Sequence[DelayedEngine], *, num_groups: int, rounds: int = 1) -> list[list[list[Rollout]]]:
    """Return, for each generation batch, the rollouts of each engine.

    Each group has 2 episodes; max_episodes is 4.
    """
    store, meeting, parts = dist.HashStore(), threading.Barrier(len(engines)), {}
    rounds_of: list[list[list[Rollout]]] = [[] for _ in range(rounds)]

    def play(index: int) -> None:
        numbers = iter(range(rounds))

        def gather(mine: list[Rollout]) -> list[Rollout]:
            parts[index] = mine
            meeting.wait(60)
            everyones = [parts[other] for other in range(len(engines))]
            meeting.wait(60)
            if index == 0:
                rounds_of[next(numbers)] = everyones
            return [rollout for part in everyones for rollout in part]

        seat = EngineRank(index=index, num_engines=len(engines), max_episodes=4, counter=store)
        fleet = make_rollout_manager(renderer, engines[index], engine_rank=seat, gather_rollouts=gather)
        for _ in range(rounds):
            fleet.run_examples(EXAMPLES[:num_groups], num_samples=2, settings=EPISODE)

    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(play, range(len(engines))))
    assert not any(store.check([f"groups/{number}"]) for number in range(1, rounds + 1)), "nothing is left in the store"
    return rounds_of


def test_the_faster_engine_plays_more_and_what_is_played_is_the_same(renderer: Renderer) -> None:
    """Each engine starts with 3 of 10 groups. The faster engine also runs the remaining 4, and the
    rollouts equal those of a single engine.
    """
    engines = [DelayedEngine(reply_s=0.5), DelayedEngine(reply_s=0.005)]
    alone = strip_timings(make_rollout_manager(renderer).run_examples(EXAMPLES, num_samples=2, settings=EPISODE))
    ((slow, fast),) = played_by(renderer, engines, num_groups=10)
    assert strip_timings(sorted(slow + fast, key=lambda rollout: (rollout.group, rollout.sample_index))) == alone
    assert {rollout.group for rollout in slow} == {0, 2, 4} and {rollout.group for rollout in fast} == {1, 3, 5, 6, 7, 8, 9}
    assert engines[0].max_in_flight == 6 and engines[1].max_in_flight <= 6, "3 groups at once"


def test_every_round_has_a_count_of_its_own(renderer: Renderer) -> None:
    rounds = played_by(renderer, [DelayedEngine(reply_s=0.01), DelayedEngine(reply_s=0.01)], num_groups=10, rounds=3)
    assert [sorted((r.group, r.sample_index) for part in parts for r in part) for parts in rounds] == [
        [(group, sample) for group in range(10) for sample in range(2)]
    ] * 3


def test_an_engine_that_has_failed_takes_no_more_than_its_share(renderer: Renderer) -> None:
    """A failing engine runs only its even share, although it would finish all remaining groups at
    once. If all engines fail, every group still runs.
    """
    broken, whole = played_by(renderer, [DelayedEngine(fails_from=0), DelayedEngine(reply_s=0.02)], num_groups=10)[0]
    assert {rollout.stop_reason for rollout in broken} == {StopReason.PERMANENT_INFRA_ERROR} and len(
        {rollout.group for rollout in broken}
    ) == 5
    assert all(rollout.is_scored for rollout in whole) and len({rollout.group for rollout in whole}) == 5
    parts = played_by(renderer, [DelayedEngine(fails_from=0), DelayedEngine(fails_from=3)], num_groups=9)[0]
    assert sorted((r.group, r.sample_index) for part in parts for r in part) == [
        (group, sample) for group in range(9) for sample in range(2)
    ]


def test_what_an_episode_raises_ends_the_others(renderer: Renderer) -> None:
    """An exception in an episode, unlike an infrastructure error, is raised without retries. The
    episodes in progress are cancelled.
    """

    @dataclass
    class Mistaken(DelayedEngine):
        ended: int = 0

        async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
            self.requests.append(sampling)
            if len(self.requests) == 3:
                raise KeyError("a mistake")
            try:
                await asyncio.sleep(60)
            finally:
                self.ended += 1

    engine = Mistaken()
    with pytest.raises(KeyError, match="a mistake"):
        make_rollout_manager(renderer, engine).run_examples(EXAMPLES[:2], num_samples=3, settings=EPISODE)
    assert engine.ended == len(engine.requests) - 1 == 5
