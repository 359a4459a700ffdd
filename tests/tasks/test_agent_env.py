"""Tests the environment of the agents with a scripted sandbox. tests/e2e/test_agent_env_run.py
tests it with the real one."""

import asyncio
from collections.abc import Sequence

import pytest
from PIL import Image

import megatron_rl_sandbox as sandbox
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.types import Example
from megatron_rl_sandbox.image_codec import encode_png
from tests.support.visual_python_episodes import DecodedImage

CROP = Image.new("RGB", (20, 10), "red")


class Box:
    """Pool and box at once. Each call returns as many images as the next number in `shows`."""

    def __init__(self, shows: Sequence[int]) -> None:
        self.shows, self.num_opened, self.num_calls = list(shows), 0, 0

    async def open(self, **given: object) -> "Box":
        self.num_opened += 1
        return self

    async def run(self, source: str) -> sandbox.CallResult:
        self.num_calls += 1
        shown = sandbox.ReturnedImage(png=encode_png(CROP), width=CROP.width, height=CROP.height, source="show")
        return sandbox.CallResult(id=self.num_calls, images=(shown,) * self.shows.pop(0))

    async def close(self) -> None:
        """No-op: nothing is held."""


@pytest.mark.parametrize("hidden", [False, True])
def test_pictures_are_numbered_on_through_an_episode(hidden: bool) -> None:
    """Names of images are numbered through an episode and never used twice: two images of the
    question, then 1, 0, 2 and 1 from code. Hidden images of the question have names of another
    kind, so the images from code start at 0."""
    protocol, box = PyVisionProtocol(shows_images=not hidden), Box([1, 0, 2, 1])

    async def episode() -> list[list[str]]:
        example = Example(id="row7", payload={"question": "What is it?", "images": (DecodedImage(CROP), DecodedImage(CROP))})
        env = AgentEnv(example, protocol=protocol, pool=box)
        await env.reset(0)
        steps = [await env.step(protocol.write_code("image_clue_0.show()")) for _ in range(4)]
        await env.close()
        texts = ["".join(part.get("text", "") for message in step.messages for part in message["content"]) for step in steps]
        return [[number for number in range(20) if f"<image_clue_{number}>" in text] for text in texts]

    first = 0 if hidden else 2
    assert asyncio.run(episode()) == [[first], [], [first + 1, first + 2], [first + 3]]
    assert (box.num_opened, box.num_calls) == (1, 4), "a box for all of an episode's calls"
