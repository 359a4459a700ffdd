"""Runs one episode (prompt, response, observation, and so on) as a coroutine and scores it.

This module enforces the limits of an episode (turns, wall time, tool errors) and measures how long
each phase takes. conversation.py enforces the limits of a sequence.
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
"""Takes the name of an episode phase and returns a context manager that encloses the phase. Code in
the phase may append labels, such as a tool's name, to the list that the context manager yields.
"""

TeacherFn = Callable[[Rollout], Awaitable[None]]


def no_timer(name: str) -> AbstractContextManager[list[str]]:
    """Return a context manager that records nothing."""
    return nullcontext([])


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeSettings(SequenceLimits):
    """Settings of one episode, including the limits of its sequences."""

    temperature: float
    max_turns: int
    max_new_tokens: int
    max_seconds: float = 0.0
    """Maximum wall time in seconds for all turns of an episode, checked after every environment
    step; 0 disables the limit.
    """
    env_timeout_s: float = 0.0
    """Timeout in seconds for each environment call (reset, step, close); 0 disables the timeout."""
    stop_on_tool_error: bool = False
    """True to end the episode when a tool call fails."""
    keeps_final_state: bool = False
    """True to store the final state of episodes that the environment truncates
    (Rollout.final_state).
    """
    seed: int
    """Base seed. The seed of each request is derived from the base seed, the group number, the
    sample index and the turn.
    """

    def at_step(self, step: int) -> Self:
        """Return the settings with a seed derived from the run's seed (`self.seed`) and `step`.

        A resumed run therefore samples the same tokens as an uninterrupted run.
        """
        return replace(self, seed=derive_seed(self.seed, step))


def derive_seed(*parts: int) -> int:
    """Return a 31-bit seed that depends on all `parts` and on their order."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(
    task: Task, example: Example, *, conversation: Conversation, settings: EpisodeSettings, group: int, sample_index: int,
    timer: TimerFn = no_timer, teacher: TeacherFn | None = None,
) -> Rollout:  # fmt: skip
    """Run one episode, score it and return its rollout.

    `teacher` adds the logprobs of a teacher to the sequences of a scored episode. If an InfraError
    occurs, the rollout gets Status.FAILED and no reward.
    """
    rollout = Rollout(
        task=task.name, example_id=example.id, source=example.source, group=group, sample_index=sample_index,
        **example_fields(example.payload),
        sequences=conversation.sequences, turns=conversation.turns,
    )  # fmt: skip
    env = task.env(example)
    clock = asyncio.get_running_loop().time  # stops while a colocated engine is paused
    started = clock()
    try:
        # All rollouts of a group use the same environment seed, so it excludes the sample index.
        with timer("prompt"):
            reset = env.reset(derive_seed(settings.seed, group))
            end = await conversation.start(await _with_timeout(reset, settings.env_timeout_s, task=task.name))
        if end is not None:
            raise _prompt_too_large(example, rollout, end)
        shown = [image for context in rollout.sequences for image in context.images]
        rollout.stop_reason = await _run_turns(rollout, env, conversation, settings=settings, stop=tuple(task.stop), timer=timer)
        for turn in (rollout.turns[index] for index in env.untrained_turns):
            rollout.sequences[turn.sequence].exclude_from_loss(*turn.token_span)
        rollout.status = Status.COMPLETED if rollout.stop_reason in (StopReason.DONE, StopReason.TOOL_ERROR) else Status.TRUNCATED
        ended = clock()
        with timer("scoring"):
            score = await task.rubric.score(RewardInput(payload=example.payload, rollout=rollout, prompt_images=shown))
        rollout.scoring_s = clock() - ended
        rollout.reward, rollout.outcome_reward, rollout.reward_terms = score.reward, score.outcome_reward, score.reward_terms
        for turn, worth, gain in zip(rollout.turns, score.step_scores, score.reward_deltas, strict=True):
            turn.step_score, turn.reward_delta = worth, gain
        if teacher is not None:
            with timer("teacher"):
                await teacher(rollout)
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
    """Raise RunDenied if a server needed by these rollouts rejected this run's key or token."""
    denied = next((rollout.reason for rollout in rollouts if rollout.stop_reason is StopReason.ACCESS_DENIED), "")
    if denied:
        raise RunDenied(denied)


async def _run_turns(
    rollout: Rollout, env: Env, conversation: Conversation, *, settings: EpisodeSettings, stop: tuple[str, ...], timer: TimerFn
) -> StopReason:  # fmt: skip
    """Run turns (response, then observation) until the episode ends; return the stop reason."""
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        seed = derive_seed(settings.seed, rollout.group, rollout.sample_index, len(rollout.turns))
        state = env.state
        begun = clock()
        with timer("reply"):
            sampling = SamplingSettings(settings.max_new_tokens, settings.temperature, seed=seed, stop=(*stop, *env.stop))
            text = await conversation.generate(sampling)
        asked = clock()
        if conversation.response_size is not None:
            env.note_response_size(conversation.response_size)
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
        rollout.reason = step.reason
        place = {"is_new_prompt": step.is_new_prompt, "after_turn": step.after_turn}
        if step.done and step.is_truncated and step.messages and settings.keeps_final_state:
            with timer("prompt"):
                rollout.final_state = await conversation.render_final_state(step.messages, **place)
        if step.done:
            return StopReason.ENV_TRUNCATED if step.is_truncated else StopReason.DONE
        if settings.stop_on_tool_error and step.tool_call is not None and step.tool_call.error:
            rollout.reason = step.tool_call.error
            return StopReason.TOOL_ERROR
        if len(rollout.turns) >= settings.max_turns:
            return StopReason.MAX_TURNS
        if settings.max_seconds and clock() - started > settings.max_seconds:
            return StopReason.MAX_SECONDS
        with timer("prompt"):
            end = await conversation.observe(step.messages, **place)
        if end is not None:
            return end


async def _with_timeout(work: Awaitable[T], limit_s: float, *, task: str) -> T:
    """Await `work`; raise PermanentInfraError if it takes more than `limit_s` seconds.

    The timeout cancels `work`. The error is permanent because a retry would probably take just as
    long.
    """
    limit = asyncio.timeout(limit_s or None)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise  # raised by the environment itself
        raise PermanentInfraError(f"task={task}: the environment took more than {limit_s:g} s (task.env_timeout_s)") from error


async def _close_env(env: Env, limit_s: float) -> None:
    """Close the environment; after `limit_s` seconds, stop waiting without raising an error."""
    try:
        async with asyncio.timeout(limit_s or None) as limit:
            await env.close()
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the environment itself


def _prompt_too_large(example: Example, rollout: Rollout, end: StopReason) -> PermanentInfraError:
    """Return the error for a prompt that exceeds a limit because of the settings or the data."""
    (prompt,) = rollout.sequences
    raised = {
        StopReason.MAX_IMAGES: "engine.max_images",
        StopReason.MAX_PIXELS: "task.max_pixels",
        StopReason.MAX_TOKENS: "engine.max_model_len",
    }[end]
    size = f"{len(prompt.token_ids)} tokens with {len(prompt.images)} images of {count_pixels(prompt.images)} pixels"
    return PermanentInfraError(f"{example}: its prompt has {size}; raise {raised}, or remove this example")
