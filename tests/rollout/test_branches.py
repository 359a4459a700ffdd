"""Tests conversations that return to an earlier turn: every branch has the tokens of a conversation
without branches, and each sampled token has a loss in exactly one sequence.
"""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image as pil

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.conversation import SequenceLimits, TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Message, StopReason

LIMITS = SequenceLimits(max_sequence_tokens=10_000, max_images=100)
COLORS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@dataclass
class Scripted:
    """Engine that returns the given responses, one per request."""

    responses: list[list[int]]
    weight_version: int = 0
    contexts: list[list[int]] = field(default_factory=list)

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.contexts.append(list(token_ids))
        response = self.responses[len(self.contexts) - 1]
        return Completion(
            response, [-0.1 * token for token in response], is_stopped=True, weight_versions=[len(self.contexts)] * len(response)
        )


def ask(text: str, color: str | None) -> list[Message]:
    picture = [] if color is None else [{"type": "image", "image": pil.new("RGB", (56, 56), color)}]
    return [{"role": "user", "content": [*picture, {"type": "text", "text": text}]}]


async def talk(conversation: TokenConversation, steps: list[tuple[list[Message], int | None]]) -> None:
    """Start with the first messages; other steps are (messages, index of the turn they follow)."""
    assert await conversation.start(steps[0][0]) is None
    for messages, after_turn in steps[1:]:
        await conversation.generate(SamplingSettings(8, 1.0, seed=1))
        assert await conversation.observe(messages, is_new_prompt=False, after_turn=after_turn) is None
    await conversation.generate(SamplingSettings(8, 1.0, seed=1))


@pytest.mark.parametrize("seed", range(12))
def test_a_branch_equals_a_conversation_without_branches(renderer: Renderer, seed: int) -> None:
    """Random trees of 2 to 9 turns with images. The oracle plays each path from the root to a turn
    as a conversation of its own, with the same responses."""
    rng = random.Random(seed)
    num_turns = rng.randint(2, 9)
    parents = [None, *(rng.randrange(turn) for turn in range(1, num_turns))]
    messages = [ask(f"Message {turn}: {'word ' * rng.randrange(5)}", rng.choice([None, *COLORS])) for turn in range(num_turns)]
    responses = [[rng.randrange(32, 120) for _ in range(rng.randint(1, 6))] + rng.choice([[], [renderer.end_id]]) for _ in range(num_turns)]
    engine = Scripted(responses)
    conversation = TokenConversation(engine, renderer, LIMITS)
    asyncio.run(talk(conversation, list(zip(messages, parents, strict=True))))

    assert len(conversation.turns) == num_turns
    for turn in range(num_turns):
        path = [turn]
        while parents[path[0]] is not None:
            path.insert(0, parents[path[0]])
        linear = Scripted([responses[each] for each in path])
        oracle = TokenConversation(linear, renderer, LIMITS)
        asyncio.run(talk(oracle, [(messages[each], None) for each in path]))
        (expected,) = oracle.sequences
        found, stop = conversation.sequences[conversation.turns[turn].sequence], conversation.turns[turn].token_span[1]
        assert found.token_ids[:stop] == expected.token_ids
        assert engine.contexts[turn] == linear.contexts[-1]
        assert [image.key for image in found.images][: len(expected.images)] == [image.key for image in expected.images]

    trained = [
        (context.rollout_logprobs[place], context.weight_versions[place])
        for context in conversation.sequences
        for place, has_loss in enumerate(context.loss_mask)
        if has_loss
    ]
    assert sorted(trained) == sorted((-0.1 * token, turn + 1) for turn, response in enumerate(responses) for token in response)
    for turn, response in zip(conversation.turns, responses, strict=True):
        context, (start, stop) = conversation.sequences[turn.sequence], turn.token_span
        assert context.token_ids[start:stop] == response and context.loss_mask[start:stop] == [1] * len(response)
    leaves = num_turns - len({parent for parent in parents if parent is not None})
    assert len(conversation.sequences) == leaves


def test_two_turns_in_alternation_need_no_copies(renderer: Renderer) -> None:
    """If both branches end with a response, each is continued in its own sequence."""
    engine = Scripted([[65, renderer.end_id]] * 6)
    conversation = TokenConversation(engine, renderer, LIMITS)
    texts = [ask(str(number), None) for number in range(6)]
    asyncio.run(talk(conversation, list(zip(texts, (None, 0, 0, 1, 2, 3), strict=True))))
    assert [turn.sequence for turn in conversation.turns] == [0, 0, 1, 0, 1, 0]


def test_a_branch_that_does_not_fit_is_not_added(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(ask("?", None)).token_ids)
    conversation = TokenConversation(Scripted([[65]] * 3), renderer, SequenceLimits(max_sequence_tokens=prompt + 60, max_images=0))
    asyncio.run(talk(conversation, [(ask("?", None), None), (ask("Go on.", None), None)]))
    before = [list(context.token_ids) for context in conversation.sequences]
    end = asyncio.run(conversation.observe(ask("word " * 60, None), is_new_prompt=False, after_turn=0))
    assert end is StopReason.MAX_TOKENS and [context.token_ids for context in conversation.sequences] == before
    assert asyncio.run(conversation.observe(ask("?", "red"), is_new_prompt=False, after_turn=0)) is StopReason.MAX_IMAGES
