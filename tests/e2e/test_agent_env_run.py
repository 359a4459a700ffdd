"""The tool-use environment with a real sandbox: observations, errors that the policy can correct,
infrastructure errors, and concurrency with slow calls.
"""

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
from megatron_rl_sandbox import BoxLimits, SandboxPool
from megatron_rl_sandbox.sandbox_client import SandboxClient
from tests.support.sandbox_pool import PoolRunner, start_pool
from tests.support.visual_python_episodes import (
    NOISE,
    DecodedImage,
    are_same_image,
    extract_images,
    extract_text,
    make_env,
    run_codes,
    run_replies,
)

CALL_S = 3.0


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(BoxLimits(call_timeout_s=CALL_S, text=2000), size=3)


@pytest.mark.parametrize("protocol", [PyVisionProtocol(), CodeVProtocol(), FunctionsProtocol()], ids=lambda protocol: protocol.name)
def test_variables_live_from_turn_to_turn_and_an_answer_ends_it(room: PoolRunner, protocol: ToolProtocol) -> None:
    """Variables and functions defined in one turn exist in the next one, and an answer ends the
    episode.
    """
    codes = [protocol.write_code(code) for code in ("x = [1]\ndef f(): return sum(x)", "x.append(41); print(f(), np.pi > 3)")]
    defined, printed, answered = run_replies(room, protocol, *codes, protocol.write_answer("42"))
    assert "gave nothing back" in extract_text(defined) and not defined.done
    assert printed.tool_call.text == "42 True" and "42 True" in extract_text(printed)
    assert (printed.tool_call.tool, printed.tool_call.ran, printed.tool_call.error) == ("python", True, "")
    assert (answered.done, answered.messages, answered.tool_call) == (True, [], None)
    assert [step.reward for step in (defined, printed, answered)] == [0.0] * 3


def test_crops_and_figures_come_back_numbered_on(room: PoolRunner) -> None:
    """Images that code displays are returned, and their numbers continue after the question's
    image.
    """
    crop, figure, both = run_codes(
        room,
        "image_clue_0.crop((10, 20, 60, 80)).show()",
        "plt.figure(figsize=(2, 1), dpi=100); plt.imshow(image_clue_0); plt.show()",
        "for k in range(2): image_clue_0.crop((k, 0, k + 40, 40)).show()",
    )
    assert are_same_image(extract_images(crop)[0], NOISE.crop((10, 20, 60, 80)))
    assert [picture.size for picture in extract_images(figure)] == [(200, 100)]
    assert all(are_same_image(shown, NOISE.crop((k, 0, k + 40, 40))) for k, shown in enumerate(extract_images(both)))
    numbers = [[k for k in range(9) if f"<image_clue_{k}>" in extract_text(step)] for step in (crop, figure, both)]
    assert numbers == [[1], [2], [3, 4]], "image_clue_0 is the question's"


def test_pictures_that_are_hidden_are_only_in_the_code(room: PoolRunner) -> None:
    """A hidden image is not part of the prompt, but code can display it."""
    protocol = PyVisionProtocol(shows_images=False)

    async def episode() -> tuple[list, Step]:
        env = make_env(room, protocol, DecodedImage(NOISE))
        prompt = await env.reset(0)
        step = await env.step(protocol.write_code("image_hint_0.show()"))
        await env.close()
        return prompt, step

    prompt, step = room.run_coroutine(episode())
    assert not any(part["type"] == "image" for message in prompt for part in message["content"])
    assert are_same_image(extract_images(step)[0], NOISE) and "<image_clue_0>" in extract_text(step)


def test_codev_works_on_files_by_name(room: PoolRunner) -> None:
    """CodeV code reads and writes image files by name. It cannot overwrite the input image."""
    protocol = CodeVProtocol(("photo.jpg",))
    code = "from PIL import Image\nImage.open('photo.jpg').crop((0, 0, 50, 50)).save('part.png')\nprint('part.png')"
    saved, missing, over = run_codes(room, code, "Image.open('foto.jpg')", "Image.new('RGB', (9, 9)).save('photo.jpg')", protocol=protocol)
    assert are_same_image(extract_images(saved)[0], NOISE.crop((0, 0, 50, 50)))
    assert "FileNotFoundError" in missing.tool_call.error and "The images are called photo.jpg." in extract_text(missing)
    assert over.tool_call.error, "the input cannot be written over"


