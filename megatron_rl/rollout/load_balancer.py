"""Assigns the groups of a generation batch to the engines.

Every engine starts with groups chosen by their position in the batch. If an engine can hold its
even share at once, that is all of its share, and the assignment does not depend on the engines'
speed. The groups beyond that have no engine at first: an engine with free capacity takes them,
using a counter that all engines share. A group is never split, because its members share a prompt
that their engine has cached.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.types import Rollout

StartGroupFn = Callable[[int], Sequence[Coroutine[object, object, Rollout]]]
"""Returns the episodes of a group as coroutines."""


class SharedCounter(Protocol):
    """Named counters that all engines share, such as torch.distributed.Store."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter, which starts at 0, and return the sum.

        May wait for the network.
        """
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a counter."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineRank:
    """Index and capacity of an engine among all engines."""

    index: int = 0
    num_engines: int = 1
    max_episodes: int = 1
    """Number of episodes that an engine computes at once."""
    counter: SharedCounter | None = None
    """Counter shared by all engines; None for a single engine."""

    def assign(self, groups: Sequence[int], sizes: Mapping[int, int], *, assignment_id: int) -> "GroupAssignment":
        """Return the groups that this engine runs of a generation batch.

        An engine holds max_episodes episodes, and at least half of its even share, because some of
        its episodes will wait for tools. A single engine holds all groups.

        Args:
            groups: All groups of the batch.
            sizes: Number of episodes of each group to start, which may be only some of `groups`.
            assignment_id: Unique number of this assignment.
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
        """Return the groups that this engine runs; each group goes to the least-loaded engine.

        No group remains without an engine. A faster engine has a lower load at the next assignment.

        Args:
            groups: Groups to assign.
            size: Number of episodes per group.
            loads: Number of groups that each engine has in progress.
        """
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
    """Groups of a generation batch that one engine runs."""

    own_groups: list[int]
    """Groups that this engine has from the beginning."""
    remaining: list[int]
    """Groups that have no engine until one takes them."""
    even_share: int
    """Number of groups of the batch per engine, rounded up."""
    capacity: int
    """Number of episodes that the engine runs at once."""
    group_size: int
    """Number of episodes of the largest group."""
    counter_key: str
    """Name of the shared counter that numbers the groups taken from `remaining`."""
    engine_rank: EngineRank

    async def requested(self, episodes: list[asyncio.Task[Rollout]], num_groups: int) -> int:
        """Wait until there is capacity for a group, and return how many further groups fit.

        Once an episode has failed, the engine gets no more than its even share. Failures are quick,
        so a broken engine would otherwise take groups that a healthy one could run. If all engines
        are broken, every group still runs.
        """
        while len(playing := [episode for episode in episodes if not episode.done()]) + self.group_size > self.capacity:
            done, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                episode.result()  # raise its exception now, not once there is capacity
        num = (self.capacity - len(playing)) // self.group_size
        has_failed = any(episode.done() and not episode.result().is_scored for episode in episodes)
        return min(num, self.even_share - num_groups) if has_failed else num

    async def take_groups(self, num: int) -> list[int]:
        """Take at most `num` of the remaining groups; return an empty list if none is left."""
        end = await asyncio.to_thread(self.engine_rank.counter.add, self.counter_key, num)
        return self.remaining[end - num : end]

    def clear(self) -> None:
        """Delete the shared counter, after every engine has run its assignment."""
        if self.remaining and self.engine_rank.index == 0:
            self.engine_rank.counter.delete_key(self.counter_key)
