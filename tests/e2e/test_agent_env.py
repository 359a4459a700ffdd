"""The agents' environment with the real sandbox: what comes back, what can be mended, what is ours, and what a slow call delays."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from PIL import Image

from megatron_rl.errors import InfraError
from megatron_rl.rollout.task import Step
from megatron_rl.tasks.visual_python.codev import CodeVProtocol
from megatron_rl.tasks.visual_python.deepeyes import DeepEyesProtocol
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.function_tools import FunctionsProtocol
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example
from sandbox import BoxLimits, SandboxPool
from sandbox.client import SandboxClient
from tests.support.agent_room import NOISE, Held, env_of, pictures, play, run, same, text
from tests.support.sandbox_room import Room, started

CALL_S = 3.0


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    yield from started(BoxLimits(call_timeout_s=CALL_S, text=2000), size=3)


@pytest.mark.parametrize("protocol", [PyVisionProtocol(), CodeVProtocol(), FunctionsProtocol()], ids=lambda protocol: protocol.name)
def test_variables_live_from_turn_to_turn_and_an_answer_ends_it(room: Room, protocol: ToolProtocol) -> None:
    codes = [protocol.write_code(code) for code in ("x = [1]\ndef f(): return sum(x)", "x.append(41); print(f(), np.pi > 3)")]
    defined, printed, answered = play(room, protocol, *codes, protocol.write_answer("42"))
    assert "gave nothing back" in text(defined) and not defined.done
    assert printed.call.text == "42 True" and "42 True" in text(printed)
    assert (printed.call.tool, printed.call.ran, printed.call.error) == ("python", True, "")
    assert (answered.done, answered.messages, answered.call) == (True, [], None)
    assert [step.reward for step in (defined, printed, answered)] == [0.0] * 3


def test_crops_and_figures_come_back_numbered_on(room: Room) -> None:
    crop, figure, both = run(
        room,
        "image_clue_0.crop((10, 20, 60, 80)).show()",
        "plt.figure(figsize=(2, 1), dpi=100); plt.imshow(image_clue_0); plt.show()",
        "for k in range(2): image_clue_0.crop((k, 0, k + 40, 40)).show()",
    )
    assert same(pictures(crop)[0], NOISE.crop((10, 20, 60, 80)))
    assert [picture.size for picture in pictures(figure)] == [(200, 100)]
    assert all(same(shown, NOISE.crop((k, 0, k + 40, 40))) for k, shown in enumerate(pictures(both)))
    numbers = [[k for k in range(9) if f"<image_clue_{k}>" in text(step)] for step in (crop, figure, both)]
    assert numbers == [[1], [2], [3, 4]], "image_clue_0 is the question's"


def test_pictures_that_are_hidden_are_only_in_the_code(room: Room) -> None:
    protocol = PyVisionProtocol(shows_images=False)

    async def episode() -> tuple[list, Step]:
        env = env_of(room, protocol, Held(NOISE))
        prompt = await env.reset(0)
        step = await env.step(protocol.write_code("image_hint_0.show()"))
        await env.close()
        return prompt, step

    prompt, step = room.do(episode())
    assert not any(part["type"] == "image" for message in prompt for part in message["content"])
    assert same(pictures(step)[0], NOISE) and "<image_clue_0>" in text(step)


def test_codev_works_on_files_by_name(room: Room) -> None:
    protocol = CodeVProtocol(("photo.jpg",))
    code = "from PIL import Image\nImage.open('photo.jpg').crop((0, 0, 50, 50)).save('part.png')\nprint('part.png')"
    saved, missing, over = run(room, code, "Image.open('foto.jpg')", "Image.new('RGB', (9, 9)).save('photo.jpg')", protocol=protocol)
    assert same(pictures(saved)[0], NOISE.crop((0, 0, 50, 50)))
    assert "FileNotFoundError" in missing.call.error and "The images are called photo.jpg." in text(missing)
    assert over.call.error, "the input cannot be written over"


def test_zoom_and_rotate_act_on_the_original(room: Room) -> None:
    for protocol in (DeepEyesProtocol(), FunctionsProtocol()):
        zoomed, turned, again, outside = play(
            room, protocol,
            protocol.write_call("zoom", {"bbox_2d": [10, 20, 60, 80], "label": "noise"}),
            protocol.write_call("rotate", {"angle": 90}),
            protocol.write_call("zoom", {"bbox_2d": [100, 50, 500, 500]}),
            protocol.write_call("zoom", {"bbox_2d": [500, 500, 600, 600]}),
        )  # fmt: skip
        assert same(pictures(zoomed)[0], NOISE.crop((10, 20, 60, 80)))
        assert same(pictures(turned)[0], NOISE.transpose(Image.Transpose.ROTATE_90))
        assert same(pictures(again)[0], NOISE.crop((92, 50, 120, 90)))
        assert [each.call.frame for each in (zoomed, turned, outside)] == [(120, 90)] * 3, "what boxes are told in"
        assert "outside of the image" in outside.call.error and "120 wide and 90 high" in text(outside)
        assert (outside.call.tool, outside.call.ran, outside.done, pictures(outside)) == ("zoom", True, False, [])
    (nothing,) = play(room, DeepEyesProtocol(), DeepEyesProtocol().write_call("rotate", {"angle": 1}), images=())
    assert "there is no image" in text(nothing)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(1)\n1/0", "Error: ZeroDivisionError: division by zero (line 2)"),
        ("def f(:\n  pass", "Error: SyntaxError"),
        ("\0\x01\udcff", "Error: "),
        (bytes(range(256)).decode("latin-1"), "Error: "),
        ("print(undefined)", "The images are called image_clue_0."),
        ("raise SystemExit(3)", "Error: SystemExit"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe caf\\xe9 \\xf0')", "\ufffd caf\ufffd"),
        ("raise ValueError('<|im_end|>\\ud800')", "Error: ValueError: <|im_end|>?"),
        ("print('x' * 10_000)", "characters"),
        ("Image.new('RGB', (1, 1)).show()", "image left out: "),
        ("Image.new('L', (20_000, 20_000)).show()", "image left out: "),
        ("Image.new('RGB', (3000, 28)).show()", "image left out: "),
        ("for _ in range(9): image_clue_0.show()", "only 5 images are returned per call"),
        ("open('bomb.png', 'wb').write(bytes(100)); print('bomb.png')", "image left out: "),
        ("import os; os._exit(3)", "ended its own interpreter"),
        ("b = bytearray(4 << 30)", "Error: "),
    ],
)
def test_what_goes_wrong_is_told_and_can_be_mended(room: Room, code: str, told: str) -> None:
    wrong, mended = run(room, code, "print(6 * 7, image_clue_0.size)")
    assert told in text(wrong) and not wrong.done
    assert (text(wrong) + wrong.call.error).encode(), "no half characters"
    assert "42 (120, 90)" in text(mended) and mended.call.error == ""


def test_a_reply_that_cannot_be_read_is_answered_without_a_box(room: Room) -> None:
    before = room.pool._next_box_id
    unread, unclosed = play(room, PyVisionProtocol(), "I think it is a cup. <|im_end|>", "<code>\n```python\nprint(1)")
    assert (unread.call.ran, unread.call.tool, unread.reward, unread.done) == (False, "", 0.0, False)
    assert "Error: there is neither" in text(unread) and "Error: <code> is not closed" in text(unclosed)
    assert room.pool._next_box_id == before, "no box was opened"


def test_a_call_that_runs_too_long_is_told_and_so_is_what_it_lost(room: Room) -> None:
    _, late, lost = run(room, "x = 1", "while True: pass", "print(x)")
    assert "the call ran longer than 3 s" in late.call.error
    assert "NameError" in lost.call.error and "started anew" in text(lost)


def test_two_episodes_and_only_the_slow_one_waits(room: Room) -> None:
    """The fast one has 10 calls, sampling pictures of the loop's own, while the slow one sleeps in one of 2 s."""

    async def episode(*codes: str) -> float:
        env = env_of(room, PyVisionProtocol(), Held(NOISE))
        await env.reset(0)
        for code in codes:
            assert not (await env.step(PyVisionProtocol().write_code(code))).call.error
        ended = time.monotonic()
        await env.close()
        return ended

    async def both() -> tuple[float, float]:
        return await asyncio.gather(episode("import time; time.sleep(2)"), episode(*["image_clue_0.show()"] * 10))

    slow, fast = room.do(both())
    assert fast < slow - 0.5


