"""A scripted rollout manager whose episodes continue across weight updates.

Its event loop stays alive between generation calls, and tests can block its tool calls.
"""

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
from tests.support.scripted_rollout_manager import ChatEnv, ChatTask, ScriptedEngine, manager_arguments


@dataclass
class AsyncScriptedEngine(ScriptedEngine):
    """A scripted engine whose tokens have the weight version that it serves at the time of the
    request.
    """

    weight_version: int = 0
    loop: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=PausableEventLoop))

    def run(self, main: Coroutine[object, object, object]) -> object:
        return self.loop.run(main)

    def run_alone(self, main: Coroutine[object, object, object]) -> object:
        return self.loop.run(main)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.weight_version = version


@dataclass
class BlockingEnv(ChatEnv):
    """An environment whose first tool call blocks for as long as the task blocks its example.

    The task counts opened and closed environments.
    """

    task: "BlockingTask"
    num_steps: int = 0
    env_number: int = 0

    async def reset(self, seed: int) -> list[Message]:
        self.env_number = self.task.opened[self.example.id]
        self.task.opened[self.example.id] += 1
        return await super().reset(seed)

    async def step(self, text: str) -> Step:
        self.num_steps += 1
        while self.num_steps == 1 and self.task.is_blocked(self.example.id, self.env_number):
            await asyncio.sleep(0.002)
        return await super().step(text)

    async def close(self) -> None:
        self.task.closed[self.example.id] += 1


@dataclass
class BlockingTask(ChatTask):
    blocked: dict[str, range] = field(default_factory=dict)
    """Per example, the indices of its blocked environments in the order of their creation."""
    opened: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)

    def is_blocked(self, name: str, number: int) -> bool:
        return number in self.blocked.get(name, ())

    def env(self, example: Example) -> BlockingEnv:
        return BlockingEnv(self.resets, example, self)


def make_async_manager(
    renderer: Renderer, engine: AsyncScriptedEngine | None = None, *, max_staleness: int, num_steps: int, **changes: object
) -> RolloutManager:
    """Create a manager for generation batches of 2 prompts with 3 episodes each.

    An episode has 2 turns of 3 tokens.
    """
    engine = engine or AsyncScriptedEngine()
    rounds = GenerationSettings(num_prompts=2, group_size=3, max_num_gen_batches=9, max_staleness=max_staleness, num_steps=num_steps)
    return RolloutManager(BlockingTask(), engine=engine, renderer=renderer, **manager_arguments(engine, rounds, changes))


def run_step(fleet: RolloutManager, step: int) -> list[Rollout]:
    """Run a training step of one generation batch. The weight version is the step's number."""
    fleet.update_weights(iter(()), version=step)
    return fleet.generate(step, is_enough=lambda _: True)


def turn_versions(rollout: Rollout) -> list[int]:
    """Return the weight version of each turn, after checking that all tokens of a turn have the
    same version.
    """
    spans = [rollout.sequences[turn.sequence].weight_versions[slice(*turn.token_span)] for turn in rollout.turns]
    assert all(len(set(span)) == 1 for span in spans)
    return [span[0] for span in spans]
