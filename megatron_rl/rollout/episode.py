"""One episode as a coroutine: prompt, reply, observation, and so on until it ends; then the score.

The limits of an episode are here and nowhere else. They are looked at between turns: what the policy said is kept whole, and an observation
that no longer fits is not shown.
"""

import hashlib
import time
from dataclasses import dataclass

from megatron_rl.rewards.rubric import Outcome
from megatron_rl.rollout.engine import Engine, Sampling
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.base import Env, Step, Task
from megatron_rl.types import Context, End, Example, HostFault, Image, Rollout, Status, Turn


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeSettings:
    temperature: float
    max_turns: int
    max_tokens_per_turn: int
    max_context: int
    max_images: int
    max_pixels: int = 0
    """0: no limit, as with the seconds."""
    max_seconds: float = 0.0
    errors_end: bool = False
    seed: int
    """Of this step: with group, sample and turn it makes every request's seed."""


def seed_of(*parts: int) -> int:
    """A 31-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(
    task: Task, example: Example, *, engine: Engine, renderer: Renderer, settings: EpisodeSettings, group: int, sample: int
) -> Rollout:
    """Play one episode and score it. A fault of ours (HostFault) fails the rollout; it is never a score."""
    rollout = Rollout(task=task.name, example_id=example.id, group=group, sample=sample, weight_version=engine.weight_version)
    env = task.env(example)
    started = time.monotonic()
    try:
        # The members of a group meet the same world: its seed leaves the sample out.
        prompt = renderer.prompt(await env.reset(seed_of(settings.seed, group)))
        _require_room(prompt, example, settings)
        shown = list(prompt.images)
        rollout.contexts.append(prompt)
        rollout.end = await _play(rollout, env, engine=engine, renderer=renderer, settings=settings, stop=tuple(task.stop))
        rollout.status = Status.COMPLETED if rollout.end in (End.DONE, End.TOOL_ERROR) else Status.TRUNCATED
        ended = time.monotonic()
        score = await task.rubric.score(Outcome(payload=example.payload, turns=rollout.turns, end=rollout.end, images=shown))
        rollout.scoring_s = time.monotonic() - ended
        rollout.reward, rollout.outcome, rollout.rewards = score.reward, score.outcome, score.rewards
        for turn, value in zip(rollout.turns, score.turns, strict=True):
            turn.score = value
    except HostFault as fault:
        rollout.status, rollout.end, rollout.reason, rollout.reward = Status.FAILED, End.FAULT, str(fault), None
    finally:
        await env.close()
    rollout.wall_s = time.monotonic() - started
    return rollout


async def _play(rollout: Rollout, env: Env, *, engine: Engine, renderer: Renderer, settings: EpisodeSettings, stop: tuple[str, ...]) -> End:
    """Fill the rollout's contexts and turns until it ends; returns why it did."""
    started = time.monotonic()
    while len(rollout.contexts[-1].token_ids) < settings.max_context:
        turn = await _speak(rollout, engine=engine, renderer=renderer, settings=settings, stop=stop)
        asked = time.monotonic()
        step = await env.step(turn.text)
        rollout.environment_s += time.monotonic() - asked
        turn.reward, turn.call = step.reward, step.call
        if step.done:
            rollout.reason = step.reason
            return End.DONE
        if settings.errors_end and step.call is not None and step.call.error:
            rollout.reason = step.call.error
            return End.TOOL_ERROR
        if len(rollout.turns) >= settings.max_turns:
            return End.MAX_TURNS
        if settings.max_seconds and time.monotonic() - started > settings.max_seconds:
            return End.MAX_SECONDS
        end = _observe(rollout, turn, step, renderer=renderer, settings=settings)
        if end is not None:
            return end
    return End.MAX_TOKENS


async def _speak(rollout: Rollout, *, engine: Engine, renderer: Renderer, settings: EpisodeSettings, stop: tuple[str, ...]) -> Turn:
    """Sample one reply after the last context, into it and into the turns."""
    context = rollout.contexts[-1]
    start = len(context.token_ids)
    sampling = Sampling(
        max_tokens=min(settings.max_tokens_per_turn, settings.max_context - start),
        temperature=settings.temperature,
        seed=seed_of(settings.seed, rollout.group, rollout.sample, len(rollout.turns)),
        stop=stop,
    )
    completion = await engine.generate(context.token_ids, context.images, sampling)
    context.extend(completion.token_ids, logprobs=completion.logprobs)
    turn = Turn(context=len(rollout.contexts) - 1, span=(start, len(context.token_ids)), text=renderer.text(completion.token_ids))
    rollout.turns.append(turn)
    return turn


def _observe(rollout: Rollout, turn: Turn, step: Step, *, renderer: Renderer, settings: EpisodeSettings) -> End | None:
    """Show the policy what came of its turn, or say which limit forbids it."""
    if step.new_context:
        prompt = renderer.prompt(step.messages)
        end = _limit(Context(), prompt, settings)
        if end is None:
            turn.images = list(prompt.images)
            rollout.contexts.append(prompt)
        return end
    context = rollout.contexts[-1]
    more = renderer.observation(context, step.messages)
    end = _limit(context, more, settings)
    if end is None:
        turn.images = list(more.images)
        context.extend(more.token_ids, images=tuple(more.images))
    return end


def _require_room(prompt: Context, example: Example, settings: EpisodeSettings) -> None:
    """A question that does not fit is a matter of settings, and no failure of the policy. launch/doctor.py names such rows beforehand."""
    end = _limit(Context(), prompt, settings)
    if end is not None:
        raised = {End.MAX_IMAGES: "engine.max_images", End.MAX_PIXELS: "task.max_pixels", End.MAX_TOKENS: "engine.max_model_len"}[end]
        size = f"{len(prompt.token_ids)} tokens with {len(prompt.images)} images of {_pixels(prompt.images)} pixels"
        raise HostFault(f"example {example.id}: its prompt has {size}; raise {raised}, or leave it out")


def _limit(context: Context, more: Context, settings: EpisodeSettings) -> End | None:
    """The budget of the context that `more` would overrun."""
    if len(context.images) + len(more.images) > settings.max_images:
        return End.MAX_IMAGES
    if settings.max_pixels and _pixels([*context.images, *more.images]) > settings.max_pixels:
        return End.MAX_PIXELS
    if len(context.token_ids) + len(more.token_ids) >= settings.max_context:
        return End.MAX_TOKENS
    return None


def _pixels(images: list[Image]) -> int:
    return sum(image.picture.width * image.picture.height for image in images)
