"""Images of questions: an invalid image raises an InfraError that names it, and decoding an image
does not block the event loop.
"""

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError
from megatron_rl.rollout.transcript_segments import extract_images
from megatron_rl.tasks.visual_python.codev import CodeVProtocol
from megatron_rl.tasks.visual_python.deepeyes import DeepEyesProtocol
from megatron_rl.tasks.visual_python.image_tools import IMAGE_TOOLS
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from tests.support.sandbox_pool import PoolRunner, start_pool
from tests.support.visual_python_episodes import NOISE, DecodedImage, extract_text, make_env, run_replies


@pytest.fixture(scope="module")
def room() -> Iterator[PoolRunner]:
    yield from start_pool(size=3)


def png(width: int, height: int) -> bytes:
    buffer = BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be opened"),
        (b"<html>not found</html>", "cannot be opened"),
        (png(640, 640)[:90], "cannot be opened"),
        (png(20_000, 20_000), "400000000 pixels"),
        (png(5000, 10), "5000x10 pixels"),
    ],
    ids=["empty", "html", "cut", "bomb", "strip"],
)
def test_a_bad_picture_of_the_data_set_is_ours_and_named(room: PoolRunner, tmp_path: Path, content: bytes, says: str) -> None:
    """An invalid or oversized image of the data set raises an InfraError that names its row."""
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for source in (content, path):
        env = make_env(room, PyVisionProtocol(), StoredImage(source, "train.parquet row 7: images[0]"))
        with pytest.raises(InfraError, match=f"example row7: train.parquet row 7.*{says}"):
            room.run_coroutine(env.reset(0))


def test_a_picture_of_one_pixel_is_a_picture(room: PoolRunner) -> None:
    """An image of 1 x 1 pixels is accepted as an input."""
    (step,) = run_replies(
        room, PyVisionProtocol(), PyVisionProtocol().write_code("print(image_clue_0.size)"), images=(StoredImage(png(1, 1), "row 0"),)
    )
    assert "(1, 1)" in extract_text(step)


def test_a_question_with_too_many_places_is_ours(room: PoolRunner) -> None:
    """A question with more image placeholders than images raises an InfraError."""
    env = make_env(room, PyVisionProtocol(), DecodedImage(NOISE), question="<image> or <image>?")
    with pytest.raises(InfraError, match="example row7: the question has 2 image placeholders .* 1 images"):
        room.run_coroutine(env.reset(0))


def test_a_file_name_that_no_box_takes_is_ours(room: PoolRunner) -> None:
    """An input file name that the sandbox rejects raises an InfraError, and no sandbox
    stays open.
    """
    with pytest.raises(InfraError, match=r"example row7: sandbox: '\.\./photo\.jpg' is not a valid file name"):
        run_replies(room, CodeVProtocol(("../photo.jpg",)), CodeVProtocol().write_code("1"))
    assert room.pool.num_open == 0


def test_decoding_does_not_stop_the_loop(room: PoolRunner) -> None:
    """The event loop keeps running while the slow image of another episode is decoded."""

    @dataclass(frozen=True)
    class Slow:
        then: Callable[[], Any]

        def open(self) -> Image.Image:
            time.sleep(0.5)
            return self.then()

    async def both() -> int:
        env = make_env(room, PyVisionProtocol(), Slow(lambda: NOISE))
        decoding = asyncio.create_task(env.reset(0))
        ticks = 0
        while not decoding.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await decoding
        return ticks

    assert room.run_coroutine(both()) > 10


@dataclass(frozen=True)
class Watched:
    """An image that is created when it is opened.

    Counts how many of the opened images are still alive.
    """

    opened: list[weakref.ref]

    def open(self) -> Image.Image:
        picture = NOISE.copy()
        self.opened.append(weakref.ref(picture))
        return picture

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.opened)


@pytest.mark.parametrize("protocol", [PyVisionProtocol(), DeepEyesProtocol()], ids=["code", "zoom"])
def test_an_original_is_held_by_nobody_between_its_uses(room: PoolRunner, protocol: ToolProtocol) -> None:
    """A full-size original image, which is larger than the policy's image, is referenced only by
    the prompt messages or while a tool or a sandbox uses it.
    """
    original = Watched([])
    env = make_env(room, protocol, original)
    messages = room.run_coroutine(env.reset(0))
    assert original.num_alive == 1 and len(messages) == 2
    del messages
    assert original.num_alive == 0
    if isinstance(protocol, PyVisionProtocol):
        reply, expected = protocol.write_code("image_clue_0.crop((10, 20, 60, 60)).show()"), NOISE.crop((10, 20, 60, 60))
    else:
        box = {"bbox_2d": [10, 20, 60, 60]}
        reply, expected = protocol.write_call("zoom", box), IMAGE_TOOLS["zoom"].apply(NOISE, box)
    for _ in range(2):
        step = room.run_coroutine(env.step(reply))
        (shown,) = extract_images(step.messages)
        assert shown.tobytes() == expected.tobytes()
    assert original.num_alive == 0 and len(original.opened) == (2 if isinstance(protocol, PyVisionProtocol) else 3)
    room.run_coroutine(env.close())
