"""Assigns the groups of a generation batch to the engines.

Each engine starts with groups that are assigned by their position in the batch. If the engines have
capacity for the whole batch, all groups are assigned in this way, and the assignment does not
depend on the engines' speed. Otherwise, some groups remain unassigned at first. An engine takes
some of the remaining groups whenever it has free capacity. A counter that all engines share ensures
that each group is taken only once. All episodes of a group run on the same engine, which caches
their common prompt.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.types import Rollout

StartGroupFn = Callable[[int], Sequence[Coroutine[object, object, Rollout]]]
"""Takes a group number and returns the group's episodes as coroutines."""


class SharedCounter(Protocol):
    """Interface to named counters that all engines share; torch.distributed.Store implements it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to a counter, which starts at 0, and return the new value.

        The call may block on the network.
        """
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a counter."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineRank:
    """Index of an engine, the number of engines, and the capacity of each engine."""

    index: int = 0
    num_engines: int = 1
    max_episodes: int = 1
    """Maximum number of episodes that an engine generates concurrently."""
    counter: SharedCounter | None = None
    """Counter shared by all engines; None for a single engine."""

    def assign(self, groups: Sequence[int], sizes: Mapping[int, int], *, assignment_id: int) -> "GroupAssignment":
        """Return the groups of a generation batch that this engine runs.

        If there is only one engine, all groups are assigned to it. Otherwise, each engine starts
        with as many groups as fit into max_episodes episodes. The number is at least half of an
        even share of the groups, and at most the whole share. The minimum exists because some
        episodes wait for tools.

        Args:
            groups: All groups of the batch.
            sizes: Number of episodes to start in each group, keyed by group number. Groups that are
                not in `sizes` are not started.
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
        """Assign each group to the least loaded engine; return this engine's groups.

        All groups are assigned at once. A faster engine finishes more groups, so its load is lower
        at the next assignment.

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
    """Groups that this engine starts with."""
    remaining: list[int]
    """Groups that are unassigned until an engine with free capacity takes them."""
    even_share: int
    """Number of groups in the batch divided by the number of engines, rounded up."""
    capacity: int
    """Maximum number of episodes that the engine runs concurrently."""
    group_size: int
    """Number of episodes in the largest group."""
    counter_key: str
    """Name of the shared counter for the number of groups taken from `remaining`."""
    engine_rank: EngineRank

    async def requested(self, episodes: list[asyncio.Task[Rollout]], num_groups: int) -> int:
        """Wait until there is capacity for a group; return the number of groups to start.

        Once an episode has failed, the engine takes no more than its even share. A broken engine,
        on which episodes fail quickly, would otherwise take groups that a healthy engine could run.
        If all engines are broken, every group still runs, since each engine takes its even share.
        """
        while len(playing := [episode for episode in episodes if not episode.done()]) + self.group_size > self.capacity:
            done, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                episode.result()  # raise its exception now, not once there is capacity
        num = (self.capacity - len(playing)) // self.group_size
        has_failed = any(episode.done() and not episode.result().is_scored for episode in episodes)
        return min(num, self.even_share - num_groups) if has_failed else num

    async def take_groups(self, num: int) -> list[int]:
        """Take at most `num` of the remaining groups; return an empty list if no group is left."""
        counter = self.engine_rank.counter
        assert counter is not None, "several engines share a counter"
        end = await asyncio.to_thread(counter.add, self.counter_key, num)
        return self.remaining[end - num : end]

    def clear(self) -> None:
        """Delete the shared counter. Call this method after every engine has run its assignment."""
        if self.remaining and self.engine_rank.index == 0:
            counter = self.engine_rank.counter
            assert counter is not None, "several engines share a counter"
            counter.delete_key(self.counter_key)
