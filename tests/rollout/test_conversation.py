"""Tests the sequences and turns that a conversation records, the limits of a sequence, and an
episode without tokens.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from PIL import Image as pil

from megatron_rl.config import ModelSettings
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.conversation import SequenceLimits, TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Env, Step
from megatron_rl.types import Example, Image, Message, Status, StopReason, TokenSequence, Turn


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@dataclass
class Talkative:
    """Engine that samples as many tokens as a request allows and never ends a turn."""

    weight_version: int = 4
    asked: list[SamplingSettings] = field(default_factory=list)

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.asked.append(sampling)
        ids = [65 + len(self.asked)] * sampling.max_tokens
        return Completion(ids, [-0.5] * len(ids), is_stopped=False, weight_versions=[4] * len(ids))


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def say(conversation: TokenConversation, max_tokens: int) -> str:
    return asyncio.run(conversation.generate(SamplingSettings(max_tokens, 1.0, seed=1)))


def hear(conversation: TokenConversation, text: str, *, is_new_prompt: bool) -> StopReason | None:
    return asyncio.run(conversation.observe(user(text), is_new_prompt=is_new_prompt))


def test_no_context_outgrows_its_limit(renderer: Renderer) -> None:
    """The last response is requested with at most as many tokens as the sequence has left."""
    prompt = len(renderer.prompt(user("?")).token_ids)
    for room in (1, 5, 12, 40):
        engine = Talkative()
        conversation = TokenConversation(engine, renderer, SequenceLimits(max_sequence_tokens=prompt + room, max_images=0))
        assert asyncio.run(conversation.start(user("?"))) is None
        end = None
        while end is None:
            say(conversation, 12)
            end = hear(conversation, "Go on.", is_new_prompt=False)
        (context,) = conversation.sequences
        assert end is StopReason.MAX_TOKENS and len(context.token_ids) <= prompt + room
        if room <= 12:
            assert [asked.max_tokens for asked in engine.asked] == [room] and context.loss_mask == [0] * prompt + [1] * room


@pytest.mark.parametrize("num_held", [0, 3])
def test_a_context_has_room_for_one_token_of_the_policy(num_held: int) -> None:
    """With a limit of 5 tokens, the observations may fill at most 4, so that one token of the
    policy fits.
    """
    held, limits = TokenSequence(), SequenceLimits(max_sequence_tokens=5, max_images=0)
    held.extend([1] * num_held)
    for num, end in ((4, None), (5, StopReason.MAX_TOKENS), (6, StopReason.MAX_TOKENS)):
        more = TokenSequence()
        more.extend([2] * (num - num_held))
        assert limits.exceeds(held, more) is end


@pytest.mark.parametrize("is_new_prompt", [False, True])
def test_a_turn_has_the_pictures_that_answered_it(renderer: Renderer, is_new_prompt: bool) -> None:
    """The images of a turn are the images of the observation that follows the turn, whether the
    observation continues the sequence or starts a new one. The last turn has none.
    """
    conversation = TokenConversation(Talkative(), renderer, SequenceLimits(max_sequence_tokens=400, max_images=3))
    asyncio.run(conversation.start(user("?")))
    pictures = [pil.new("RGB", (56, 56), color) for color in ("red", "green")]
    for picture in pictures:
        say(conversation, 2)
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "And now?"}]
        assert asyncio.run(conversation.observe([{"role": "user", "content": parts}], is_new_prompt=is_new_prompt)) is None
    say(conversation, 2)
    assert [[image.key for image in turn.images] for turn in conversation.turns] == [[renderer.image(each).key] for each in pictures] + [[]]


def test_an_anew_prompt_is_a_context_of_its_own(renderer: Renderer) -> None:
    """The limit holds for each sequence separately: together, the two sequences would exceed it."""
    first, second = user("Where is it? " * 10), user("And now?")
    begins = [len(renderer.prompt(messages).token_ids) for messages in (first, second)]
    limits = SequenceLimits(max_sequence_tokens=sum(begins), max_images=0)
    conversation = TokenConversation(Talkative(), renderer, limits)
    asyncio.run(conversation.start(first))
    said = [say(conversation, 2), asyncio.run(conversation.observe(second, is_new_prompt=True))]
    said += [say(conversation, 3), hear(conversation, "And?", is_new_prompt=False)]
    assert said == [renderer.decode_response([66] * 2), None, renderer.decode_response([67] * 3), None]
    before, after = conversation.sequences
    assert [(turn.sequence, turn.token_span) for turn in conversation.turns] == [
        (0, (begins[0], begins[0] + 2)),
        (1, (begins[1], begins[1] + 3)),
    ]
    assert before.loss_mask == [0] * begins[0] + [1] * 2
    assert sum(after.loss_mask) == 3 and len(after.token_ids) > begins[1] + 3, "an observation follows in the same context"


@pytest.mark.known_failure("truncation-splits-images")
@pytest.mark.parametrize("is_new_prompt", [False, True])
def test_what_does_not_fit_is_not_written(renderer: Renderer, is_new_prompt: bool) -> None:
    conversation = TokenConversation(Talkative(), renderer, SequenceLimits(max_sequence_tokens=80, max_images=0))
    asyncio.run(conversation.start(user("?")))
    say(conversation, 3)
    (context,) = conversation.sequences
    before = len(context.token_ids)
    assert hear(conversation, "word " * 80, is_new_prompt=is_new_prompt) is StopReason.MAX_TOKENS
    assert conversation.sequences == [context] and len(context.token_ids) == before and conversation.turns[0].images == []
    misfit = TokenConversation(Talkative(), renderer, SequenceLimits(max_sequence_tokens=80, max_images=0))
    assert asyncio.run(misfit.start(user("word " * 80))) is StopReason.MAX_TOKENS and len(misfit.sequences[0].token_ids) > 80


@dataclass
class Words:
    """Conversation without tokens, such as one with an OpenAI-compatible server."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    weight_version: int = 0
    response_size = None

    async def start(self, messages: Sequence[Message]) -> StopReason | None:
        self.heard += messages

    async def generate(self, sampling: SamplingSettings) -> str:
        self.turns.append(Turn(sequence=0, token_span=(0, 0), text=f"reply {len(self.turns)}"))
        return self.turns[-1].text

    async def observe(self, messages: Sequence[Message], *, is_new_prompt: bool, after_turn: int | None = None) -> StopReason | None:
        self.heard += messages
        return StopReason.MAX_TOKENS if len(self.turns) == 3 else None


