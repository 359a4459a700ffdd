"""A scripted fleet whose episodes go on over an update: an event loop that lives from run to run, and tools that a test holds up."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field

import torch

from megatron_rl.rollout.event_loop import PausableEventLoop
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.rollout.task import Step
from megatron_rl.types import Example, Message, Rollout
from tests.support.scripted_fleet import EPISODE, Scripted, Talk, TalkTask, Trainer


@dataclass
class Lasting(Scripted):
    """Its tokens are of the weights that it serves when they are asked for."""

    weight_version: int = 0
    loop: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=PausableEventLoop))

    def run(self, main: Coroutine[object, object, object]) -> object:
        return self.loop.run(main)

    def run_alone(self, main: Coroutine[object, object, object]) -> object:
        return self.loop.run(main)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.weight_version = version


@dataclass
class Held(Talk):
    """Its first tool call lasts for as long as the task holds its example; what was open is closed."""

    task: "HeldTask"
    num_steps: int = 0
    number: int = 0

    async def reset(self, seed: int) -> list[Message]:
        self.number = self.task.opened[self.example.id]
        self.task.opened[self.example.id] += 1
        return await super().reset(seed)

    async def step(self, text: str) -> Step:
        self.num_steps += 1
        while self.num_steps == 1 and self.task.holds(self.example.id, self.number):
            await asyncio.sleep(0.002)
        return await super().step(text)

    async def close(self) -> None:
        self.task.closed[self.example.id] += 1


@dataclass
class HeldTask(TalkTask):
    held: dict[str, range] = field(default_factory=dict)
    """By example, which of its environments, in the order in which they were opened, are held up."""
    opened: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)

    def holds(self, name: str, number: int) -> bool:
        return number in self.held.get(name, ())

    def env(self, example: Example) -> Held:
        return Held(self.worlds, example, self)


def lasting_fleet(
    renderer: Renderer, engine: Lasting | None = None, *, max_staleness: int, num_steps: int, **changes: object
) -> RolloutManager:
    """Rounds of 2 prompts of 3 episodes of 2 turns of 3 tokens."""
    engine = engine or Lasting()
    parts = {"trainer": Trainer(engine.log), "gather": lambda mine: mine, "episode": EPISODE, **changes}
    rounds = GenerationSettings(num_prompts=2, group_size=3, max_rounds=9, max_staleness=max_staleness, num_steps=num_steps)
    return RolloutManager(HeldTask(), engine=engine, renderer=renderer, round_settings=rounds, **parts)


def step_of(fleet: RolloutManager, step: int) -> list[Rollout]:
    """A training step of one round, under weights of the step's number."""
    fleet.update_weights(iter(()), version=step)
    return fleet.generate(step, enough=lambda _: True)


def versions_of(rollout: Rollout) -> list[int]:
    """Of the first token of each turn, all of whose tokens have the same."""
    spans = [rollout.sequences[turn.sequence].weight_versions[slice(*turn.token_span)] for turn in rollout.turns]
    assert all(len(set(span)) == 1 for span in spans)
    return [span[0] for span in spans]
