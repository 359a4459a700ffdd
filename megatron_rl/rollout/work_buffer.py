"""Buffer of an engine's episodes, from their start until their rollouts are collected.

An episode is an asyncio task in the engine's event loop. While the loop is paused because the
trainer uses the device, the episode keeps its tokens, images, environment and sandbox. The episode
continues when the loop resumes.
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
"""Maximum delay in seconds before an engine notices that other engines have finished groups."""


@dataclass(slots=True, kw_only=True)
class StepTarget:
    """Target of a step: the number of groups that all engines together must finish."""

    num_groups: int
    name: str
    """Unique name of this target's counter."""
    counter: SharedCounter | None
    """Counter shared by all engines; None for a single engine."""
    due: frozenset[int] = frozenset()
    """Groups that must finish before the target is met."""
    has_reached: int = 0
    """Number of groups that all engines together had finished at the last check."""
    num_due_reached: int = 0
    """Number of due groups that all engines together had finished at the last check."""

    async def is_met(self, completed: Collection[int]) -> bool:
        """Count this engine's newly completed groups; return True if the target is met."""
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
    """State of the work buffer of one engine."""

    engine: int
    """Index of the engine."""
    finished: list[int]
    """Groups in which all episodes have finished."""
    running: list[int]
    """Groups in which some episodes have not finished."""
    oldest_versions: dict[int, int | None]
    """Oldest weight version used by each group, keyed by group number; None before the group's
    first request.
    """


@dataclass(slots=True)
class WorkBuffer:
    """Groups of episodes that are running, or finished but not yet collected, on one engine."""

    conversations: dict[tuple[int, int], TokenConversation] = field(default_factory=dict)
    """Conversation of each episode in the buffer, keyed by group number and sample index."""
    _groups: dict[int, list[asyncio.Task[Rollout]]] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)
    """Finished groups that were already counted for a target."""

    async def run(self, assignment: GroupAssignment, start_group: StartGroupFn, *, target: StepTarget | None = None) -> None:
        """Start the assigned groups and run until all groups in the buffer end or `target` is met.

        The assignment's `remaining` groups start as soon as the engine has capacity. If an episode
        raises an exception, all other episodes are cancelled and the exception is re-raised.
        """
        async with AsyncExitStack() as failing:
            failing.push_async_callback(self.cancel_all)
            await self._start_groups(assignment, start_group)
            if target is None:
                await asyncio.gather(*self._episodes())
            else:
                await self._run_until(target)
            failing.pop_all()

    async def _start_groups(self, assignment: GroupAssignment, start_group: StartGroupFn) -> None:
        own: list[asyncio.Task[Rollout]] = []
        more, num_groups, has_left = assignment.own_groups, 0, bool(assignment.remaining)
        while True:
            for group in more:
                self._groups[group] = [asyncio.create_task(episode) for episode in start_group(group)]
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
                episode.result()  # raise its exception now

    def _episodes(self) -> list[asyncio.Task[Rollout]]:
        return [episode for episodes in self._groups.values() for episode in episodes]

    def _finished_groups(self) -> list[int]:
        return [group for group, episodes in self._groups.items() if all(episode.done() for episode in episodes)]

    def state(self, *, engine: int) -> BufferState:
        """Return the state of the buffer.

        All finished groups are marked as counted, because the target of the next step excludes
        groups that have already finished.
        """
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
        """Remove the given groups from the buffer and return their rollouts.

        The groups must have finished. Groups of other engines are ignored.
        """
        mine = [group for group in groups if group in self._groups]
        rollouts = [episode.result() for group in mine for episode in self._groups[group]]
        self._remove(mine)
        return rollouts

    async def cancel_groups(self, groups: Collection[int]) -> None:
        """Cancel the episodes of the given groups and remove them from the buffer.

        Waits until the episodes have closed their environments. Groups of other engines are
        ignored.
        """
        mine = [group for group in groups if group in self._groups]
        episodes = [episode for group in mine for episode in self._groups[group]]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        self._remove(mine)

    async def cancel_all(self) -> None:
        """Cancel all episodes and remove them from the buffer."""
        await self.cancel_groups(list(self._groups))

    def _remove(self, groups: Collection[int]) -> None:
        for group in groups:
            del self._groups[group]
        self._counted.difference_update(groups)
        for key in [key for key in list(self.conversations) if key[0] in groups]:  # a copy: episodes may start meanwhile (server_engine.py)
            del self.conversations[key]
