"""Groups of episodes over all engines: who rolls out what, retries, and the one gathering of finished rollouts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron_rl.config import Settings
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.episode import EpisodeSettings, run_episode, seed_of
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.base import Task
from megatron_rl.types import Example, Rollout, Status

_TRIES = 3


@dataclass(slots=True, frozen=True)
class Crew:
    """The engines side by side: which one this process belongs to."""

    engine: Engine
    renderer: Renderer
    index: int
    num_engines: int


def episode_settings(settings: Settings, *, step: int) -> EpisodeSettings:
    """How to play at this step of training."""
    task, engine = settings.task, settings.engine
    return EpisodeSettings(
        temperature=settings.algo.temperature,
        max_turns=task.max_turns,
        max_tokens_per_turn=task.max_tokens_per_turn,
        max_context=engine.max_model_len,
        max_images=engine.max_images,
        max_pixels=task.max_pixels,
        max_seconds=task.max_seconds,
        errors_end=task.errors_end,
        seed=seed_of(settings.run.seed, step),
    )


def evaluation_settings(settings: Settings, *, temperature: float) -> EpisodeSettings:
    """How to play in an evaluation: the same episodes whenever it takes place."""
    turns = settings.task.eval_max_turns or settings.task.max_turns
    return replace(episode_settings(settings, step=-1), temperature=temperature, max_turns=turns)


def choose_prompts(examples: Sequence[Example], num: int, *, seed: int, step: int) -> list[Example]:
    """The examples of one step, a function of seed and step alone, so that a resumed run deals what the unbroken one would have.

    Where the task states how often it deals each example, drawn with those probabilities; otherwise without repetition within an epoch.
    """
    if examples[0].probability is not None:
        generator = np.random.default_rng(seed_of(seed, step, 0))
        picks = generator.choice(len(examples), size=num, p=[example.probability for example in examples])
        return [examples[pick] for pick in picks]
    positions = range(step * num, (step + 1) * num)
    epochs = {position // len(examples) for position in positions}
    orders = {epoch: np.random.default_rng(seed_of(seed, epoch, 1)).permutation(len(examples)) for epoch in epochs}
    return [examples[orders[position // len(examples)][position % len(examples)]] for position in positions]


def collect(
    task: Task, examples: Sequence[Example], *, crew: Crew, samples: int, settings: EpisodeSettings, first_group: int = 0
) -> list[Rollout]:
    """Roll out `samples` episodes of each example. Every rank calls it and receives all rollouts, ordered by group and sample.

    Whole groups go to one engine, so that its prefix and image caches serve them. Groups are numbered from first_group. In a world of more
    than one, images come without their patches (Image.patch_PC): whoever packs some of them restores those.
    """

    async def episode(group: int, sample: int) -> Rollout:
        for _ in range(_TRIES):
            rollout = await run_episode(
                task, examples[group], engine=crew.engine, renderer=crew.renderer,
                settings=settings, group=first_group + group, sample=sample,
            )  # fmt: skip
            if rollout.status is not Status.FAILED:
                break
        return rollout

    async def mine() -> list[Rollout]:
        groups = range(crew.index, len(examples), crew.num_engines)
        return await asyncio.gather(*(episode(group, sample) for group in groups for sample in range(samples)))

    rollouts = crew.engine.run(mine())
    if dist.get_world_size() > 1:
        gathered: list[list[Rollout] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rollouts)
        rollouts = [rollout for part in gathered if part is not None for rollout in part]
    return sorted(rollouts, key=lambda rollout: (rollout.group, rollout.sample))
