"""The fleet: engines side by side, the episodes they play, and whose turn it is on the devices. What the training loop talks to.

Groups are dealt to engines whole (dealing.py), so that an engine's prefix and image caches serve them. How finished rollouts come together
is handed in: with a `gather` that returns what it is given, a fleet is one process.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from megatron_rl.rollout.conversation import Opening, TokenConversation
from megatron_rl.rollout.dealing import Seat
from megatron_rl.rollout.engine import ColocatedEngine
from megatron_rl.rollout.episode import EpisodeSettings, run_episode, seed_of
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.base import Task
from megatron_rl.types import Context, End, Example, HostFault, Rollout, Stopped

_TRIES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before what is down is tried again; each pause is twice the one before."""
Gather = Callable[[list[Rollout] | None], list[Rollout]]
"""From this engine's rollouts (None on ranks that do not lead one) to those of all engines, in any order, on every rank."""
Play = Callable[[], Coroutine[object, object, list[Rollout]]]


async def to_the_end(play: Play) -> list[Rollout] | None:
    return await play()


class Trainer(Protocol):
    """What shares its device with an engine: it leaves when the engine's turn comes, and comes back."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class RoundSettings:
    """How many episodes a training step asks for."""

    num_prompts: int
    """Prompts of one round."""
    group_size: int
    """Episodes of one prompt."""
    max_rounds: int
    """Rounds of one step at most."""


class Fleet:
    """Colocated engines, of which this process holds one or a part of one. Every rank calls every method, together with the others.

    A device is used in turn: the engine's from the beginning, the trainer's from `away` on, the engine's again from `serve` on.
    """

    def __init__(
        self, task: Task, *, engine: ColocatedEngine, renderer: Renderer, trainer: Trainer, gather: Gather,
        episode: EpisodeSettings, round_settings: RoundSettings, seat: Seat = Seat(),
        grace: Callable[[Play], Coroutine[object, object, list[Rollout] | None]] = to_the_end,
        patience_s: float = 0.0, tell: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """`episode` is how training plays, with the run's seed; `seat` is this process's engine's place among all.

        `grace` plays, and returns None where it gave up. What is down is waited for up to patience_s, and `tell` says so.
        """
        self.task, self.engine, self.renderer, self.trainer = task, engine, renderer, trainer
        self.gather, self.episode, self.round_settings = gather, episode, round_settings
        self.seat, self.grace, self.patience_s, self.tell = seat, grace, patience_s, tell
        self.rounds = 0
        """Rounds of prompts that `take` has dealt: where the sampler stands. A resumed run sets it."""
        self.is_away = False
        self._num_dealings = 0
        """Of this fleet so far, on every rank the same."""

    @cached_property
    def _examples(self) -> Sequence[Example]:
        """The training split, asked for by the first step: a run that only evaluates need not have one."""
        return self.task.examples("train")

    def take(self, step: int, *, enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """The rollouts of a training step: round after round until `enough` holds of all of them together, or max_rounds are played.

        Groups are numbered through from round to round.
        """
        rollouts: list[Rollout] = []
        for number in range(self.round_settings.max_rounds):
            size, samples = self.round_settings.num_prompts, self.round_settings.group_size
            examples = choose_prompts(self._examples, size, seed=self.episode.seed, round_number=self.rounds)
            self.rounds += 1
            rollouts += self.play(examples, samples=samples, settings=self.episode.at_step(step), first_group=size * number)
            if enough(rollouts):
                break
        return rollouts

    def play(self, examples: Sequence[Example], *, samples: int, settings: EpisodeSettings, first_group: int = 0) -> list[Rollout]:
        """`samples` episodes of each example, ordered by group and sample. A group's number is first_group and its place in `examples`.

        Those that failed because something was down are played again, with their own seeds, until it is back or patience_s have passed.
        That time is read from the rollouts themselves, which are everywhere the same: all ranks give up together. Stopped, on every rank,
        where the grace of one engine ended before its episodes did.
        """
        assert not self.is_away, "the device is the trainer's: serve weights before episodes"
        dealt = {first_group + place: example for place, example in enumerate(examples)}
        rollouts = self._play(dealt, [(group, sample) for group in dealt for sample in range(samples)], settings)
        waited, pause = 0.0, FIRST_PAUSE_S
        while waited < self.patience_s and (down := [rollout for rollout in rollouts if rollout.end is End.FAULT]):
            pause = min(pause, self.patience_s - waited)
            self.tell(
                f"waiting: {len(down)} of {len(rollouts)} rollouts failed ({down[0].reason}); they are played again in {pause:.0f} s, "
                f"for {self.patience_s - waited:.0f} s more (run.patience_s)"
            )
            again = self._play(dealt, [(rollout.group, rollout.sample) for rollout in down], settings, pause=pause)
            rollouts = [rollout for rollout in rollouts if rollout.end is not End.FAULT] + again
            waited += pause + max(rollout.wall_s for rollout in again)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return sorted(rollouts, key=lambda rollout: (rollout.group, rollout.sample))

    def _play(
        self, dealt: Mapping[int, Example], places: Sequence[tuple[int, int]], settings: EpisodeSettings, *, pause: float = 0.0
    ) -> list[Rollout]:
        """An episode for each group and sample, after a pause; this engine plays its groups."""
        samples: dict[int, list[int]] = {}
        for group, sample in places:
            samples.setdefault(group, []).append(sample)
        self._num_dealings += 1
        hand = self.seat.deal(list(dealt), {group: len(of_group) for group, of_group in samples.items()}, number=self._num_dealings)

        def begin(group: int) -> list[Coroutine[object, object, Rollout]]:
            opening = Opening(self.renderer)
            return [self._episode(dealt[group], settings, opening=opening, group=group, sample=sample) for sample in samples[group]]

        async def mine() -> list[Rollout]:
            await asyncio.sleep(pause)
            return await hand.play(begin)

        rollouts = self.gather(self.engine.run(self.grace(mine)))
        hand.forget()
        if len(rollouts) < len(places):
            raise Stopped
        return rollouts

    async def _episode(self, example: Example, settings: EpisodeSettings, *, opening: Opening, group: int, sample: int) -> Rollout:
        """An episode that fails because something was down is played again, _TRIES times in all."""
        failed_s = 0.0
        for _ in range(_TRIES):
            conversation = TokenConversation(self.engine, self.renderer, settings, opening)
            rollout = await run_episode(self.task, example, conversation=conversation, settings=settings, group=group, sample=sample)
            rollout.wall_s += failed_s
            if rollout.end is not End.FAULT:
                break
            failed_s = rollout.wall_s
        rollout.drop_patches()
        return rollout

    def first_prompt(self) -> Context | None:
        """How the first training example will begin, on the leader of the first engine; None elsewhere, and where it cannot."""

        async def opened() -> Context | None:
            first = self.seat.index == 0
            return await prompt_of(self.task, self._examples[0], self.renderer, seed=seed_of(self.episode.seed, 0)) if first else None

        return self.engine.run(opened())

    def serve(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the engines' weights by these, proven to have arrived, and give the device to the engine.

        `tensors` may be views of the trainer's: it is awake while they are read.
        """
        with self.away():
            self.engine.load_weights(tensors, version=version)
        self.trainer.sleep()
        self.engine.wake()
        self.is_away = False

    @contextmanager
    def away(self) -> Iterator[None]:
        """The device is the trainer's inside the block, and stays so after it until `serve`: a sleeping engine has no weights."""
        if not self.is_away:
            self.engine.sleep()
            self.trainer.wake()
            self.is_away = True
        yield

    def busy_s(self) -> float:
        """Seconds that this process's engine has worked."""
        return self.engine.busy_s

    def start(self) -> None:
        self.engine.run(self.task.start())

    def close(self, *, in_step: bool = True) -> None:
        """The last thing a process does: LocalEngine.close ends its process group too.

        in_step: all ranks are here. After a failure others may be elsewhere or gone, and nobody is waited for.
        """
        try:
            if in_step:
                self.engine.run(self.task.close())
            else:
                self.engine.run_alone(self.task.close())
        finally:
            self.engine.close()


async def prompt_of(task: Task, example: Example, renderer: Renderer, *, seed: int) -> Context | None:
    """How an example begins, without an engine; None where it cannot: its episodes will fail for the same reason, and say so."""
    env = task.env(example)
    try:
        return renderer.prompt(await env.reset(seed))
    except HostFault:
        return None
    finally:
        await env.close()


def choose_prompts(examples: Sequence[Example], num: int, *, seed: int, round_number: int) -> list[Example]:
    """The examples of one round, a function of seed and round alone, so that a resumed run deals what the unbroken one would have.

    Where the task states how often it deals each example, drawn with those probabilities; otherwise without repetition within an epoch.
    """
    if examples[0].probability is not None:
        generator = np.random.default_rng(seed_of(seed, round_number, 0))
        picks = generator.choice(len(examples), size=num, p=[example.probability for example in examples])
        return [examples[pick] for pick in picks]
    positions = range(round_number * num, (round_number + 1) * num)
    epochs = {position // len(examples) for position in positions}
    orders = {epoch: np.random.default_rng(seed_of(seed, epoch, 1)).permutation(len(examples)) for epoch in epochs}
    return [examples[orders[position // len(examples)][position % len(examples)]] for position in positions]
