"""One episode as a coroutine: prompt, reply, observation, and so on until it ends; then the score."""

import hashlib
from dataclasses import dataclass

from megatron_rl.rewards.rubric import Outcome
from megatron_rl.rollout.engine import Completion, Engine, Sampling
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.base import Example, Task
from megatron_rl.types import HostFault, Rollout, Status, Turn


@dataclass(slots=True, frozen=True)
class EpisodeSettings:
    temperature: float
    max_tokens_per_turn: int
    max_context: int
    seed: int
    """Of this step: with group, sample and turn it makes every request's seed."""


def seed_of(*parts: int) -> int:
    """A 31-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(task: Task, example: Example, *, engine: Engine, renderer: Renderer, settings: EpisodeSettings, group: int, sample: int) -> Rollout:
    """Play one episode and score it. A fault of ours (HostFault) fails the rollout; it is never a score."""
    rollout = Rollout(task=task.name, example_id=example.id, group=group, sample=sample, weight_version=engine.weight_version)
    try:
        await _play(rollout, task, example, engine, renderer, settings)
        outcome = Outcome(example.payload, [turn.text for turn in rollout.turns], [turn.reward for turn in rollout.turns])
        rollout.reward, rollout.rewards = await task.rubric.score(outcome)
    except HostFault as fault:
        rollout.status, rollout.reason, rollout.reward = Status.FAILED, str(fault), None
    return rollout


async def _play(rollout: Rollout, task: Task, example: Example, engine: Engine, renderer: Renderer, settings: EpisodeSettings) -> None:
    """Fill the rollout's sequences and turns, and say how it ended."""
    env = task.env(example)
    # The members of a group meet the same world: its seed leaves the sample out.
    rollout.sequences.append(renderer.prompt(env.reset(seed_of(settings.seed, rollout.group))))
    while True:
        sequence = rollout.sequences[-1]
        room = settings.max_context - len(sequence.token_ids)
        if room < 1:
            rollout.status, rollout.reason = Status.TRUNCATED, "context full"
            return
        sampling = Sampling(
            max_tokens=min(settings.max_tokens_per_turn, room),
            temperature=settings.temperature,
            seed=seed_of(settings.seed, rollout.group, rollout.sample, len(rollout.turns)),
        )
        completion: Completion = await engine.generate(sequence.token_ids, sequence.images, sampling)
        start = len(sequence.token_ids)
        sequence.extend(completion.token_ids, logprobs=completion.logprobs)
        text = renderer.text(completion.token_ids)
        step = env.step(text)
        span = (start, len(sequence.token_ids))
        rollout.turns.append(Turn(sequence=len(rollout.sequences) - 1, span=span, text=text, reward=step.reward))
        if step.done:
            rollout.status = Status.TRUNCATED if step.truncated else Status.COMPLETED
            rollout.reason = step.reason
            return
        if step.new_context:
            rollout.sequences.append(renderer.prompt(step.messages))
        else:
            renderer.follow(sequence, step.messages)
