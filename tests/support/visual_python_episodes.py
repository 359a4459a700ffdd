"""Helpers of the tests of the tool-use environment: episodes with given responses in a sandbox
pool, and their observations.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from megatron_rl.rollout.task import Step
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example
from tests.support.sandbox_pool import PoolRunner

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))


@dataclass(frozen=True)
class DecodedImage:
    """An image that is already decoded."""

    image: Image.Image

    def open(self) -> Image.Image:
        return self.image


def make_env(runner: PoolRunner, protocol: ToolProtocol, *images: object, question: str = "What is it?") -> AgentEnv:
    example = Example(id="row7", payload={"question": question, "images": images})
    return AgentEnv(example, protocol=protocol, pool=runner.pool)


def run_replies(
    runner: PoolRunner, protocol: ToolProtocol, *replies: str, images: tuple[object, ...] = (DecodedImage(NOISE),)
) -> list[Step]:
    """Run an episode with these responses and return its steps."""

    async def episode() -> list[Step]:
        env = make_env(runner, protocol, *images)
        try:
            await env.reset(0)
            return [await env.step(reply) for reply in replies]
        finally:
            await env.close()

    steps = runner.run_coroutine(episode())
    assert runner.pool.num_open == 0
    return steps


def run_codes(runner: PoolRunner, *codes: str, protocol: ToolProtocol | None = None) -> list[Step]:
    protocol = protocol or PyVisionProtocol()
    return run_replies(runner, protocol, *map(protocol.write_code, codes))


def extract_images(step: Step) -> list[Image.Image]:
    return [part["image"] for message in step.messages for part in message["content"] if part["type"] == "image"]


def extract_text(step: Step) -> str:
    return "".join(part["text"] for message in step.messages for part in message["content"] if part["type"] == "text")


def are_same_image(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one.convert("RGB")), np.asarray(other.convert("RGB")))
