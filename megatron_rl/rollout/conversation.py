"""Conversation between an environment and the policy, recorded as sequences and turns.

An episode adds messages to its conversation and receives the policy's responses as text. The limits
of a sequence (tokens, images, pixels) are enforced only in this module. The limits are checked
between turns. A response is never truncated, and an observation that does not fit is not added.
Large images are rendered in a worker thread, so that they do not block the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.engine import InferenceEngine, ResponseSize, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.types import Image, Message, StopReason, TokenSequence, Turn

T = TypeVar("T")


@dataclass(slots=True, frozen=True, kw_only=True)
class SequenceLimits:
    """Limits of one sequence."""

    max_sequence_tokens: int
    """Maximum number of tokens in a sequence, including sampled tokens."""
    max_images: int
    """Maximum number of images in a sequence."""
    max_pixels: int = 0
    """Maximum total number of pixels of a sequence's resized images; 0 disables the limit."""

    def exceeds(self, context: TokenSequence, added: TokenSequence) -> StopReason | None:
        """Return a stop reason if appending `added` to `context` exceeds a limit, else None.

        One token of `max_sequence_tokens` is reserved for the next response.
        """
        if len(context.images) + len(added.images) > self.max_images:
            return StopReason.MAX_IMAGES
        if self.max_pixels and count_pixels([*context.images, *added.images]) > self.max_pixels:
            return StopReason.MAX_PIXELS
        if len(context.token_ids) + len(added.token_ids) >= self.max_sequence_tokens:
            return StopReason.MAX_TOKENS
        return None


class Conversation(Protocol):
    """Interface to the conversation between the environment and the policy in one episode.

    An instance is used for one episode only. `sequences` and `turns` grow during the episode and
    are shared with the episode's rollout.
    """

    sequences: list[TokenSequence]
    turns: list[Turn]
    response_size: ResponseSize | None
    """Size of the last response; None if unknown."""

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        """Add the prompt; return a stop reason if the prompt exceeds a limit, else None.

        The prompt is added even if it exceeds a limit, so that the error message can report its
        size.
        """
        ...

    async def generate(self, sampling: SamplingSettings) -> str:
        """Generate a response, append it to `turns`, and return its text.

        The response is limited to the number of tokens that still fit into the sequence.
        """
        ...

    def char_to_token(self, char: int) -> int | None:
        """Return the index of the token that contains character `char` of the last response.

        The index is relative to the start of the sequence; `char` is relative to the start of the
        response. Returns None if the conversation does not record tokens.
        """
        ...

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None) -> StopReason | None:
        """Add the observation that follows a response, unless a limit would be exceeded.

        Returns a stop reason if a limit would be exceeded, else None. If `is_new_prompt` is True,
        `messages` are a complete prompt and start a new sequence. Otherwise, they follow the
        response of turn `after_turn` (None: of the last turn); see rollout.task.Step.after_turn.
        """
        ...

    async def render_final_state(
        self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None
    ) -> TokenSequence | None:
        """Return the context after the last observation, as Rollout.final_state describes it.

        The conversation is not changed. Returns None if the context exceeds a limit, or if the
        conversation does not record tokens.
        """
        ...


class SharedPrompt:
    """Prompt that the episodes of a group share and that is rendered only once.

    The episodes of a group normally start with the same messages. The first episode renders the
    prompt, and the other episodes receive a copy. An episode with different messages renders its
    own prompt. The messages and the prompt are released once all episodes of the group have
    started.
    """

    def __init__(self, renderer: Renderer, group_size: int) -> None:
        self._renderer, self._num_waited_for = renderer, group_size
        self._has_first = False
        self._messages: Sequence[Message] | None = None
        self._prompt: TokenSequence | None = None
        self._is_rendered = asyncio.Event()

    async def get_prompt(self, messages: Sequence[Message]) -> TokenSequence:
        """Return the prompt as a new sequence, which the caller may modify."""
        try:
            return await self._copy_or_render(messages)
        finally:
            self._num_waited_for -= 1
            if self._num_waited_for <= 0:  # a retried episode renders its own prompt
                self._messages = self._prompt = None

    async def _copy_or_render(self, messages: Sequence[Message]) -> TokenSequence:
        if not self._has_first:
            self._has_first, self._messages = True, messages
            try:
                self._prompt = await self._render(messages)
            finally:
                self._is_rendered.set()
        else:
            await self._is_rendered.wait()
        prompt = self._prompt
        if prompt is None or not await self._has_same_messages(messages):
            return await self._render(messages)
        copy = TokenSequence()
        copy.extend(prompt.token_ids, images=tuple(prompt.images))
        return copy

    async def _render(self, messages: Sequence[Message]) -> TokenSequence:
        return await render_off_loop(self._renderer, lambda: self._renderer.prompt(messages), messages)

    async def _has_same_messages(self, messages: Sequence[Message]) -> bool:
        return await render_off_loop(self._renderer, lambda: self._messages == messages, messages)


