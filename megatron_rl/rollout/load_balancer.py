"""Which engine plays which group of a round, where several play side by side.

Every engine begins with groups dealt by their numbers: with all of them where it can hold its even share at once, so that nothing depends
on who is faster. What is too much for that is nobody's at first, and goes to whoever has room, told apart by a counter that all share. A
group stays whole, because its members share a prompt that its engine has cached.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.types import Rollout

StartGroupFn = Callable[[int], Sequence[Coroutine[object, object, Rollout]]]
"""From a group to its episodes."""


class SharedCounter(Protocol):
    """Numbers by name that all engines share: torch.distributed.Store is one."""

    def add(self, key: str, amount: int) -> int:
        """Raise a number, which begins with 0, and return it. May wait for the network."""
        ...

    def delete_key(self, key: str) -> bool: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineRank:
    """An engine's place among those that play side by side."""

    index: int = 0
    num_engines: int = 1
    max_episodes: int = 1
    """Episodes that an engine computes at once."""
    counter: SharedCounter | None = None
    """None: it plays alone."""

    def assign(self, groups: Sequence[int], sizes: Mapping[int, int], *, assignment_id: int) -> "GroupAssignment":
        """What this engine plays of a round of `groups`. `sizes` has the episodes of those that are played, all or some; `assignment_id`
        is this dealing's alone.

        An engine holds max_episodes, and at least half of its even share: some of its episodes will wait for tools. One alone holds all.
        """
        share, size = math.ceil(len(groups) / self.num_engines), max(sizes.values(), default=1)
        num_held = share if self.num_engines == 1 else min(share, max(self.max_episodes // size, math.ceil(share / 2)))
        positions = {group: place for place, group in enumerate(groups)}
        by_number = [group for group in sizes if positions[group] < num_held * self.num_engines]
        return GroupAssignment(
            own_groups=[group for group in by_number if positions[group] % self.num_engines == self.index],
            remaining=[group for group in sizes if positions[group] >= num_held * self.num_engines],
            even_share=share, capacity=num_held * size, group_size=size, counter_key=f"groups/{assignment_id}", engine_rank=self,
        )  # fmt: skip

    def assign_by_load(self, groups: Sequence[int], *, size: int, loads: Sequence[int]) -> "GroupAssignment":
        """What this engine plays of further groups, of `size` episodes each, beside those that all engines have under way (loads, in
        groups): each goes to the engine that then has fewest. Nothing is left over: who is faster has less under way the next time."""
        loads, own = list(loads), []
        for group in groups:
            engine = min(range(self.num_engines), key=loads.__getitem__)
            loads[engine] += 1
            own += [group] if engine == self.index else []
        return GroupAssignment(
            own_groups=own, remaining=[], even_share=len(own), capacity=len(own) * size, group_size=size, counter_key="", engine_rank=self
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupAssignment:
    """What an engine plays of a round."""

    own_groups: list[int]
    """Groups that are this engine's from the beginning."""
    remaining: list[int]
    """Groups that are nobody's before they are taken."""
    even_share: int
    """Groups of the round for each engine, rounded up."""
    capacity: int
    """Episodes that it plays at once."""
    group_size: int
    """Episodes of the largest group."""
    counter_key: str
    engine_rank: EngineRank

    async def requested(self, episodes: list[asyncio.Task[Rollout]], num_groups: int) -> int:
        """Groups that there is room for, once there is. Where an episode failed, which goes quickly, no more than the even share: what is
        broken here may be whole elsewhere, and where it is not every group is still played."""
        while len(playing := [episode for episode in episodes if not episode.done()]) + self.group_size > self.capacity:
            done, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                episode.result()  # what it raised is not kept until there is room
        num = (self.capacity - len(playing)) // self.group_size
        has_failed = any(episode.done() and not episode.result().is_scored for episode in episodes)
        return min(num, self.even_share - num_groups) if has_failed else num

    async def take_groups(self, num: int) -> list[int]:
        """At most so many of what is left; none when all are taken."""
        end = await asyncio.to_thread(self.engine_rank.counter.add, self.counter_key, num)
        return self.remaining[end - num : end]

    def clear(self) -> None:
        """Once every engine has played its hand."""
        if self.remaining and self.engine_rank.index == 0:
            self.engine_rank.counter.delete_key(self.counter_key)
