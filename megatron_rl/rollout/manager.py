"""Runs episodes on all engines and returns their rollouts to the training loop.

Each group is assigned to one engine (load_balancer.py), so that the whole group shares the engine's
prefix cache and image cache.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from megatron_rl.errors import GracefulStop, InfraError
from megatron_rl.rollout.conversation import SharedPrompt, TokenConversation
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.episode import EpisodeSettings, TimerFn, derive_seed, no_timer, require_access, run_episode
from megatron_rl.rollout.load_balancer import EngineRank, StartGroupFn
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings, PromptScheduler, ScheduledGroup, choose_groups
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.teacher_client import TeacherClients
from megatron_rl.rollout.work_buffer import DUE, BufferState, StepTarget, WorkBuffer
from megatron_rl.types import Example, Rollout, StopReason, TokenSequence

T = TypeVar("T")
_MAX_ATTEMPTS = 3
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Minimum and maximum pause in seconds before failed rollouts are retried; the pause doubles with
each retry.
"""
GatherRolloutsFn = Callable[[list[Rollout] | None], list[Rollout]]
"""Gathers the rollouts of all engines, in any order, on every rank. The leader of an engine passes
the engine's rollouts; all other ranks pass None.
"""
AllGatherFn = Callable[[BufferState | None], list[BufferState | None]]
"""Gathers the buffer states of all ranks, in rank order, on every rank."""
MakeCoroutine = Callable[[], Coroutine[object, object, T]]


async def run_to_completion(run: MakeCoroutine[T]) -> T | None:
    """Await the coroutine that `run` creates, and return its result."""
    return await run()