def test_zoom_and_rotate_act_on_the_original(room: PoolRunner) -> None:
    """Zoom and rotate calls return crops and rotations of the original image, computed by Pillow as
    the oracle. A box outside of the image is an error that states the image's size.
    """
    for protocol in (DeepEyesProtocol(), FunctionsProtocol()):
        zoomed, turned, again, outside = run_replies(
            room, protocol,
            protocol.write_call("zoom", {"bbox_2d": [10, 20, 60, 80], "label": "noise"}),
            protocol.write_call("rotate", {"angle": 90}),
            protocol.write_call("zoom", {"bbox_2d": [100, 50, 500, 500]}),
            protocol.write_call("zoom", {"bbox_2d": [500, 500, 600, 600]}),
        )  # fmt: skip
        assert are_same_image(extract_images(zoomed)[0], NOISE.crop((10, 20, 60, 80)))
        assert are_same_image(extract_images(turned)[0], NOISE.transpose(Image.Transpose.ROTATE_90))
        assert are_same_image(extract_images(again)[0], NOISE.crop((92, 50, 120, 90)))
        assert [each.tool_call.frame for each in (zoomed, turned, outside)] == [(120, 90)] * 3, "what boxes are told in"
        assert "outside of the image" in outside.tool_call.error and "120 wide and 90 high" in extract_text(outside)
        assert (outside.tool_call.tool, outside.tool_call.ran, outside.done, extract_images(outside)) == ("zoom", True, False, [])
    (nothing,) = run_replies(room, DeepEyesProtocol(), DeepEyesProtocol().write_call("rotate", {"angle": 1}), images=())
    assert "there is no image" in extract_text(nothing)


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
def test_what_goes_wrong_is_told_and_can_be_mended(room: PoolRunner, code: str, told: str) -> None:
    """Faulty code returns an observation with the error, does not end the episode, and does not
    affect the next call.
    """
    wrong, mended = run_codes(room, code, "print(6 * 7, image_clue_0.size)")
    assert told in extract_text(wrong) and not wrong.done
    assert (extract_text(wrong) + wrong.tool_call.error).encode(), "no half characters"
    assert "42 (120, 90)" in extract_text(mended) and mended.tool_call.error == ""


def test_a_reply_that_cannot_be_read_is_answered_without_a_box(room: PoolRunner) -> None:
    """A response without a valid code block gets an error observation, and no sandbox is opened."""
    before = room.pool._next_box_id
    unread, unclosed = run_replies(room, PyVisionProtocol(), "I think it is a cup. <|im_end|>", "<code>\n```python\nprint(1)")
    assert (unread.tool_call.ran, unread.tool_call.tool, unread.reward, unread.done) == (False, "", 0.0, False)
    assert "Error: there is neither" in extract_text(unread) and "Error: <code> is not closed" in extract_text(unclosed)
    assert room.pool._next_box_id == before, "no box was opened"


def test_a_call_that_runs_too_long_is_told_and_so_is_what_it_lost(room: PoolRunner) -> None:
    """A call over the time limit returns an error.

    The next observation reports that the interpreter was restarted and its variables are lost.
    """
    _, late, lost = run_codes(room, "x = 1", "while True: pass", "print(x)")
    assert "the call ran longer than 3 s" in late.tool_call.error
    assert "NameError" in lost.tool_call.error and "started anew" in extract_text(lost)


def test_two_episodes_and_only_the_slow_one_waits(room: PoolRunner) -> None:
    """While one episode sleeps for 2 s in its only call, a second episode runs 10 calls that return
    images and ends at least 0.5 s earlier.
    """

    async def episode(*codes: str) -> float:
        env = make_env(room, PyVisionProtocol(), DecodedImage(NOISE))
        await env.reset(0)
        for code in codes:
            assert not (await env.step(PyVisionProtocol().write_code(code))).tool_call.error
        ended = time.monotonic()
        await env.close()
        return ended

    async def both() -> tuple[float, float]:
        return await asyncio.gather(episode("import time; time.sleep(2)"), episode(*["image_clue_0.show()"] * 10))

    slow, fast = room.run_coroutine(both())
    assert fast < slow - 0.5


@pytest.mark.known_failure("sandbox-failure-is-an-answer")
def test_a_box_killed_from_outside_is_ours(room: PoolRunner) -> None:
    """A sandbox killed by another process raises an InfraError, and the pool can still run code."""

    async def killed() -> None:
        env = make_env(room, PyVisionProtocol(), DecodedImage(NOISE))
        await env.reset(0)
        await env.step(PyVisionProtocol().write_code("x = 1"))
        call = asyncio.create_task(env.step(PyVisionProtocol().write_code("import time; time.sleep(2.5)")))
        await asyncio.sleep(0.2)
        os.kill(env._box.interpreter.pid, signal.SIGKILL)
        try:
            await call
        finally:
            await env.close()

    with pytest.raises(InfraError, match="the box was killed from outside"):
        room.run_coroutine(killed())
    assert "42" in extract_text(run_codes(room, "print(42)")[0])


def test_a_pool_that_closes_and_a_server_that_is_gone_are_ours() -> None:
    """A pool that closes during a call and an unreachable sandbox server both raise an
    InfraError.
    """

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
