"""A conversation with the policy: an episode speaks messages and hears text, and what was said is written down as contexts and turns.

The limits of a context (tokens, images, pixels) are here and nowhere else. They are looked at between turns: what the policy said is kept
whole, and an observation that no longer fits is not shown. Pictures are rendered beside the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from megatron_rl.rollout.engine import InferenceEngine, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.types import Image, Message, StopReason, TokenSequence, Turn

T = TypeVar("T")


@dataclass(slots=True, frozen=True, kw_only=True)
class SequenceLimits:
    max_sequence_tokens: int
    """Tokens of a context at most, the policy's included."""
    max_images: int
    max_pixels: int = 0
    """Pixels of a context's images together, at their final sizes; 0 sets no limit."""

    def exceeds(self, context: TokenSequence, added: TokenSequence) -> StopReason | None:
        """The limit that `context` would overrun if `added` were added. A context keeps room for one token of the policy."""
        if len(context.images) + len(added.images) > self.max_images:
            return StopReason.MAX_IMAGES
        if self.max_pixels and count_pixels([*context.images, *added.images]) > self.max_pixels:
            return StopReason.MAX_PIXELS
        if len(context.token_ids) + len(added.token_ids) >= self.max_sequence_tokens:
            return StopReason.MAX_TOKENS
        return None


class Conversation(Protocol):
    """Single use: made for one episode. `sequences` and `turns` grow while it goes on, and are those of the episode's rollout."""

    sequences: list[TokenSequence]
    turns: list[Turn]

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        """Show the prompt. Returns the limit that it overruns by itself; it is written down all the same, so that its size can be told."""
        ...

    async def generate(self, sampling: SamplingSettings) -> str:
        """Let the policy reply, with no more tokens than its context has room for. The reply is the last of `turns`."""
        ...

    def char_to_token(self, char: int) -> int | None:
        """The token of the last reply, by its number in its context, that holds this character of its text; None where it has none."""
        ...

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool) -> StopReason | None:
        """Show the policy what came of its reply, or return the limit that forbids it. `is_new_prompt`: the messages are a whole new
        prompt."""
        ...


class SharedPrompt:
    """How the episodes of a group begin. They meet the same world, so the prompt of the first to come is rendered and the others are shown
    a copy; one whose messages are not the same after all has its own rendered. Nothing is kept once all of them have begun."""

    def __init__(self, renderer: Renderer, group_size: int) -> None:
        self._renderer, self._num_waited_for = renderer, group_size
        self._has_first = False
        self._messages: Sequence[Message] | None = None
        self._prompt: TokenSequence | None = None
        self._is_rendered = asyncio.Event()

    async def get_prompt(self, messages: Sequence[Message]) -> TokenSequence:
        """A context of the caller's own."""
        try:
            return await self._copy_or_render(messages)
        finally:
            self._num_waited_for -= 1
            if self._num_waited_for <= 0:  # one that begins anew is alone
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
    """The conversation that is trained on: what an engine sampled stays as it is, and only what the environment says is tokenized."""

    def __init__(
        self, engine: InferenceEngine, renderer: Renderer, limits: SequenceLimits, shared_prompt: SharedPrompt | None = None
    ) -> None:
        """Episodes that share their `shared_prompt` have their prompt rendered once."""
        self._engine, self._renderer, self._limits = engine, renderer, limits
        self._shared_prompt = shared_prompt or SharedPrompt(renderer, 1)
        self.sequences: list[TokenSequence] = []
        self.turns: list[Turn] = []
        self._requested_version: int | None = None

    @property
    def first_token_version(self) -> int | None:
        """Of the weights that sampled its first token, or that were asked for it; None before. Later tokens are of these or newer ones."""
        first = (turn for turn in self.turns if turn.token_span[0] < turn.token_span[1])
        return next((self.sequences[turn.sequence].weight_versions[turn.token_span[0]] for turn in first), self._requested_version)

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        self.sequences.append(await self._shared_prompt.get_prompt(messages))
        return self._limits.exceeds(TokenSequence(), self.sequences[0])

    async def generate(self, sampling: SamplingSettings) -> str:
        context = self.sequences[-1]
        start = len(context.token_ids)
        room = self._limits.max_sequence_tokens - start
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        self._requested_version = self._engine.weight_version if self._requested_version is None else self._requested_version
        completion = await self._engine.generate(context.token_ids, context.images, sampling)
        context.extend(completion.token_ids, logprobs=completion.logprobs, versions=completion.weight_versions)
        text = self._renderer.decode_response(completion.token_ids)
        self.turns.append(Turn(sequence=len(self.sequences) - 1, token_span=(start, len(context.token_ids)), text=text))
        return text

    def char_to_token(self, char: int) -> int:
        start, stop = self.turns[-1].token_span
        return start + self._renderer.char_to_token(self.sequences[-1].token_ids[start:stop], char)

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool) -> StopReason | None:
        context = TokenSequence() if is_new_prompt else self.sequences[-1]
        render = partial(self._renderer.prompt if is_new_prompt else partial(self._renderer.observation, context), messages)
        more = await render_off_loop(self._renderer, render, messages)
        end = self._limits.exceeds(context, more)
        if end is not None:
            return end
        self.turns[-1].images = list(more.images)
        if is_new_prompt:
            self.sequences.append(more)
        else:
            context.extend(more.token_ids, images=tuple(more.images))
        return None


async def render_off_loop(renderer: Renderer, render_fn: Callable[[], T], messages: Sequence[Message]) -> T:
    """What `render_fn` makes of these messages; in a thread where their pictures are not small (Renderer.max_inline_pixels)."""
    pixels = sum(picture.width * picture.height for picture in extract_images(messages))
    return render_fn() if pixels < renderer.max_inline_pixels else await renderer.run_in_thread(render_fn)


def count_pixels(images: Sequence[Image]) -> int:
    return sum(image.pil.width * image.pil.height for image in images)
