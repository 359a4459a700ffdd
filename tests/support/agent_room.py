"""Shared by the tests of the agents' environment: episodes of given replies in a pool, and what came back."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from megatron_rl.rollout.task import Step
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example
from tests.support.sandbox_room import Room

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))


@dataclass(frozen=True)
class Held:
    """A picture that is decoded already."""

    picture: Image.Image

    def open(self) -> Image.Image:
        return self.picture


def env_of(room: Room, protocol: ToolProtocol, *images: object, question: str = "What is it?") -> AgentEnv:
    example = Example(id="row7", payload={"question": question, "images": images})
    return AgentEnv(example, protocol=protocol, pool=room.pool)


def play(room: Room, protocol: ToolProtocol, *replies: str, images: tuple[object, ...] = (Held(NOISE),)) -> list[Step]:
    """The steps of one episode."""

    async def episode() -> list[Step]:
        env = env_of(room, protocol, *images)
        try:
            await env.reset(0)
            return [await env.step(reply) for reply in replies]
        finally:
            await env.close()

    steps = room.do(episode())
    assert room.pool.num_open == 0
    return steps


def run(room: Room, *codes: str, protocol: ToolProtocol | None = None) -> list[Step]:
    protocol = protocol or PyVisionProtocol()
    return play(room, protocol, *map(protocol.write_code, codes))


def pictures(step: Step) -> list[Image.Image]:
    return [part["image"] for message in step.messages for part in message["content"] if part["type"] == "image"]


def text(step: Step) -> str:
    return "".join(part["text"] for message in step.messages for part in message["content"] if part["type"] == "text")


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one.convert("RGB")), np.asarray(other.convert("RGB")))
