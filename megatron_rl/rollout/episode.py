"""One episode as a coroutine: prompt, reply, observation, and so on until it ends; then the score.

The limits of an episode (turns, seconds, errors) and its clocks are here; those of a context are in conversation.py.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from megatron_rl.errors import AccessDenied, InfraError, InfraTimeout, PermanentInfraError, RunDenied
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.rollout.conversation import Conversation, SequenceLimits, count_pixels
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.example_fields import example_fields
from megatron_rl.rollout.task import Env, Task
from megatron_rl.types import Example, Rollout, Status, StopReason

T = TypeVar("T")
TimerFn = Callable[[str], AbstractContextManager[list[str]]]
"""Around each part of an episode, by its name, to which the part may add words."""


def no_timer(name: str) -> AbstractContextManager[list[str]]:
    return nullcontext([])


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeSettings(SequenceLimits):
    temperature: float
    max_turns: int
    max_new_tokens: int
    max_seconds: float = 0.0
    """Wall time; 0 sets no limit."""
    env_timeout_s: float = 0.0
    """Of the environment's reset and of each step; 0 sets no limit."""
    stop_on_tool_error: bool = False
    seed: int
    """With group, sample and turn it makes every request's seed."""

    def at_step(self, step: int) -> Self:
        """The same with a seed of the step's own, made of the run's that stands here: a resumed run samples what the unbroken one would."""
        return replace(self, seed=derive_seed(self.seed, step))


def derive_seed(*parts: int) -> int:
    """A 31-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(
    task: Task, example: Example, *, conversation: Conversation, settings: EpisodeSettings, group: int, sample_index: int,
    timer: TimerFn = no_timer,
) -> Rollout:  # fmt: skip
    """Play one episode and score it. A fault of ours (InfraError) fails the rollout; it is never a score."""
    rollout = Rollout(
        task=task.name, example_id=example.id, source=example.source, group=group, sample_index=sample_index,
        **example_fields(example.payload),
        sequences=conversation.sequences, turns=conversation.turns,
    )  # fmt: skip
    env = task.env(example)
    clock = asyncio.get_running_loop().time  # it stands while an engine does
    started = clock()
    try:
        # The members of a group meet the same world: its seed leaves the sample out.
        with timer("prompt"):
            reset = env.reset(derive_seed(settings.seed, group))
            end = await conversation.start(await _with_timeout(reset, settings.env_timeout_s, task=task.name))
        if end is not None:
            raise _prompt_too_large(example, rollout, end)
        shown = [image for context in rollout.sequences for image in context.images]
        rollout.stop_reason = await _run_turns(rollout, env, conversation, settings=settings, stop=tuple(task.stop), timer=timer)
        rollout.status = Status.COMPLETED if rollout.stop_reason in (StopReason.DONE, StopReason.TOOL_ERROR) else Status.TRUNCATED
        ended = clock()
        with timer("scoring"):
            score = await task.rubric.score(RewardInput(payload=example.payload, rollout=rollout, prompt_images=shown))
        rollout.scoring_s = clock() - ended
        rollout.reward, rollout.outcome_reward, rollout.reward_terms = score.reward, score.outcome_reward, score.reward_terms
        for turn, worth, gain in zip(rollout.turns, score.step_scores, score.reward_deltas, strict=True):
            turn.step_score, turn.reward_delta = worth, gain
    except InfraError as fault:
        rollout.status, rollout.reason, rollout.reward, rollout.stop_reason = Status.FAILED, str(fault), None, _stop_reason_of(fault)
    finally:
        await _close_env(env, settings.env_timeout_s)
    rollout.wall_s = clock() - started
    return rollout


def _stop_reason_of(fault: InfraError) -> StopReason:
    match fault:
        case PermanentInfraError():
            return StopReason.PERMANENT_INFRA_ERROR
        case InfraTimeout():
            return StopReason.INFRA_TIMEOUT
        case AccessDenied():
            return StopReason.ACCESS_DENIED
    return StopReason.INFRA_ERROR


def require_access(rollouts: Sequence[Rollout]) -> None:
    """Raise RunDenied where a server that one of these rollouts needed did not accept this run's key or token."""
    denied = next((rollout.reason for rollout in rollouts if rollout.stop_reason is StopReason.ACCESS_DENIED), "")
    if denied:
        raise RunDenied(denied)


async def _run_turns(
    rollout: Rollout, env: Env, conversation: Conversation, *, settings: EpisodeSettings, stop: tuple[str, ...], timer: TimerFn
) -> StopReason:  # fmt: skip
    """Reply and observation in turns until the episode ends; returns why it did."""
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        seed = derive_seed(settings.seed, rollout.group, rollout.sample_index, len(rollout.turns))
        state = env.state
        begun = clock()
        with timer("reply"):
            text = await conversation.generate(SamplingSettings(settings.max_new_tokens, settings.temperature, seed=seed, stop=stop))
        asked = clock()
        with timer("environment") as words:
            step = await _with_timeout(env.step(text), settings.env_timeout_s, task=rollout.task)
            if step.tool_call is not None:
                words.append(step.tool_call.tool)
        turn = rollout.turns[-1]
        turn.generation_s, turn.env_s = asked - begun, clock() - asked
        rollout.env_s += turn.env_s
        turn.reward, turn.tool_call, turn.state = float(step.reward), step.tool_call, state
        if step.action_char is not None:
            turn.action_start = conversation.char_to_token(step.action_char)
        if step.done:
            rollout.reason = step.reason
            return StopReason.DONE
        if settings.stop_on_tool_error and step.tool_call is not None and step.tool_call.error:
            rollout.reason = step.tool_call.error
            return StopReason.TOOL_ERROR
        if len(rollout.turns) >= settings.max_turns:
            return StopReason.MAX_TURNS
        if settings.max_seconds and clock() - started > settings.max_seconds:
            return StopReason.MAX_SECONDS
        with timer("prompt"):
            end = await conversation.observe(step.messages, is_new_prompt=step.is_new_prompt)
        if end is not None:
            return end


async def _with_timeout(work: Awaitable[T], limit_s: float, *, task: str) -> T:
    """PermanentInfraError: an environment that hangs, which the next try would wait for as long again. What it was doing is cancelled."""
    try:
        async with asyncio.timeout(limit_s or None) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise  # the environment's own
        raise PermanentInfraError(f"task={task}: its environment took more than {limit_s:g} s (task.env_timeout_s)") from error


async def _close_env(env: Env, limit_s: float) -> None:
    """One that does not end is left to itself: its episode is over."""
    try:
        async with asyncio.timeout(limit_s or None) as limit:
            await env.close()
    except TimeoutError:
        if not limit.expired():
            raise  # the environment's own


def _prompt_too_large(example: Example, rollout: Rollout, end: StopReason) -> PermanentInfraError:
    """A question that does not fit is a matter of settings, and no failure of the policy. A run names such rows when it starts."""
    (prompt,) = rollout.sequences
    raised = {
        StopReason.MAX_IMAGES: "engine.max_images",
        StopReason.MAX_PIXELS: "task.max_pixels",
        StopReason.MAX_TOKENS: "engine.max_model_len",
    }[end]
    size = f"{len(prompt.token_ids)} tokens with {len(prompt.images)} images of {count_pixels(prompt.images)} pixels"
    return PermanentInfraError(f"{example}: its prompt has {size}; raise {raised}, or leave it out")