class TokenConversation:
    """Conversation that records token ids, as training requires.

    Sampled token ids are kept as sampled; only the environment's messages are tokenized.
    """

    def __init__(
        self, engine: InferenceEngine, renderer: Renderer, limits: SequenceLimits, shared_prompt: SharedPrompt | None = None
    ) -> None:
        """Create a conversation.

        Conversations that share `shared_prompt` render their prompt only once.
        """
        self._engine, self._renderer, self._limits = engine, renderer, limits
        self._shared_prompt = shared_prompt or SharedPrompt(renderer, 1)
        self.sequences: list[TokenSequence] = []
        self.turns: list[Turn] = []
        self.response_size: ResponseSize | None = None
        self._current = 0
        """Index in `sequences` of the sequence that the next response continues."""
        self._requested_version: int | None = None

    @property
    def first_token_version(self) -> int | None:
        """Weight version of the first sampled token; None before the first request.

        Between the first request and the first token, the value is the weight version that the
        engine had when the first request was made. Later tokens have the same or a newer weight
        version.
        """
        first = (turn for turn in self.turns if turn.token_span[0] < turn.token_span[1])
        return next((self.sequences[turn.sequence].weight_versions[turn.token_span[0]] for turn in first), self._requested_version)

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        """Render the prompt as the first sequence; return a stop reason if a limit is exceeded."""
        self.sequences.append(await self._shared_prompt.get_prompt(messages))
        return self._limits.exceeds(TokenSequence(), self.sequences[0])

    async def generate(self, sampling: SamplingSettings) -> str:
        """Sample a response, append it to the current sequence, and return its text."""
        context = self.sequences[self._current]
        start = len(context.token_ids)
        num_remaining = self._limits.max_sequence_tokens - start
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, num_remaining))
        sampling = replace(sampling, routed_experts_start=len(context.routed_experts))
        self._requested_version = self._engine.weight_version if self._requested_version is None else self._requested_version
        completion = await self._engine.generate(context.token_ids, context.images, sampling)
        context.extend(completion.token_ids, logprobs=completion.logprobs, versions=completion.weight_versions)
        context.routed_experts.extend(completion.routed_experts)
        self.response_size = ResponseSize(start, len(completion.token_ids), completion.is_stopped)
        text = self._renderer.decode_response(completion.token_ids)
        self.turns.append(Turn(sequence=self._current, token_span=(start, len(context.token_ids)), text=text))
        return text

    def char_to_token(self, char: int) -> int:
        """Return the index of the token that contains character `char` of the last response.

        The index is relative to the start of the sequence; `char` is relative to the start of the
        response.
        """
        start, stop = self.turns[-1].token_span
        return start + self._renderer.char_to_token(self.sequences[self.turns[-1].sequence].token_ids[start:stop], char)

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None) -> StopReason | None:
        """Render an observation and append it, unless a limit would be exceeded.

        Returns a stop reason if a limit would be exceeded, else None.
        """
        turn = self.turns[-1 if after_turn is None else after_turn]
        continued = self.sequences[turn.sequence]
        is_branch = not is_new_prompt and turn.token_span[1] < len(continued.token_ids)
        context = TokenSequence() if is_new_prompt else self._copy_prefix(turn) if is_branch else continued
        more = await self._render(context, messages, is_new_prompt=is_new_prompt)
        end = self._limits.exceeds(context, more)
        if end is not None:
            return end
        self.turns[-1].images = list(more.images)
        context.extend(more.token_ids, images=tuple(more.images))
        if is_new_prompt or is_branch:
            self.sequences.append(context)
            self._current = len(self.sequences) - 1
        else:
            self._current = turn.sequence
        return None

    async def render_final_state(
        self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None
    ) -> TokenSequence | None:
        """Return the context after the last observation plus one token; None if it is too long."""
        turn = self.turns[-1 if after_turn is None else after_turn]
        context = TokenSequence() if is_new_prompt else self._copy_prefix(turn)
        more = await self._render(context, messages, is_new_prompt=is_new_prompt)
        if self._limits.exceeds(context, more) is not None:
            return None
        context.extend(more.token_ids, images=tuple(more.images))
        context.extend([self._renderer.end_id], logprobs=[0.0])
        return context

    def _copy_prefix(self, turn: Turn) -> TokenSequence:
        return copy_prefix(self.sequences[turn.sequence], turn.token_span[1], image_token_id=self._renderer.image_token_id)

    async def _render(self, context: TokenSequence, messages: Sequence[Message], *, is_new_prompt: bool) -> TokenSequence:
        render = partial(self._renderer.prompt if is_new_prompt else partial(self._renderer.observation, context), messages)
        return await render_off_loop(self._renderer, render, messages)


async def render_off_loop(renderer: Renderer, render_fn: Callable[[], T], messages: Sequence[Message]) -> T:
    """Call `render_fn` and return its result; use a thread if the images in `messages` are large.

    `render_fn` renders `messages`. Images with fewer than Renderer.max_inline_pixels pixels in
    total are rendered in the event loop.

    Raises:
        PermanentInfraError: The chat template cannot render the messages.
    """
    pixels = sum(picture.width * picture.height for picture in extract_images(messages))
    try:
        return render_fn() if pixels < renderer.max_inline_pixels else await renderer.run_in_thread(render_fn)
    except ValueError as error:
        raise PermanentInfraError(str(error)) from error


def copy_prefix(context: TokenSequence, length: int, *, image_token_id: int) -> TokenSequence:
    """Return the first `length` tokens of a sequence, with their images, as a new sequence.

    No token of the copy has a loss, because the sampled tokens are trained on in the original.
    """
    tokens = context.token_ids[:length]
    num_left = tokens.count(image_token_id)
    images = []
    for image in context.images:
        if num_left <= 0:
            break
        images.append(image)
        num_left -= image.num_tokens
    assert num_left == 0, "a prefix ends after a response, so it contains no part of an image"
    copy = TokenSequence()
    copy.extend(tokens, images=tuple(images))
    copy.routed_experts = context.routed_experts[:length]
    return copy


def count_pixels(images: Sequence[Image]) -> int:
    """Return the total number of pixels of the images."""
    return sum(image.num_pixels for image in images)