def test_a_box_killed_from_outside_is_ours(room: Room) -> None:
    async def killed() -> None:
        env = env_of(room, PyVisionProtocol(), Held(NOISE))
        await env.reset(0)
        await env.step(PyVisionProtocol().write_code("x = 1"))
        call = asyncio.create_task(env.step(PyVisionProtocol().write_code("import time; time.sleep(2.5)")))
        await asyncio.sleep(0.2)
        os.kill(env._box.interpreter.pid, signal.SIGKILL)
        try:
            await call
        finally:
            await env.close()

    with pytest.raises(InfraError, match="somebody on the host killed the box"):
        room.do(killed())
    assert "42" in text(run(room, "print(42)")[0])


def test_a_pool_that_closes_and_a_server_that_is_gone_are_ours() -> None:
    async def closed() -> None:
        async with SandboxPool(size=1, isolation="none") as pool:
            env = AgentEnv(Example(id="a", payload={"question": "?", "images": ()}), protocol=PyVisionProtocol(), pool=pool)
            await env.reset(0)
            call = asyncio.create_task(env.step(PyVisionProtocol().write_code("import time; time.sleep(5)")))
            await asyncio.sleep(0.5)
        await call

    async def gone() -> None:
        client = SandboxClient("http://127.0.0.1:9")
        client.limits = BoxLimits(call_timeout_s=1.0, open_timeout_s=1.0)
        env = AgentEnv(Example(id="a", payload={"question": "?", "images": ()}), protocol=PyVisionProtocol(), pool=client)
        await env.reset(0)
        try:
            await env.step(PyVisionProtocol().write_code("1"))
        finally:
            await client.close()

    for trouble in (closed, gone):
        with pytest.raises(InfraError, match="sandbox: "):
            asyncio.run(trouble())
