"""A conversation with the policy: an episode speaks messages and hears text, and what was said is written down as contexts and turns.

The limits of a context (tokens, images, pixels) are here and nowhere else. They are looked at between turns: what the policy said is kept
whole, and an observation that no longer fits is not shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_rl.rollout.engine import Engine, Sampling
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Context, End, Image, Message, Turn


@dataclass(slots=True, frozen=True, kw_only=True)
class ContextLimits:
    max_context: int
    """Tokens of a context at most, the policy's included."""
    max_images: int
    max_pixels: int = 0
    """Pixels of a context's images together, at their final sizes; 0 sets no limit."""

    def overrun(self, context: Context, more: Context) -> End | None:
        """The limit that `context` would overrun if `more` were added. A context keeps room for one token of the policy."""
        if len(context.images) + len(more.images) > self.max_images:
            return End.MAX_IMAGES
        if self.max_pixels and pixels_of([*context.images, *more.images]) > self.max_pixels:
            return End.MAX_PIXELS
        if len(context.token_ids) + len(more.token_ids) >= self.max_context:
            return End.MAX_TOKENS
        return None


class Conversation(Protocol):
    """Single use: made for one episode. `contexts` and `turns` grow while it goes on, and are those of the episode's rollout."""

    contexts: list[Context]
    turns: list[Turn]

    def open(self, messages: Sequence[Message]) -> End | None:
        """Show the prompt. Returns the limit that it overruns by itself; it is written down all the same, so that its size can be told."""
        ...

    async def say(self, sampling: Sampling) -> str:
        """Let the policy reply, with no more tokens than its context has room for. The reply is the last of `turns`."""
        ...

    def place_of(self, char: int) -> int:
        """The token of the last reply, by its number in its context, that holds this character of the reply's text."""
        ...

    def hear(self, messages: Sequence[Message], *, anew: bool) -> End | None:
        """Show the policy what came of its reply, or return the limit that forbids it. `anew`: the messages are a whole new prompt."""
        ...


class TokenConversation:
    """The conversation that is trained on: what an engine sampled stays as it is, and only what the environment says is tokenized."""

    def __init__(self, engine: Engine, renderer: Renderer, limits: ContextLimits) -> None:
        self._engine, self._renderer, self._limits = engine, renderer, limits
        self.contexts: list[Context] = []
        self.turns: list[Turn] = []

    def open(self, messages: Sequence[Message]) -> End | None:
        self.contexts.append(self._renderer.prompt(messages))
        return self._limits.overrun(Context(), self.contexts[0])

    async def say(self, sampling: Sampling) -> str:
        context = self.contexts[-1]
        start = len(context.token_ids)
        room = self._limits.max_context - start
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        completion = await self._engine.generate(context.token_ids, context.images, sampling)
        versions = [completion.weight_version] * len(completion.token_ids)
        context.extend(completion.token_ids, logprobs=completion.logprobs, versions=versions)
        text = self._renderer.text(completion.token_ids)
        self.turns.append(Turn(context=len(self.contexts) - 1, span=(start, len(context.token_ids)), text=text))
        return text

    def place_of(self, char: int) -> int:
        start, stop = self.turns[-1].span
        return start + self._renderer.place_of(self.contexts[-1].token_ids[start:stop], char)

    def hear(self, messages: Sequence[Message], *, anew: bool) -> End | None:
        context = Context() if anew else self.contexts[-1]
        more = self._renderer.prompt(messages) if anew else self._renderer.observation(context, messages)
        end = self._limits.overrun(context, more)
        if end is not None:
            return end
        self.turns[-1].images = list(more.images)
        if anew:
            self.contexts.append(more)
        else:
            context.extend(more.token_ids, images=tuple(more.images))
        return None


def pixels_of(images: Sequence[Image]) -> int:
    return sum(image.picture.width * image.picture.height for image in images)
