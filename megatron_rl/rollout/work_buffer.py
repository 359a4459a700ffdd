"""What an engine has under way: groups of episodes, from when they are begun until they are taken.

An episode is a task of the engine's event loop. Where the loop stands, because the device is the trainer's, the episode stands too, with
all that it has: tokens, pictures, its environment, a box. When the loop goes on, so does the episode.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.load_balancer import GroupAssignment, SharedCounter, StartGroupFn
from megatron_rl.types import Rollout

DUE = "due"
POLL_S = 0.1
"""After so long at most an engine sees what others have played."""


@dataclass(slots=True, kw_only=True)
class StepTarget:
    """So many groups that all engines together play to their end, from its beginning on."""

    num_groups: int
    name: str
    """This goal's alone."""
    counter: SharedCounter | None
    """None: an engine plays alone."""
    due: frozenset[int] = frozenset()
    """Groups that must be among them."""
    has_reached: int = 0
    num_due_reached: int = 0

    async def is_met(self, completed: Collection[int]) -> bool:
        """Whether enough are played, these further ones by this engine."""
        num_due = len(self.due.intersection(completed))
        if self.counter is None:
            self.has_reached += len(completed)
            self.num_due_reached += num_due
        else:
            self.has_reached = await asyncio.to_thread(self.counter.add, self.name, len(completed))
            if self.due:
                self.num_due_reached = await asyncio.to_thread(self.counter.add, f"{self.name}/{DUE}", num_due)
        return self.has_reached >= self.num_groups and self.num_due_reached >= len(self.due)


@dataclass(slots=True, frozen=True, kw_only=True)
class BufferState:
    """What one engine has under way."""

    engine: int
    finished: list[int]
    """Groups all of whose episodes have ended."""
    running: list[int]
    """The others."""
    oldest_versions: dict[int, int | None]
    """By group, the version of the oldest weights that any of its episodes asked; None before the first has."""


@dataclass(slots=True)
class WorkBuffer:
    conversations: dict[tuple[int, int], TokenConversation] = field(default_factory=dict)
    """By group and sample, what the episode that is under way, or has ended, has said."""
    _groups: dict[int, list[asyncio.Task[Rollout]]] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)
    """Groups that have ended and were counted."""

    async def run(self, assignment: GroupAssignment, start_episode: StartGroupFn, *, target: StepTarget | None = None) -> None:
        """Begin the hand's groups, and more of what is left as soon as there is room. Play until all groups here have ended, or the goal is
        met. What an episode raises comes out of here, the others end."""
        async with AsyncExitStack() as failing:
            failing.push_async_callback(self.cancel_all)
            await self._start_groups(assignment, start_episode)
            if target is None:
                await asyncio.gather(*self._episodes())
            else:
                await self._run_until(target)
            failing.pop_all()

    async def _start_groups(self, assignment: GroupAssignment, start_episode: StartGroupFn) -> None:
        own: list[asyncio.Task[Rollout]] = []
        more, num_groups, has_left = assignment.own_groups, 0, bool(assignment.remaining)
        while True:
            for group in more:
                self._groups[group] = [asyncio.create_task(episode) for episode in start_episode(group)]
                own += self._groups[group]
            num_groups += len(more)
            if not has_left:
                return
            num = await assignment.requested(own, num_groups)
            more = await assignment.take_groups(num) if num > 0 else []
            has_left = bool(more)

    async def _run_until(self, target: StepTarget) -> None:
        while True:
            more = set(self._finished_groups()) - self._counted
            self._counted.update(more)
            playing = [episode for episode in self._episodes() if not episode.done()]
            if await target.is_met(more) or not playing:
                return
            done, _ = await asyncio.wait(playing, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for episode in done:
                episode.result()  # what it raised is not kept

    def _episodes(self) -> list[asyncio.Task[Rollout]]:
        return [episode for episodes in self._groups.values() for episode in episodes]

    def _finished_groups(self) -> list[int]:
        return [group for group, episodes in self._groups.items() if all(episode.done() for episode in episodes)]

    def state(self, *, engine: int) -> BufferState:
        """Who plays next sets a goal of what is not played by now."""
        played = self._finished_groups()
        self._counted.update(played)
        oldest: dict[int, int | None] = {}
        for (group, _), conversation in self.conversations.items():
            versions = [each for each in (oldest.get(group), conversation.first_token_version) if each is not None]
            oldest[group] = min(versions, default=None)
        return BufferState(
            engine=engine, finished=played, running=[group for group in self._groups if group not in played], oldest_versions=oldest
        )

    def collect_rollouts(self, groups: Iterable[int]) -> list[Rollout]:
        """The rollouts of those of these groups that are here. They have ended."""
        mine = [group for group in groups if group in self._groups]
        rollouts = [episode.result() for group in mine for episode in self._groups[group]]
        self._remove(mine)
        return rollouts

    async def cancel_groups(self, groups: Collection[int]) -> None:
        """Give up those of these groups that are here, and close what they have open."""
        mine = [group for group in groups if group in self._groups]
        episodes = [episode for group in mine for episode in self._groups[group]]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        self._remove(mine)

    async def cancel_all(self) -> None:
        await self.cancel_groups(list(self._groups))

    def _remove(self, groups: Collection[int]) -> None:
        for group in groups:
            del self._groups[group]
        self._counted.difference_update(groups)
        for key in [key for key in list(self.conversations) if key[0] in groups]:  # others may begin meanwhile (server_engine.py)
            del self.conversations[key]