@dataclass(slots=True, frozen=True, kw_only=True)
class RankCollectives:
    """Collectives over all ranks. The defaults are for a single rank."""

    gather_rollouts: GatherRolloutsFn = lambda mine: mine or []
    all_gather: AllGatherFn = lambda mine: [mine]
    is_local: Callable[[Rollout], bool] = lambda _: True
    """Returns True if this rank's engine generated the rollout."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RunCallbacks:
    """Functions of the run that the rollout manager calls."""

    run_with_grace: Callable[[MakeCoroutine], Coroutine[object, object, Any]] = run_to_completion
    """Runs a coroutine and returns its result, or None if a stop signal cancelled the coroutine."""
    log: Callable[[str], None] = print
    """Prints one line."""
    report_episodes: Callable[[int, int], None] = lambda *_: None
    """Takes the number of ended episodes of an evaluation, and the number of all of them. With
    several engines, the first number is an estimate from this engine's episodes.
    """
    make_timer: Callable[[int, int], TimerFn] = lambda *_: no_timer
    """Takes a group number and a sample index, which identify an episode; returns the timer for
    this episode.
    """


class Offloadable(Protocol):
    """Trainer state that shares a device with an engine and can be moved off the device."""

    def sleep(self) -> None:
        """Free the device for the engine."""
        ...

    def wake(self) -> None:
        """Move the state back to the device."""
        ...


class RolloutManager:
    """Runs episodes on the rollout engines and updates the engines' weights.

    Each process has a colocated engine, one rank of a colocated engine, or a client of the engine
    servers. All ranks must call each method together.

    A colocated engine and the trainer take turns using the device. At first, the engine uses the
    device. `offloaded` frees the device for the trainer, and `update_weights` returns the device to
    the engine.
    """

    def __init__(
        self, task: Task, *, engine: RolloutEngine, renderer: Renderer, trainer: Offloadable, episode_settings: EpisodeSettings,
        generation_settings: GenerationSettings, engine_rank: EngineRank = EngineRank(), collectives: RankCollectives = RankCollectives(),
        callbacks: RunCallbacks = RunCallbacks(),
    ) -> None:  # fmt: skip
        """Create a manager that has no episodes in progress.

        `episode_settings` are the settings of training episodes, with the run's seed. `engine_rank`
        identifies this process's engine among all engines.
        """
        self.task, self.engine, self.renderer, self.trainer = task, engine, renderer, trainer
        self.episode_settings, self.generation_settings = episode_settings, generation_settings
        self.engine_rank, self.collectives, self.callbacks = engine_rank, collectives, callbacks
        self.teacher: TeacherClients | None = None
        """Clients of teachers on servers, which score the tokens of training episodes."""
        self.scheduler = PromptScheduler(lambda: self._examples, settings=generation_settings, episode_settings=episode_settings)
        self.num_stale = 0
        """Number of episodes dropped before the last step because they were too stale for training.
        """
        self.is_offloaded = False
        self._report_episode: Callable[[], None] | None = None
        """Reports the end of an episode during `run_examples`."""
        self._work_buffer = WorkBuffer()
        """Training episodes in progress on this engine."""
        self._buffer_states: list[BufferState] = []
        """Buffer state of each engine, taken when the engines had finished enough groups for the
        last step.
        """
        self._num_assignments = 0
        """Number of assignments so far; the same on every rank."""

    @cached_property
    def _examples(self) -> Sequence[Example]:
        """Examples of the task's training split.

        The first training step loads the examples, because a run that only evaluates may have no
        training split.
        """
        return self.task.examples("train")

    def generate(self, step: int, *, is_enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """Return the rollouts of a training step.

        Generates batches until `is_enough` returns True for the rollouts of all batches so far, or
        until max_num_gen_batches batches have been generated. Group numbers continue from batch to
        batch. With generation_settings.max_staleness > 0, the groups at the staleness limit are
        used first. The other finished groups follow in the order in which they were scheduled.
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
        """Run active groups until num_prompts groups have finished; return these groups' rollouts.

        Unfinished groups stay in progress.
        """
        assert not self.is_offloaded, "the trainer is using the device: call update_weights before generating"
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
        """Run active groups until `num` groups finish, including those at the staleness limit.

        Returns the chosen groups and their rollouts. Once the engines together have finished enough
        groups, they exchange their buffer states, so that all ranks choose the same groups. An
        engine that finishes all of its groups earlier waits for this exchange.
        """
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

        local_state = self.engine.run(self.callbacks.run_with_grace(run_local))
        self._buffer_states = [each for each in self.collectives.all_gather(local_state) if each is not None]
        if self.engine_rank.index == 0 and self.engine_rank.counter is not None:
            for name in (target.name, f"{target.name}/{DUE}"):
                self.engine_rank.counter.delete_key(name)
        finished = sorted(group for each in self._buffer_states for group in each.finished)
        if len(self._buffer_states) < self.engine_rank.num_engines or len(finished) < num:
            raise GracefulStop
        chosen = {group: waiting[group] for group in choose_groups(finished, due, num=num)}
        return chosen, self.collectives.gather_rollouts(None if local_state is None else self._work_buffer.collect_rollouts(chosen))

    def run_examples(
        self, examples: Sequence[Example], *, num_samples: int, settings: EpisodeSettings, first_group: int = 0
    ) -> list[Rollout]:
        """Return `num_samples` rollouts for each example, sorted by group and sample index.

        A group's number is `first_group` plus the index of the example in `examples`. Training
        episodes that are in progress continue to run.

        Raises:
            GracefulStop: On every rank, if the grace period of an engine ended before the engine's
                episodes had finished.
        """
        scheduled = {first_group + place: ScheduledGroup(example=example, settings=settings) for place, example in enumerate(examples)}
        assert not self.is_offloaded, "the trainer is using the device: call update_weights before generating"
        total, num_engines = len(examples) * num_samples, self.engine_rank.num_engines
        ended = itertools.count(num_engines, num_engines)
        self._report_episode = lambda: self.callbacks.report_episodes(min(next(ended), total), total)
        try:
            rollouts = self._run_episodes(scheduled, dict.fromkeys(scheduled, range(num_samples)), work_buffer=WorkBuffer())
        finally:
            self._report_episode = None
        return self._retry_failed(scheduled, rollouts)

    def _retry_failed(self, scheduled: Mapping[int, ScheduledGroup], rollouts: list[Rollout]) -> list[Rollout]:
        """Rerun the rollouts that had infrastructure errors; return all rollouts, sorted.

        Rollouts with StopReason.INFRA_TIMEOUT have already waited for a service and are rerun only
        once, without a pause. Rollouts with INFRA_ERROR are rerun with unchanged seeds until they
        succeed or generation_settings.outage_timeout_s has passed. The elapsed time is computed
        from the wall times of the gathered rollouts, which are the same on all ranks.
        Therefore, all ranks stop retrying together.

        Raises:
            RunDenied: A server rejects this run's key. A rejected key is never retried.
        """
        require_access(rollouts)
        if waited_for := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_TIMEOUT]:
            rerun = self._rerun_failed(scheduled, waited_for)
            rollouts = [rollout for rollout in rollouts if rollout.stop_reason is not StopReason.INFRA_TIMEOUT] + rerun
        waited, pause = 0.0, MIN_BACKOFF_S
        while waited < self.generation_settings.outage_timeout_s and (
            failed := [rollout for rollout in rollouts if rollout.stop_reason is StopReason.INFRA_ERROR]
        ):
            pause = min(pause, self.generation_settings.outage_timeout_s - waited)
            self.callbacks.log(
                f"waiting: {len(failed)} of {len(rollouts)} rollouts failed ({failed[0].reason}); retrying in {pause:.0f} s, "
                f"for up to {self.generation_settings.outage_timeout_s - waited:.0f} s more (run.outage_timeout_s)"
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
        """After a pause, run the given episodes to completion and return their rollouts.

        `samples` contains the sample indices to run, keyed by group number. The episodes of the
        groups in `started` are already in the work buffer.
        """
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

        rollouts = self.collectives.gather_rollouts(self.engine.run(self.callbacks.run_with_grace(run_local)))
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
        """Run one episode, with up to _MAX_ATTEMPTS attempts if it fails with INFRA_ERROR."""
        failed_s, settings = 0.0, scheduled.settings
        for _ in range(_MAX_ATTEMPTS):
            conversation = work_buffer.conversations[group, sample_index] = TokenConversation(
                self.engine, self.renderer, settings, shared_prompt
            )
            rollout = await run_episode(
                self.task, scheduled.example, conversation=conversation, settings=settings, group=group, sample_index=sample_index,
                timer=self.callbacks.make_timer(group, sample_index),
                teacher=self.teacher.add_logprobs if self.teacher is not None and work_buffer is self._work_buffer else None,
            )  # fmt: skip
            rollout.wall_s += failed_s
            if rollout.stop_reason is not StopReason.INFRA_ERROR:
                break
            failed_s = rollout.wall_s
        rollout.drop_patches()
        if self._report_episode is not None and work_buffer is not self._work_buffer:  # training episodes may continue
            self._report_episode()
        return rollout

    def render_first_prompt(self) -> TokenSequence | None:
        """Render the prompt of the first training example on the leader of the first engine.

        Returns None on other ranks, and if the prompt cannot be rendered.
        """

        async def opened() -> TokenSequence | None:
            if self.engine_rank.index != 0:
                return None
            try:
                return await render_prompt(self.task, self._examples[0], self.renderer, seed=derive_seed(self.episode_settings.seed, 0))
            except InfraError:  # the example's episodes report it
                return None

        return self.engine.run(opened())

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send new weights to the engines, verify them, and move the trainer off the device.

        `tensors` may be views of the trainer's weights, because the trainer is offloaded only after
        all tensors are read.
        """
        with self.offloaded():
            self.engine.load_weights(tensors, version=version)
        self.trainer.sleep()
        self.engine.wake()
        self.is_offloaded = False

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Offload the engine, so that the trainer can use the device.

        The engine stays offloaded after the `with` block, until `update_weights` is called, because
        a sleeping engine has no weights.
        """
        if not self.is_offloaded:
            self.engine.sleep()
            self.trainer.wake()
            self.is_offloaded = True
        yield

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `update_weights` call, and the epoch."""
        return {**self.engine.metrics(), "epoch": self.scheduler.epoch}

    def busy_s(self) -> float:
        """Return the total busy time of this process's engine, in seconds."""
        return self.engine.busy_s

    def start(self) -> None:
        """Start the task and the client of a teacher on the leader of each engine."""

        async def starting() -> None:
            await self.task.start()
            if self.teacher is not None:
                await self.teacher.start(self.renderer.tokenizer.encode)

        self.engine.run(starting())

    def close(self, *, all_ranks: bool = True) -> None:
        """Cancel all episodes, close the task and then the engine.

        `close` must be the last call in a process, because ColocatedEngine.close destroys the
        process group.

        Args:
            all_ranks: True if all ranks call `close`. Pass False after a failure, when other ranks
                may be busy or may have exited; the call then does not wait for other ranks.
        """

        async def ending() -> None:
            await self._work_buffer.cancel_all()
            await self.task.close()
            if self.teacher is not None:
                await self.teacher.close()

        try:
            if all_ranks:
                self.engine.run(ending())
            else:
                self.engine.run_alone(ending())
        finally:
            self.engine.close()


async def render_prompt(task: Task, example: Example, renderer: Renderer, *, seed: int) -> TokenSequence:
    """Render the prompt of an example without an engine.

    Raises:
        InfraError: The environment raises it; the example's episodes will probably raise it again.
    """
    env = task.env(example)
    try:
        return renderer.prompt(await env.reset(seed))
    finally:
        await env.close()
