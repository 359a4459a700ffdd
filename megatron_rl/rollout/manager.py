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
from megatron_rl.rollout.episode import EpisodeSettings, TimerFn, derive_seed, no_timer, require_access, run_episode
from megatron_rl.rollout.load_balancer import EngineRank, StartGroupFn
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings, PromptScheduler, ScheduledGroup
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.work_buffer import DUE, BufferState, StepTarget, WorkBuffer
from megatron_rl.types import Example, Rollout, StopReason, TokenSequence

T = TypeVar("T")
_MAX_ATTEMPTS = 3
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Before what is down is tried again; each pause is twice the one before."""
GatherRolloutsFn = Callable[[list[Rollout] | None], list[Rollout]]
"""From this engine's rollouts (None on ranks that do not lead one) to those of all engines, in any order, on every rank."""
AllGatherFn = Callable[[BufferState | None], list[BufferState | None]]
"""What every rank says, in their order, on every rank."""
MakeCoroutine = Callable[[], Coroutine[object, object, T]]


async def run_to_completion(run: MakeCoroutine[T]) -> T | None:
    return await run()


class Offloadable(Protocol):
    """What shares its device with an engine: it leaves when the engine's turn comes, and comes back."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class RolloutManager:
    """Engines, of which this process holds one or a part of one, or which it asks. Every rank calls every method, together with the others.

    A device that both use is the engine's from the beginning, the trainer's from `offloaded` on, the engine's again from `update_weights`
    on.
    """

    def __init__(
        self, task: Task, *, engine: RolloutEngine, renderer: Renderer, trainer: Offloadable, gather_rollouts: GatherRolloutsFn,
        episode_settings: EpisodeSettings, generation_settings: GenerationSettings, engine_rank: EngineRank = EngineRank(),
        all_gather: AllGatherFn = lambda mine: [mine],
        run_with_grace: Callable[[MakeCoroutine[T]], Coroutine[object, object, T | None]] = run_to_completion,
        outage_timeout_s: float = 0.0, log: Callable[[str], None] = print, make_timer: Callable[[int, int], TimerFn] = lambda *_: no_timer,
    ) -> None:  # fmt: skip
        """`episode_settings` is how training plays, with the run's seed; `engine_rank` is this process's engine's place among all.

        `run_with_grace` plays, and returns None where it gave up. What is down is waited for up to outage_timeout_s, and `log` says so.
        `make_timer` gives, by group and sample, what stands around an episode's parts.
        """
        self.task, self.engine, self.renderer, self.trainer = task, engine, renderer, trainer
        self.gather_rollouts, self.all_gather, self.episode_settings, self.generation_settings = (
            gather_rollouts,
            all_gather,
            episode_settings,
            generation_settings,
        )
        self.engine_rank, self.run_with_grace, self.outage_timeout_s, self.log, self.make_timer = (
            engine_rank,
            run_with_grace,
            outage_timeout_s,
            log,
            make_timer,
        )
        self.scheduler = PromptScheduler(lambda: self._examples, settings=generation_settings, episode_settings=episode_settings)
        self.num_stale = 0
        """Episodes that were given up before the last step's, because they were too old to be trained on."""
        self.is_offloaded = False
        self._work_buffer = WorkBuffer()
        """What this engine plays for training."""
        self._buffer_states: list[BufferState] = []
        """What each engine had under way when the last step had enough."""
        self._num_assignments = 0
        """Of this fleet so far, on every rank the same."""

    @cached_property
    def _examples(self) -> Sequence[Example]:
        """The training split, asked for by the first step: a run that only evaluates need not have one."""
        return self.task.examples("train")

    def generate(self, step: int, *, is_enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """The rollouts of a training step: round after round until `is_enough` holds of all of them together, or max_num_gen_batches are
        played.

        Groups are numbered through from round to round. With generation_settings.max_staleness those come first that were begun first.
        """
        rollouts: list[Rollout] = []
        stale = self.scheduler.drop_stale(step, self._oldest_versions())
        self.num_stale = len(stale) * self.generation_settings.group_size
        for _ in range(self.generation_settings.max_num_gen_batches):
            rollouts += self._generate_batch(step, stale)
            if is_enough(rollouts):
                break
        return rollouts

    def _oldest_versions(self) -> dict[int, int | None]:
        return {group: oldest for each in self._buffer_states for group, oldest in each.oldest_versions.items()}

    def _generate_batch(self, step: int, stale: Sequence[int]) -> list[Rollout]:
        """The rollouts of a round's number of groups: of those under way, which all play on, those that are played to their end."""
        assert not self.is_offloaded, "the device is the trainer's: serve weights before episodes"
        num, samples = self.generation_settings.num_prompts, range(self.generation_settings.group_size)
        new, waiting = self.scheduler.schedule(step), self.scheduler.active_groups
        if len(waiting) > num:
            chosen, rollouts = self._run_groups(new, num, stale, step=step)
        else:
            already_started, self._buffer_states = waiting.keys() - new, []
            chosen = dict(waiting)
            rollouts = self._run_episodes(
                chosen, dict.fromkeys(waiting, samples), work_buffer=self._work_buffer, started=already_started, stale=stale
            )
        self.scheduler.finish(list(chosen))
        return self._retry_failed(chosen, rollouts)

    def _run_groups(
        self, new: Mapping[int, ScheduledGroup], num: int, stale: Sequence[int], *, step: int
    ) -> tuple[dict[int, ScheduledGroup], list[Rollout]]:  # fmt: skip
        """The first `num` groups of those under way that are played, those that are due among them. What every engine has is told once,
        when all together have enough, so that all choose the same; an engine that has played all that it has waits there for the others."""
        size, waiting = self.generation_settings.group_size, self.scheduler.active_groups
        self._num_assignments += 1
        loads = [len([group for group in each.running if group in waiting]) for each in self._buffer_states] or [
            0
        ] * self.engine_rank.num_engines
        assignment = self.engine_rank.assign_by_load(list(new), size=size, loads=loads)
        finished_before = {group for each in self._buffer_states for group in each.finished if group in waiting}
        due = self.scheduler.due_groups(step, self._oldest_versions())
        target = StepTarget(
            num_groups=num - len(finished_before),
            name=f"played/{self._num_assignments}",
            counter=self.engine_rank.counter,
            due=frozenset(due - finished_before),
        )
        start_group = self._make_start_group(new, dict.fromkeys(new, range(size)), self._work_buffer)

        async def run_local() -> BufferState:
            await self._work_buffer.cancel_groups(stale)
            await self._work_buffer.run(assignment, start_group, target=target)
            return self._work_buffer.state(engine=self.engine_rank.index)

        local_state = self.engine.run(self.run_with_grace(run_local))
        self._buffer_states = [each for each in self.all_gather(local_state) if each is not None]
        if self.engine_rank.index == 0 and self.engine_rank.counter is not None:
            for name in (target.name, f"{target.name}/{DUE}"):
                self.engine_rank.counter.delete_key(name)
        finished = sorted(group for each in self._buffer_states for group in each.finished)
        if len(self._buffer_states) < self.engine_rank.num_engines or len(finished) < num:
            raise GracefulStop
        chosen = {group: waiting[group] for group in sorted(sorted(finished, key=lambda group: group not in due)[:num])}
        return chosen, self.gather_rollouts(None if local_state is None else self._work_buffer.collect_rollouts(chosen))

    def run_examples(
        self, examples: Sequence[Example], *, num_samples: int, settings: EpisodeSettings, first_group: int = 0
    ) -> list[Rollout]:
        """`num_samples` episodes of each example, ordered by group and sample. A group's number is first_group and its place in `examples`.
        What is under way for training goes on meanwhile.

        GracefulStop, on every rank, where the grace of one engine ended before its episodes did.
        """
        scheduled = {first_group + place: ScheduledGroup(example=example, settings=settings) for place, example in enumerate(examples)}
        assert not self.is_offloaded, "the device is the trainer's: serve weights before episodes"
        return self._retry_failed(
            scheduled, self._run_episodes(scheduled, dict.fromkeys(scheduled, range(num_samples)), work_buffer=WorkBuffer())
        )

    def _retry_failed(self, scheduled: Mapping[int, ScheduledGroup], rollouts: list[Rollout]) -> list[Rollout]:
        """All of them, ordered; those that failed because something was down are played again, with their own seeds, until it is back or
        outage_timeout_s have passed. That time is read from the rollouts themselves, which are everywhere the same: all ranks give up
        together.

        What was waited for already (InfraTimeout) is tried once more and waited for no longer: it may be back by now. RunDenied: a server
        does not accept this run's key, which is waited for in no way.
        """
        require_access(rollouts)
        if waited_for := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_TIMEOUT]:
            rerun = self._rerun_failed(scheduled, waited_for)
            rollouts = [rollout for rollout in rollouts if rollout.stop_reason is not StopReason.INFRA_TIMEOUT] + rerun
        waited, pause = 0.0, MIN_BACKOFF_S
        while waited < self.outage_timeout_s and (
            failed := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_ERROR]
        ):
            pause = min(pause, self.outage_timeout_s - waited)
            self.log(
                f"waiting: {len(failed)} of {len(rollouts)} rollouts failed ({failed[0].reason}); they are played again in {pause:.0f} s, "
                f"for {self.outage_timeout_s - waited:.0f} s more (run.outage_timeout_s)"
            )
            rerun = self._rerun_failed(scheduled, failed, pause=pause)
            rollouts = [rollout for rollout in rollouts if rollout.stop_reason is not StopReason.INFRA_ERROR] + rerun
            require_access(rerun)
            waited += pause + max(rollout.wall_s for rollout in rerun)
            pause = min(2 * pause, MAX_BACKOFF_S)
        return sorted(rollouts, key=lambda rollout: (rollout.group, rollout.sample_index))

    def _rerun_failed(self, scheduled: Mapping[int, ScheduledGroup], failed: Sequence[Rollout], *, pause: float = 0.0) -> list[Rollout]:
        samples: dict[int, list[int]] = {}
        for rollout in failed:
            samples.setdefault(rollout.group, []).append(rollout.sample_index)
        return self._run_episodes(scheduled, samples, work_buffer=WorkBuffer(), pause=pause)

    def _run_episodes(
        self, scheduled: Mapping[int, ScheduledGroup], samples: Mapping[int, Sequence[int]], *,
        work_buffer: WorkBuffer, started: Collection[int] = (), stale: Sequence[int] = (), pause: float = 0.0,
    ) -> list[Rollout]:  # fmt: skip
        """These samples of groups, to their end, after a pause; `started` are those that are at the table already."""
        self._num_assignments += 1
        sizes = {group: len(of_group) for group, of_group in samples.items()}
        new = {group: size for group, size in sizes.items() if group not in started}
        assignment = self.engine_rank.assign(list(scheduled), new, assignment_id=self._num_assignments)
        start_group = self._make_start_group(scheduled, samples, work_buffer)

        async def run_local() -> list[Rollout]:
            await asyncio.sleep(pause)
            await work_buffer.cancel_groups(stale)
            await work_buffer.run(assignment, start_group)
            return work_buffer.collect_rollouts(scheduled)

        rollouts = self.gather_rollouts(self.engine.run(self.run_with_grace(run_local)))
        assignment.clear()
        if len(rollouts) < sum(sizes.values()):
            raise GracefulStop
        return rollouts

    def _make_start_group(
        self, scheduled: Mapping[int, ScheduledGroup], samples: Mapping[int, Sequence[int]], work_buffer: WorkBuffer
    ) -> StartGroupFn:
        def start_group(group: int) -> list[Coroutine[object, object, Rollout]]:
            shared_prompt = SharedPrompt(self.renderer, len(samples[group]))
            return [
                self._run_episode_with_retries(scheduled[group], work_buffer, shared_prompt=shared_prompt, group=group, sample_index=sample)
                for sample in samples[group]
            ]

        return start_group

    async def _run_episode_with_retries(
        self, scheduled: ScheduledGroup, work_buffer: WorkBuffer, *, shared_prompt: SharedPrompt, group: int, sample_index: int
    ) -> Rollout:
        """An episode that fails because something was down is played again, _MAX_ATTEMPTS times in all."""
        failed_s, settings = 0.0, scheduled.settings
        for _ in range(_MAX_ATTEMPTS):
            conversation = work_buffer.conversations[group, sample_index] = TokenConversation(
                self.engine, self.renderer, settings, shared_prompt
            )
            rollout = await run_episode(
                self.task, scheduled.example, conversation=conversation, settings=settings, group=group, sample_index=sample_index,
                timer=self.make_timer(group, sample_index),
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
            first = self.engine_rank.index == 0
            return (
                await render_prompt(self.task, self._examples[0], self.renderer, seed=derive_seed(self.episode_settings.seed, 0))
                if first
                else None
            )

        return self.engine.run(opened())

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the engines' weights by these, proven to have arrived, and give the device to the engine.

        `tensors` may be views of the trainer's: it is awake while they are read.
        """
        with self.offloaded():
            self.engine.load_weights(tensors, version=version)
        self.trainer.sleep()
        self.engine.wake()
        self.is_offloaded = False

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """The device is the trainer's inside the block, and stays so after it until `update_weights`: a sleeping engine has no weights."""
        if not self.is_offloaded:
            self.engine.sleep()
            self.trainer.wake()
            self.is_offloaded = True
        yield

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `update_weights`."""
        return self.engine.metrics()

    def busy_s(self) -> float:
        """Seconds that this process's engine has worked."""
        return self.engine.busy_s

    def start(self) -> None:
        self.engine.run(self.task.start())

    def close(self, *, all_ranks: bool = True) -> None:
        """The last thing a process does: ColocatedEngine.close ends its process group too.

        all_ranks: all ranks are here. After a failure others may be elsewhere or gone, and nobody is waited for.
        """

        async def ending() -> None:
            await self._work_buffer.cancel_all()
            await self.task.close()

        try:
            if all_ranks:
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