class Listens(Env):
    """Environment that repeats each response in its observation and gives a reward of 1 per
    turn.
    """

    async def reset(self, seed: int) -> list[Message]:
        return user("Begin.")

    async def step(self, text: str) -> Step:
        return Step(messages=user(f"You said {text}."), reward=1.0, done=False)

    async def close(self) -> None:
        """Do nothing."""


class ListensTask:
    name, stop = "listens", ()
    rubric = Rubric(turn_terms={"reward": TurnRewardTerm(environment_rewards)})

    def env(self, example: Example) -> Listens:
        return Listens()


def test_an_episode_needs_no_tokens() -> None:
    settings = EpisodeSettings(temperature=1.0, max_turns=9, max_new_tokens=5, max_sequence_tokens=1, max_images=0, seed=0)
    words = Words()
    rollout = asyncio.run(run_episode(ListensTask(), Example("e", {}), conversation=words, settings=settings, group=0, sample_index=0))
    assert (rollout.status, rollout.stop_reason, rollout.sequences) == (Status.TRUNCATED, StopReason.MAX_TOKENS, [])
    assert [turn.text for turn in rollout.turns] == ["reply 0", "reply 1", "reply 2"] and rollout.reward is not None
    assert [message["content"] for message in words.heard] == ["Begin.", *(f"You said reply {number}." for number in range(3))]


def test_experts_are_recorded_once(renderer: Renderer) -> None:
    """Each request asks for the experts that the sequence lacks. A branch keeps those of its
    prefix.
    """

    class Recording(Talkative):
        async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
            completion = await super().generate(token_ids, images, sampling)
            rows = [bytes([len(self.asked)])] * (len(token_ids) + sampling.max_tokens - 1 - sampling.routed_experts_start)
            return replace(completion, routed_experts=rows)

    engine = Recording()
    conversation = TokenConversation(engine, renderer, SequenceLimits(max_sequence_tokens=500, max_images=0))
    assert asyncio.run(conversation.start(user("?"))) is None
    prompt = len(conversation.sequences[0].token_ids)
    for _ in range(2):
        say(conversation, 4)
        hear(conversation, "Go on.", is_new_prompt=False)
    (context,) = conversation.sequences
    second = engine.asked[1].routed_experts_start
    assert [asked.routed_experts_start for asked in engine.asked] == [0, prompt + 3]
    assert context.routed_experts == [b"\x01"] * second + [b"\x02"] * (conversation.turns[1].token_span[1] - 1 - second)
    asyncio.run(conversation.observe(user("Or else?"), is_new_prompt=False, after_turn=0))
    say(conversation, 4)
    branch = conversation.sequences[1]
    assert branch.routed_experts[: prompt + 4] == context.routed_experts[: prompt + 4]
    assert engine.asked[2].routed_experts_start == prompt + 4 and len(branch.routed_experts) == len(branch.token_ids) - 1
