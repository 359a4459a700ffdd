"""Tests the limits and stop reasons of an episode with a scripted engine. Tests with real engines
are in tests/e2e and tests/parity.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import pytest
from PIL import Image as Pillow

from megatron_rl.config import ModelSettings
from megatron_rl.errors import InfraError
from megatron_rl.observe.trace import StepTrace
from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric, TurnRewardTerm
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Env, Step
from megatron_rl.types import Example, Image, Message, Rollout, Status, StopReason, ToolCall

EXAMPLE = Example("e", {"question": "How many?", "answer": 4, "extra": {"index": 7, "image": b"PNG"}}, source="mine")
SETTINGS = EpisodeSettings(temperature=1.0, max_turns=9, max_new_tokens=5, max_sequence_tokens=400, max_images=8, seed=0)


@pytest.fixture(scope="module")
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@dataclass
class Scripted:
    """Engine that samples "ok" in every turn."""

    renderer: Renderer
    asked: list[SamplingSettings] = field(default_factory=list)
    weight_version: int = 3

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.asked.append(sampling)
        ids = [*self.renderer.tokenizer("ok", add_special_tokens=False)["input_ids"], self.renderer.end_id]
        return Completion(ids, [-0.5] * len(ids), is_stopped=True, weight_versions=[3] * len(ids))


@dataclass
class Looks(Env):
    """Environment that answers each response with an image of 56 x 56 (4 tokens) and ends after
    `turns` responses.
    """

    turns: int = 99
    error: str = ""
    fault: bool = False
    delay_s: float = 0.0
    is_truncated: bool = False
    is_new_prompt: bool = False
    after_turn: int | None = None
    note: str = ""
    closed: int = 0
    replies: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        return f"after {len(self.replies)}"

    async def reset(self, seed: int) -> list[Message]:
        return [self._show()]

    async def step(self, text: str) -> Step:
        self.replies.append(text)
        await asyncio.sleep(self.delay_s)
        if self.fault:
            raise InfraError("the sandbox is down")
        done = len(self.replies) == self.turns
        call = ToolCall(tool="look", source=text, error=self.error)
        reason = "enough" if done else self.note
        messages = [] if done and not self.is_truncated else [self._show()]
        return Step(
            messages=messages, reward=1.0, done=done, reason=reason, is_truncated=self.is_truncated, tool_call=call,
            is_new_prompt=self.is_new_prompt, after_turn=self.after_turn,
        )  # fmt: skip

    async def close(self) -> None:
        self.closed += 1

    def _show(self) -> Message:
        picture = Pillow.new("RGB", (56, 56), (len(self.replies), 0, 0))
        return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}


async def one(outcome: RewardInput) -> float:
    assert [image.pil.size for image in outcome.prompt_images] == [(56, 56)], "those of the prompt"
    return 1.0


async def numbered(outcome: RewardInput) -> list[float | None]:
    return [None if number == 0 else float(number) for number in range(len(outcome.turns))]


@dataclass
class LooksTask:
    world: Looks
    rubric: Rubric = field(
        default_factory=lambda: Rubric(terms={"one": RewardTerm(one)}, turn_terms={"number": TurnRewardTerm(numbered, weight=0.5)})
    )
    name: str = "looks"
    stop: Sequence[str] = ("</end>",)

    def env(self, example: Example) -> Looks:
        return self.world


def episode(
    task: LooksTask, engine: Scripted, *, settings: EpisodeSettings = SETTINGS, group: int = 1, sample: int = 2
) -> Coroutine[object, object, Rollout]:
    conversation = TokenConversation(engine, engine.renderer, settings)
    return run_episode(task, EXAMPLE, conversation=conversation, settings=settings, group=group, sample_index=sample)


def play(renderer: Renderer, world: Looks, settings: EpisodeSettings = SETTINGS) -> Rollout:
    engine, task = Scripted(renderer), LooksTask(world)
    rollout = asyncio.run(episode(task, engine, settings=settings))
    assert world.closed == 1, "an environment is closed however the episode ends"
    assert all(sampling.stop == ("</end>",) for sampling in engine.asked)
    for context in rollout.sequences:
        assert context.token_ids.count(renderer.image_token_id) == sum(image.num_tokens for image in context.images)
    return rollout


def test_the_environment_ends_it_and_the_rubric_scores_it(renderer: Renderer) -> None:
    rollout = play(renderer, Looks(turns=3))
    assert (rollout.status, rollout.stop_reason, rollout.reason, rollout.source) == (Status.COMPLETED, StopReason.DONE, "enough", "mine")
    assert (rollout.question, rollout.answer, rollout.extra) == ("How many?", "4", '{"index": 7}')
    assert [turn.text for turn in rollout.turns] == ["ok"] * 3
    # turn scores: none, 1, 2; the mean of the two that are steps is 1.5, weighted 0.75
    assert (rollout.reward, rollout.outcome_reward, rollout.reward_terms) == (1.75, 1.0, {"one": 1.0, "number": 1.5})
    assert [turn.step_score for turn in rollout.turns] == [None, 0.5, 1.0]
    assert [turn.reward_delta for turn in rollout.turns] == [0.0, 0.5, 0.25], "the mean so far moves from 0 to 1 to 1.5"
    assert [len(turn.images) for turn in rollout.turns] == [1, 1, 0]
    assert [turn.state for turn in rollout.turns] == ["after 0", "after 1", "after 2"], "the one that the reply answers"
    assert [image.pil.getpixel((0, 0)) for image in rollout.sequences[0].images] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert rollout.turns[0].images[0] is rollout.sequences[0].images[1]


@pytest.mark.known_failure("truncated-is-terminated")
def test_an_environment_that_truncates_is_not_done(renderer: Renderer) -> None:
    """An environment that reaches its own limit truncates the episode, which is scored. Steps
    before the last one are not affected.
    """
    rollout = play(renderer, Looks(turns=2, is_truncated=True))
    assert (rollout.status, rollout.stop_reason, rollout.reason) == (Status.TRUNCATED, StopReason.ENV_TRUNCATED, "enough")
    assert len(rollout.turns) == 2 and rollout.reward is not None
    assert rollout.final_state is None, "only kept if a critic needs it"


@pytest.mark.parametrize(("is_new_prompt", "after"), [(False, None), (True, None), (False, 0)], ids=["continued", "new prompt", "branch"])
def test_the_final_state_is_the_context_of_the_next_turn(renderer: Renderer, is_new_prompt: bool, after: int | None) -> None:
    """The final state of an episode that is truncated after two turns equals the context of the
    third turn of an episode that goes on. One sampled token follows.
    """
    shows = {"is_new_prompt": is_new_prompt, "after_turn": after}
    ended = play(renderer, Looks(turns=2, is_truncated=True, **shows), replace(SETTINGS, keeps_final_state=True))
    longer = play(renderer, Looks(turns=3, **shows), SETTINGS)
    context, (start, _) = longer.sequences[longer.turns[2].sequence], longer.turns[2].token_span
    final = ended.final_state
    assert final.token_ids[:-1] == context.token_ids[:start] and final.loss_mask == [0] * start + [1]
    assert [image.key for image in final.images] == [image.key for image in context.images]
    assert ended.images[: len(ended.sequences[0].images)] == ended.sequences[0].images and final.images[-1] in ended.images
    assert ended.num_sampled == sum(stop - first for first, stop in (turn.token_span for turn in ended.turns)), "not counted"


def test_a_final_state_that_does_not_fit_is_left_out(renderer: Renderer) -> None:
    """A limit that ends an episode before its next turn also excludes the final state."""
    settings = replace(SETTINGS, keeps_final_state=True, max_images=2)
    rollout = play(renderer, Looks(turns=2, is_truncated=True), settings)
    assert (rollout.stop_reason, rollout.final_state) == (StopReason.ENV_TRUNCATED, None)
    assert play(renderer, Looks(turns=2), replace(settings, max_images=3)).final_state is None, "it was not truncated"


@pytest.mark.parametrize("change", [{"max_turns": 2}, {"max_images": 3}, {"max_pixels": 3136}])
def test_the_note_on_the_last_state_is_kept(renderer: Renderer, change: dict) -> None:
    """If a limit ends the episode, its reason is the note of the last step; without one it is
    empty.
    """
    for note in ("solved", ""):
        rollout = play(renderer, Looks(note=note), replace(SETTINGS, **change))
        assert (rollout.status, rollout.reason) == (Status.TRUNCATED, note)


def test_a_trace_names_its_tools(renderer: Renderer) -> None:
    """An episode has its own row in the trace, and the row names the tools. The last environment
    event is the second turn's step.
    """
    trace, engine = StepTrace(1), Scripted(renderer)
    conversation = TokenConversation(engine, renderer, SETTINGS)
    told = {"settings": SETTINGS, "group": 4, "sample_index": 2, "timer": trace.episode_tracer(4, 2)}
    asyncio.run(run_episode(LooksTask(Looks(turns=2)), Example("e", {}), conversation=conversation, **told))
    events = trace.pop_events()
    assert {row for row, *_ in events} == {"episode 4#2"}
    names = [name for _, name, *_ in sorted(events, key=itemgetter(2)) if name != "prompt"]
    assert names == ["reply", "environment look"] * 2 + ["scoring"]


@pytest.mark.parametrize(
    ("change", "end", "num_turns", "num_images"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS, 2, 2),
        ({"max_images": 3}, StopReason.MAX_IMAGES, 3, 3),
        ({"max_pixels": 2 * 3136}, StopReason.MAX_PIXELS, 2, 2),
        ({"max_pixels": 2 * 3136 - 1}, StopReason.MAX_PIXELS, 1, 1),
        ({"max_seconds": 0.02}, StopReason.MAX_SECONDS, 1, 1),
    ],
    ids=["turns", "images", "pixels", "pixels, one less", "seconds"],
)
def test_a_budget_that_runs_out_truncates(renderer: Renderer, change: dict, end: StopReason, num_turns: int, num_images: int) -> None:
    rollout = play(renderer, Looks(delay_s=0.03 if "max_seconds" in change else 0.0), replace(SETTINGS, **change))
    assert (rollout.status, rollout.stop_reason) == (Status.TRUNCATED, end)
    assert (len(rollout.turns), len(rollout.sequences[0].images)) == (num_turns, num_images)
    assert rollout.reward is not None, "scored and trained on"
    assert rollout.sequences[0].loss_mask[-1] == 1, "an observation that nobody answers is not shown"


@pytest.mark.known_failure("truncation-splits-images")
def test_the_context_is_never_longer_than_allowed_and_holds_no_half_observation(renderer: Renderer) -> None:
    lengths = set()
    for room in range(20, 90):
        rollout = play(renderer, Looks(), replace(SETTINGS, max_sequence_tokens=room))
        if rollout.status is Status.FAILED:
            assert "raise engine.max_model_len" in rollout.reason and not lengths, "too short for the question, and only then"
            continue
        (context,) = rollout.sequences
        assert rollout.stop_reason is StopReason.MAX_TOKENS and rollout.status is Status.TRUNCATED
        assert context.loss_mask[-1] == 1
        lengths.add(len(context.token_ids))
    assert max(lengths) < 90 and len(lengths) > 2


def test_an_error_ends_the_episode_where_it_should(renderer: Renderer) -> None:
    mended = play(renderer, Looks(turns=3, error="no such box"))
    assert (mended.stop_reason, len(mended.turns)) == (StopReason.DONE, 3)
    ended = play(renderer, Looks(turns=3, error="no such box"), replace(SETTINGS, stop_on_tool_error=True))
    assert (ended.status, ended.stop_reason, ended.reason, len(ended.turns)) == (Status.COMPLETED, StopReason.TOOL_ERROR, "no such box", 1)
    assert ended.reward is not None


@pytest.mark.known_failure("sandbox-failure-is-an-answer")
def test_a_fault_of_ours_is_no_score(renderer: Renderer) -> None:
    rollout = play(renderer, Looks(fault=True))
    assert (rollout.status, rollout.stop_reason, rollout.reason, rollout.reward) == (
        Status.FAILED,
        StopReason.INFRA_ERROR,
        "the sandbox is down",
        None,
    )


@pytest.mark.parametrize("hangs_in", ["reset", "step"])
def test_an_environment_that_hangs_fails_its_episode_alone(hangs_in: str, renderer: Renderer) -> None:
    """An environment that exceeds env_timeout_s is cancelled and closed, and only its own episode
    fails. A TimeoutError that the environment itself raises is not treated as this timeout.
    """

    class Hanging(Looks):
        async def reset(self, seed: int) -> list[Message]:
            return await (asyncio.Event().wait() if hangs_in == "reset" else super().reset(seed))

        async def step(self, text: str) -> Step:
            return await asyncio.Event().wait()

    class Staying(Looks):
        async def close(self) -> None:
            await super().close()
            await asyncio.Event().wait()

    class Late(Looks):
        async def step(self, text: str) -> Step:
            raise TimeoutError("a server of its own")

    async def together() -> list[Rollout]:
        short = replace(SETTINGS, env_timeout_s=0.3)
        return await asyncio.gather(*(episode(LooksTask(each), Scripted(renderer), settings=short) for each in (hanging, Looks(turns=3))))

    hanging = Hanging()
    failed, other = asyncio.run(together())
    assert (failed.status, failed.stop_reason, failed.reward, hanging.closed) == (Status.FAILED, StopReason.PERMANENT_INFRA_ERROR, None, 1)
    assert failed.reason == "task=looks: the environment took more than 0.3 s (task.env_timeout_s)" and 0.3 <= failed.wall_s < 5
    assert (other.status, other.reward) == (Status.COMPLETED, 1.75)
    stays = play(renderer, Staying(turns=3), replace(SETTINGS, env_timeout_s=0.3))
    assert (stays.status, stays.reward) == (Status.COMPLETED, 1.75) and stays.wall_s >= 0.3, "it costs its episode time alone"
    with pytest.raises(TimeoutError, match="a server of its own"):
        play(renderer, Late(), replace(SETTINGS, env_timeout_s=9.0))


@pytest.mark.known_failure("judge-failure-is-zero")
def test_a_judge_that_is_down_is_no_score(renderer: Renderer) -> None:
    async def down(outcome: RewardInput) -> float:
        raise InfraError("http://judge: no answer")

    world, engine = Looks(turns=1), Scripted(renderer)
    task = LooksTask(world, rubric=Rubric(terms={"accuracy": RewardTerm(down)}))
    rollout = asyncio.run(episode(task, engine))
    assert (rollout.status, rollout.reward, rollout.reason, world.closed) == (Status.FAILED, None, "http://judge: no answer", 1)


def test_seeds_tell_group_sample_and_turn_apart(renderer: Renderer) -> None:
    seeds = set()
    for group in range(3):
        for sample in range(3):
            engine = Scripted(renderer)
            asyncio.run(episode(LooksTask(Looks()), engine, settings=replace(SETTINGS, max_turns=3), group=group, sample=sample))
            seeds |= {sampling.seed for sampling in engine.asked}
    assert len(seeds) == 27


def test_a_slow_tool_delays_only_its_own_episode(renderer: Renderer) -> None:
    """One episode with a tool of 0.5 s per turn runs together with nine fast episodes. All nine
    finish before the slow one.
    """
    order: list[int] = []

    async def numbered_episode(number: int) -> None:
        await episode(LooksTask(Looks(turns=3, delay_s=0.5 if number == 0 else 0.0)), Scripted(renderer), group=number)
        order.append(number)

    async def together() -> None:
        await asyncio.gather(*(numbered_episode(number) for number in range(10)))

    asyncio.run(together())
    assert order[-1] == 0 and sorted(order) == list(range(10))


def test_an_episode_knows_what_it_waited_for(renderer: Renderer) -> None:
    async def slow(outcome: RewardInput) -> float:
        await asyncio.sleep(0.1)
        return 1.0

    engine, task = Scripted(renderer), LooksTask(Looks(turns=3, delay_s=0.2), rubric=Rubric(terms={"slow": RewardTerm(slow)}))
    rollout = asyncio.run(episode(task, engine))
    assert rollout.env_s >= 0.6 > 0.5 > rollout.scoring_s >= 0.1
    assert rollout.env_s + rollout.scoring_s <= rollout.wall_s
    assert all(turn.env_s >= 0.2 > 0.15 > turn.generation_s > 0 for turn in rollout.turns)
    assert sum(turn.env_s for turn in rollout.turns) == pytest.approx(rollout.env_s)


@pytest.mark.parametrize(
    ("change", "raised"),
    [
        ({"max_sequence_tokens": 20}, "engine.max_model_len"),
        ({"max_pixels": 3000}, "task.max_pixels"),
        ({"max_images": 0}, "engine.max_images"),
    ],
)
def test_a_question_that_does_not_fit_is_no_failure_of_the_policy(renderer: Renderer, change: dict, raised: str) -> None:
    rollout = play(renderer, Looks(), replace(SETTINGS, **change))
    assert (rollout.status, rollout.stop_reason, rollout.reward, rollout.turns) == (
        Status.FAILED,
        StopReason.PERMANENT_INFRA_ERROR,
        None,
        [],
    )
    assert rollout.reason.startswith("example e: its prompt has ") and f"raise {raised}," in rollout.reason
