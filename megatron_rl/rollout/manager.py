"""Runs episodes on all engines and returns their rollouts to the training loop.

Each group is assigned to one engine (load_balancer.py), so that its prefix and image caches serve the whole group.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from megatron_rl.errors import GracefulStop, InfraError
from megatron_rl.rollout.conversation import SharedPrompt, TokenConversation
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.episode import EpisodeSettings, Timed, require_access, run_episode, seed_of, untimed
from megatron_rl.rollout.load_balancer import EngineRank, StartEpisode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings, PromptScheduler, ScheduledGroup
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.work_buffer import DUE, BufferState, StepTarget, WorkBuffer
from megatron_rl.types import Example, Rollout, StopReason, TokenSequence

T = TypeVar("T")
_TRIES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before what is down is tried again; each pause is twice the one before."""
GatherFn = Callable[[list[Rollout] | None], list[Rollout]]
"""From this engine's rollouts (None on ranks that do not lead one) to those of all engines, in any order, on every rank."""
ShareFn = Callable[[BufferState | None], list[BufferState | None]]
"""What every rank says, in their order, on every rank."""
PlayFn = Callable[[], Coroutine[object, object, T]]


async def run_to_completion(play: PlayFn[T]) -> T | None:
    return await play()


class Trainer(Protocol):
    """What shares its device with an engine: it leaves when the engine's turn comes, and comes back."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class RolloutManager:
    """Engines, of which this process holds one or a part of one, or which it asks. Every rank calls every method, together with the others.

    A device that both use is the engine's from the beginning, the trainer's from `offloaded` on, the engine's again from `update_weights`
    on.
    """

    def __init__(
        self, task: Task, *, engine: RolloutEngine, renderer: Renderer, trainer: Trainer, gather: GatherFn,
        episode: EpisodeSettings, round_settings: GenerationSettings, seat: EngineRank = EngineRank(), share: ShareFn = lambda mine: [mine],
        grace: Callable[[PlayFn[T]], Coroutine[object, object, T | None]] = run_to_completion,
        patience_s: float = 0.0, tell: Callable[[str], None] = print, timed: Callable[[int, int], Timed] = lambda *_: untimed,
    ) -> None:  # fmt: skip
        """`episode` is how training plays, with the run's seed; `seat` is this process's engine's place among all.

        `grace` plays, and returns None where it gave up. What is down is waited for up to patience_s, and `tell` says so. `timed` gives, by
        group and sample, what stands around an episode's parts.
        """
        self.task, self.engine, self.renderer, self.trainer = task, engine, renderer, trainer
        self.gather, self.share, self.episode, self.round_settings = gather, share, episode, round_settings
        self.seat, self.grace, self.patience_s, self.tell, self.timed = seat, grace, patience_s, tell, timed
        self.admission = PromptScheduler(lambda: self._examples, rounds=round_settings, episode=episode)
        self.num_stale = 0
        """Episodes that were given up before the last step's, because they were too old to be trained on."""
        self.is_away = False
        self._table = WorkBuffer()
        """What this engine plays for training."""
        self._reports: list[BufferState] = []
        """What each engine had under way when the last step had enough."""
        self._num_dealings = 0
        """Of this fleet so far, on every rank the same."""

    @cached_property
    def _examples(self) -> Sequence[Example]:
        """The training split, asked for by the first step: a run that only evaluates need not have one."""
        return self.task.examples("train")

    def generate(self, step: int, *, enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """The rollouts of a training step: round after round until `enough` holds of all of them together, or max_rounds are played.

        Groups are numbered through from round to round. With round_settings.max_staleness those come first that were begun first.
        """
        rollouts: list[Rollout] = []
        stale = self.admission.drop_stale(step, self._oldest())
        self.num_stale = len(stale) * self.round_settings.group_size
        for _ in range(self.round_settings.max_rounds):
            rollouts += self._generate_batch(step, stale)
            if enough(rollouts):
                break
        return rollouts

    def _oldest(self) -> dict[int, int | None]:
        return {group: oldest for each in self._reports for group, oldest in each.oldest.items()}

    def _generate_batch(self, step: int, stale: Sequence[int]) -> list[Rollout]:
        """The rollouts of a round's number of groups: of those under way, which all play on, those that are played to their end."""
        assert not self.is_away, "the device is the trainer's: serve weights before episodes"
        num, samples = self.round_settings.num_prompts, range(self.round_settings.group_size)
        new, waiting = self.admission.schedule(step), self.admission.waiting
        if len(waiting) > num:
            chosen, rollouts = self._run_groups(new, num, stale, step=step)
        else:
            begun, self._reports = waiting.keys() - new, []
            chosen = dict(waiting)
            rollouts = self._run_episodes(chosen, dict.fromkeys(waiting, samples), table=self._table, begun=begun, stale=stale)
        self.admission.finish(list(chosen))
        return self._retry_failed(chosen, rollouts)

    def _run_groups(
        self, new: Mapping[int, ScheduledGroup], num: int, stale: Sequence[int], *, step: int
    ) -> tuple[dict[int, ScheduledGroup], list[Rollout]]:  # fmt: skip
        """The first `num` groups of those under way that are played, those that are due among them. What every engine has is told once,
        when all together have enough, so that all choose the same; an engine that has played all that it has waits there for the others."""
        size, waiting = self.round_settings.group_size, self.admission.waiting
        self._num_dealings += 1
        loads = [len([group for group in each.playing if group in waiting]) for each in self._reports] or [0] * self.seat.num_engines
        hand = self.seat.assign_by_load(list(new), size=size, loads=loads)
        ready = {group for each in self._reports for group in each.played if group in waiting}
        due = self.admission.due_groups(step, self._oldest())
        goal = StepTarget(num=num - len(ready), name=f"played/{self._num_dealings}", counter=self.seat.counter, due=frozenset(due - ready))
        begin = self._start_group(new, dict.fromkeys(new, range(size)), self._table)

        async def mine() -> BufferState:
            await self._table.drop(stale)
            await self._table.run(hand, begin, goal=goal)
            return self._table.state(engine=self.seat.index)

        report = self.engine.run(self.grace(mine))
        self._reports = [each for each in self.share(report) if each is not None]
        if self.seat.index == 0 and self.seat.counter is not None:
            for name in (goal.name, f"{goal.name}/{DUE}"):
                self.seat.counter.delete_key(name)
        played = sorted(group for each in self._reports for group in each.played)
        if len(self._reports) < self.seat.num_engines or len(played) < num:
            raise GracefulStop
        chosen = {group: waiting[group] for group in sorted(sorted(played, key=lambda group: group not in due)[:num])}
        return chosen, self.gather(None if report is None else self._table.take(chosen))

    def run_examples(self, examples: Sequence[Example], *, samples: int, settings: EpisodeSettings, first_group: int = 0) -> list[Rollout]:
        """`samples` episodes of each example, ordered by group and sample. A group's number is first_group and its place in `examples`.
        What is under way for training goes on meanwhile.

        GracefulStop, on every rank, where the grace of one engine ended before its episodes did.
        """
        dealt = {first_group + place: ScheduledGroup(example=example, settings=settings) for place, example in enumerate(examples)}
        assert not self.is_away, "the device is the trainer's: serve weights before episodes"
        return self._retry_failed(dealt, self._run_episodes(dealt, dict.fromkeys(dealt, range(samples)), table=WorkBuffer()))

    def _retry_failed(self, dealt: Mapping[int, ScheduledGroup], rollouts: list[Rollout]) -> list[Rollout]:
        """All of them, ordered; those that failed because something was down are played again, with their own seeds, until it is back or
        patience_s have passed. That time is read from the rollouts themselves, which are everywhere the same: all ranks give up
        together.

        What was waited for already (InfraTimeout) is tried once more and waited for no longer: it may be back by now. RunDenied: a server
        does not accept this run's key, which is waited for in no way.
        """
        require_access(rollouts)
        if waited_for := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_TIMEOUT]:
            again = self._rerun_failed(dealt, waited_for)
            rollouts = [rollout for rollout in rollouts if rollout.stop_reason is not StopReason.INFRA_TIMEOUT] + again
        waited, pause = 0.0, FIRST_PAUSE_S
        while waited < self.patience_s and (down := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_ERROR]):
            pause = min(pause, self.patience_s - waited)
            self.tell(
                f"waiting: {len(down)} of {len(rollouts)} rollouts failed ({down[0].reason}); they are played again in {pause:.0f} s, "
                f"for {self.patience_s - waited:.0f} s more (run.outage_timeout_s)"
            )
            again = self._rerun_failed(dealt, down, pause=pause)
            rollouts = [rollout for rollout in rollouts if rollout.stop_reason is not StopReason.INFRA_ERROR] + again
            require_access(again)
            waited += pause + max(rollout.wall_s for rollout in again)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return sorted(rollouts, key=lambda rollout: (rollout.group, rollout.sample_index))

    def _rerun_failed(self, dealt: Mapping[int, ScheduledGroup], failed: Sequence[Rollout], *, pause: float = 0.0) -> list[Rollout]:
        samples: dict[int, list[int]] = {}
        for rollout in failed:
            samples.setdefault(rollout.group, []).append(rollout.sample_index)
        return self._run_episodes(dealt, samples, table=WorkBuffer(), pause=pause)

    def _run_episodes(
        self, dealt: Mapping[int, ScheduledGroup], samples: Mapping[int, Sequence[int]], *,
        table: WorkBuffer, begun: Collection[int] = (), stale: Sequence[int] = (), pause: float = 0.0,
    ) -> list[Rollout]:  # fmt: skip
        """These samples of groups, to their end, after a pause; `begun` are those that are at the table already."""
        self._num_dealings += 1
        sizes = {group: len(of_group) for group, of_group in samples.items()}
        new = {group: size for group, size in sizes.items() if group not in begun}
        hand = self.seat.assign(list(dealt), new, number=self._num_dealings)
        begin = self._start_group(dealt, samples, table)

        async def mine() -> list[Rollout]:
            await asyncio.sleep(pause)
            await table.drop(stale)
            await table.run(hand, begin)
            return table.take(dealt)

        rollouts = self.gather(self.engine.run(self.grace(mine)))
        hand.clear()
        if len(rollouts) < sum(sizes.values()):
            raise GracefulStop
        return rollouts

    def _start_group(self, dealt: Mapping[int, ScheduledGroup], samples: Mapping[int, Sequence[int]], table: WorkBuffer) -> StartEpisode:
        def begin(group: int) -> list[Coroutine[object, object, Rollout]]:
            opening = SharedPrompt(self.renderer, len(samples[group]))
            return [self._episode(dealt[group], table, opening=opening, group=group, sample=sample) for sample in samples[group]]

        return begin

    async def _episode(self, dealt: ScheduledGroup, table: WorkBuffer, *, opening: SharedPrompt, group: int, sample: int) -> Rollout:
        """An episode that fails because something was down is played again, _TRIES times in all."""
        failed_s, settings = 0.0, dealt.settings
        for _ in range(_TRIES):
            conversation = table.conversations[group, sample] = TokenConversation(self.engine, self.renderer, settings, opening)
            rollout = await run_episode(
                self.task, dealt.example, conversation=conversation, settings=settings, group=group, sample=sample,
                timed=self.timed(group, sample),
            )  # fmt: skip
            rollout.wall_s += failed_s
            if rollout.stop_reason is not StopReason.INFRA_ERROR:
                break
            failed_s = rollout.wall_s
        rollout.drop_patches()
        return rollout

    def render_first_prompt(self) -> TokenSequence | None:
        """How the first training example will begin, on the leader of the first engine; None elsewhere, and where it cannot."""

        async def opened() -> TokenSequence | None:
            first = self.seat.index == 0
            return await render_prompt(self.task, self._examples[0], self.renderer, seed=seed_of(self.episode.seed, 0)) if first else None

        return self.engine.run(opened())

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the engines' weights by these, proven to have arrived, and give the device to the engine.

        `tensors` may be views of the trainer's: it is awake while they are read.
        """
        with self.offloaded():
            self.engine.load_weights(tensors, version=version)
        self.trainer.sleep()
        self.engine.wake()
        self.is_away = False

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """The device is the trainer's inside the block, and stays so after it until `update_weights`: a sleeping engine has no weights."""
        if not self.is_away:
            self.engine.sleep()
            self.trainer.wake()
            self.is_away = True
        yield

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `update_weights`."""
        return self.engine.metrics()

    def busy_s(self) -> float:
        """Seconds that this process's engine has worked."""
        return self.engine.busy_s

    def start(self) -> None:
        self.engine.run(self.task.start())

    def close(self, *, in_step: bool = True) -> None:
        """The last thing a process does: LocalEngine.close ends its process group too.

        in_step: all ranks are here. After a failure others may be elsewhere or gone, and nobody is waited for.
        """

        async def ending() -> None:
            await self._table.drop_all()
            await self.task.close()

        try:
            if in_step:
                self.engine.run(ending())
            else:
                self.engine.run_alone(ending())
        finally:
            self.engine.close()


async def render_prompt(task: Task, example: Example, renderer: Renderer, *, seed: int) -> TokenSequence | None:
    """How an example begins, without an engine; None where it cannot: its episodes will fail for the same reason, and say so."""
    env = task.env(example)
    try:
        return renderer.prompt(await env.reset(seed))
    except InfraError:
        return None
    finally:
        await env.close()
