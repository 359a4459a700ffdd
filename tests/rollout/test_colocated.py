"""Tests the event loop of a colocated engine: which work blocks the loop and which does not. The
engine is ColocatedEngine with a stand-in for vLLM; tests with vLLM are in tests/parity.
"""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image as Pillow
from PIL.Image import Image as Picture

from benchmarks.engine_stalls import FixedCore, fixed_engine
from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout import colocated
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.conversation import SequenceLimits, SharedPrompt, TokenConversation
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import MAX_INLINE_PIXELS, Renderer, max_inline_pixels
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.types import Image, Message, TokenSequence, Turn

STEP_S, RENDER_S = 0.005, 0.3
LIMITS = SequenceLimits(max_sequence_tokens=9000, max_images=9)
LARGE = (MAX_INLINE_PIXELS // 256, 256)


@pytest.fixture
def renderer(random_model: Path) -> Renderer:
    return Renderer(ModelSettings(path=str(random_model), min_pixels=3136, max_pixels=3136))


@pytest.fixture
def engine(random_model: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> tuple[ColocatedEngine, FixedCore]:
    monkeypatch.setattr(colocated, "VllmCore", None)  # restored at the end of the test
    return fixed_engine(random_model, renderer, step_s=STEP_S, max_model_len=9000)


@pytest.fixture
def seen(renderer: Renderer, engine: tuple[ColocatedEngine, FixedCore], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of the engine's step counts before and after each image is rendered.

    Rendering takes RENDER_S.
    """
    image, steps = renderer.image, []

    def slow(picture: Picture) -> Image:
        before = engine[1].num_steps
        time.sleep(RENDER_S)
        made = image(picture)
        steps.append((before, engine[1].num_steps))
        return made

    monkeypatch.setattr(renderer, "image", slow)
    return steps


def asked(color: int, size: tuple[int, int] = LARGE) -> list[Message]:
    picture = Pillow.new("RGB", size, (color, 0, 0))
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}]


def of_length(num: int) -> SamplingSettings:
    """Return settings for a response of exactly `num` tokens; FixedCore derives the length from the
    seed.
    """
    return SamplingSettings(max_tokens=num, temperature=1.0, seed=num - 1)


async def beside(engine: ColocatedEngine, act: Callable[[], object]) -> None:
    """Run `act` while a long response of another episode is in progress."""
    other = asyncio.create_task(engine.generate([65], [], of_length(2000)))
    await asyncio.sleep(5 * STEP_S)
    await act()
    other.cancel()


@pytest.mark.known_failure("preprocessing-blocks")
def test_steps_go_on_while_pictures_are_rendered(
    engine: tuple[ColocatedEngine, FixedCore], renderer: Renderer, seen: list[tuple[int, int]]
) -> None:
    """The engine continues to step while the images of a prompt, an observation and a new prompt
    are rendered. An otherwise idle engine takes 60 steps in 0.3 s; the test requires at least 6.
    """
    conversation = TokenConversation(engine[0], renderer, LIMITS)

    async def episode() -> None:
        assert await conversation.start(asked(1)) is None
        for anew in (False, True):
            await conversation.generate(of_length(2))
            assert await conversation.observe(asked(2 + anew), is_new_prompt=anew) is None

    engine[0].run(beside(engine[0], episode))
    assert len(seen) == 3 and all(after - before >= 6 for before, after in seen), seen
    assert [len(context.images) for context in conversation.sequences] == [2, 1]


def test_small_pictures_are_rendered_at_once(
    renderer: Renderer, engine: tuple[ColocatedEngine, FixedCore], seen: list[tuple[int, int]]
) -> None:
    """Small images are rendered in the event loop, so that requests have the same order in every
    run. If the images of a prompt have MAX_INLINE_PIXELS in total, they are rendered in a
    thread.
    """
    width, height = LARGE

    async def episode() -> None:
        for size in ((width - 1, height), (width // 2, height)):
            await TokenConversation(engine[0], renderer, LIMITS).start(asked(1, size))
        await TokenConversation(engine[0], renderer, LIMITS).start([*asked(1, (width // 2, height)), *asked(2, (width // 2, height))])

    engine[0].run(beside(engine[0], episode))
    assert [after > before for before, after in seen] == [False, False, True, True], seen


@pytest.mark.parametrize(("kind", "size", "is_aside"), [
    ("colocated", LARGE, True), ("colocated", (56, 56), False), ("server", LARGE, True), ("server", (56, 56), True), ("server", None,
    False),
])  # fmt: skip
def test_who_renders(kind: str, size: tuple[int, int] | None, is_aside: bool, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images are rendered in a thread. For servers, images of every size are, because
    thousands of episodes share the event loop. Text without images is rendered in the loop.
    """
    settings = EngineSettings(mode=kind, urls=["http://a:1"] if kind == "server" else [])
    renderer, threads = Renderer(ModelSettings(path=str(random_model)), max_inline_pixels=max_inline_pixels(settings)), []
    prompt = renderer.prompt

    def noted(messages: Sequence[Message]) -> TokenSequence:
        threads.append(threading.current_thread())
        return prompt(messages)

    monkeypatch.setattr(renderer, "prompt", noted)
    messages = asked(7, size) if size else [{"role": "user", "content": "?"}]

    async def shown() -> None:
        conversation = TokenConversation(None, renderer, LIMITS)
        await conversation.start(messages)
        conversation.turns.append(Turn(0, (0, 0), ""))
        await conversation.observe(messages, is_new_prompt=True)

    asyncio.run(shown())
    assert [each is not threading.current_thread() for each in threads] == [is_aside] * 2


@pytest.mark.known_failure("preprocessing-per-sample")
@pytest.mark.parametrize(("colors", "num_rendered"), [((7, 7, 7, 7), 1), ((7, 7, 8, 9), 3)])
@pytest.mark.parametrize("size", [LARGE, (56, 56)], ids=["large", "small"])
def test_the_prompt_of_a_group_is_rendered_once(
    renderer: Renderer, colors: tuple[int, ...], num_rendered: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images with equal pixels are the same image even if they are different objects. Members of a
    group with different messages get separate prompts. Oracle: each member's prompt, rendered
    alone.
    """
    rendered, prompt, opening = [], renderer.prompt, SharedPrompt(renderer, 4)
    monkeypatch.setattr(renderer, "prompt", lambda messages: (rendered.append(messages), prompt(messages))[1])
    members = [TokenConversation(None, renderer, LIMITS, opening) for _ in range(4)]
    shown = [asked(color, size) for color in colors]

    async def all_open() -> None:
        await asyncio.gather(*(member.start(messages) for member, messages in zip(members, shown, strict=True)))

    asyncio.run(all_open())
    assert len(rendered) == num_rendered
    assert [member.sequences for member in members] == [[prompt(messages)] for messages in shown]
    members[0].sequences[0].extend([5], logprobs=[-1.0])
    assert members[1].sequences == [prompt(shown[1])], "each has a context of its own"


@pytest.mark.parametrize("colors", [(7, 7, 7), (7, 8, 7)])
def test_nothing_of_a_prompt_is_kept_once_a_group_has_begun(renderer: Renderer, colors: tuple[int, ...]) -> None:
    """Once all members of a group have started, the shared prompt keeps neither the original images
    nor the patches alive. A member that starts again later gets an equal prompt.
    """
    opening = SharedPrompt(renderer, len(colors))
    members = [TokenConversation(None, renderer, LIMITS, opening) for _ in colors]
    shown = [asked(color) for color in colors]
    given = [weakref.ref(picture) for messages in shown for picture in extract_images(messages)]

    async def all_open() -> list[int]:
        alive = []
        for member in members:
            await member.start(shown.pop(0))
            await renderer.run_in_thread(lambda: None)  # a thread releases its last work only after its result is set
            gc.collect()
            alive.append(sum(each() is not None for each in given))
        return alive

    assert asyncio.run(all_open()) == [3, 2, 0], "the first waits for the others' to be held against it"
    assert members[2].sequences[0].images[0] is members[0].sequences[0].images[0]
    patches = weakref.ref(members[0].sequences[0].images[0].patch_PC)
    members.clear()
    renderer._images.clear()
    gc.collect()
    assert patches() is None
    renderer._final_key_by_source.clear()
    again = TokenConversation(None, renderer, LIMITS, opening)
    asyncio.run(again.start(asked(7)))
    assert again.sequences == [renderer.prompt(asked(7))]


def test_a_prompt_that_cannot_be_rendered_is_everyones_own_trouble(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rendering fails or is cancelled for the first member of a group, the other members render
    the prompt themselves instead of waiting forever.
    """
    opening, tries = SharedPrompt(renderer, 3), []

    def broken(messages: Sequence[Message]) -> None:
        tries.append(messages)
        time.sleep(0.05)
        raise ValueError("no picture")

    monkeypatch.setattr(renderer, "prompt", broken)

    async def members() -> list[object]:
        tasks = [asyncio.create_task(opening.get_prompt(asked(1))) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    ends = asyncio.run(members())
    assert [type(end) for end in ends] == [asyncio.CancelledError, PermanentInfraError, PermanentInfraError] and len(tries) == 3


@pytest.mark.parametrize("num_iterations", range(4))
def test_one_run_has_one_pump(engine: tuple[ColocatedEngine, FixedCore], num_iterations: int) -> None:
    """A run has exactly one pump task, even if an episode of an earlier run requests a turn just as
    that run ends. A second pump would wait for follower ranks that have left.
    """
    colocated_engine, left_behind = engine[0], []

    async def wake() -> None:
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        colocated_engine._wake_event.set()

    async def main() -> None:
        await asyncio.sleep(0.02)  # until the pump is idle
        left_behind.append(asyncio.create_task(wake()))

    async def count_pumps() -> int:
        await asyncio.sleep(0.02)
        return sum(task.get_coro().__name__ == "_pump" for task in asyncio.all_tasks())

    colocated_engine.run(main())
    assert colocated_engine.run(count_pumps()) == 1
