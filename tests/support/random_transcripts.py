"""Random episodes of agents: junk in the questions, the observations and the pictures' sizes, in the words of any tool protocol.

The episode, its renderer and its limits are the real ones; only the world is made up, and where a test wants it so, what the policy says.
"""

import asyncio
import random
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from PIL import Image as Pillow

from megatron_rl.rewards.rubric import RewardInput, RewardTerm, Rubric
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.engine import Completion, InferenceEngine, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.visual_python.codev import CodeVProtocol
from megatron_rl.tasks.visual_python.deepeyes import DeepEyesProtocol
from megatron_rl.tasks.visual_python.function_tools import FunctionsProtocol
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.tool_protocol import ToolProtocol
from megatron_rl.types import Example, Image, Message, Rollout, ToolCall

PROTOCOLS: tuple[ToolProtocol, ...] = (PyVisionProtocol(), CodeVProtocol(), DeepEyesProtocol(), FunctionsProtocol())
PIECES = [
    "<code>", "</code>", "<answer>\n\\boxed{7}\n</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "<sandbox_output>",
    "```python", "<|im_start|>assistant\n", "<|im_end|>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|endoftext|>",
    "<|", "|>", "system\n", "user\n", " ", "\n\n", "x = 1", "9" * 30, "caf\u00e9", "cafe\u0301", "\u732b\u3068\u72ac", "\U0001f600",
    "\u200f", "\0", "\x1b[0m",
]  # fmt: skip
VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
SIDES = (1, 5, 28, 40, 57, 84, 111, 200, 420)


@cache
def pictures() -> list[Pillow.Image]:
    """200 of them, of noise in blocks, no side over 100 times the other; the modes that a sandbox returns."""
    draw = random.Random(0)
    made = []
    for seed in range(200):
        width, height = draw.choice(SIDES), draw.choice(SIDES)
        blocks = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
        resized = Pillow.fromarray(blocks).resize((min(width, 100 * height), min(height, 100 * width)))
        made.append(resized.convert(draw.choice(["RGB", "RGB", "L", "RGBA"])))
    return made


def junk(draw: random.Random) -> str:
    return "".join(draw.choice(PIECES) for _ in range(draw.randrange(8)))


async def nothing(outcome: RewardInput) -> float:
    return 0.0


@dataclass
class RandomWorld(Env):
    """An environment that remembers what it said: the prompt first, then one observation a turn."""

    draw: random.Random
    protocol: ToolProtocol
    said: list[list[Message]] = field(default_factory=list)
    num_shown: int = 0

    async def reset(self, seed: int) -> list[Message]:
        shown = [self.draw.choice(pictures()) for _ in range(self.draw.randrange(3))]
        question = junk(self.draw) + "".join(f"<image>{junk(self.draw)}" for _ in shown) * self.draw.randrange(2)
        return self._say(self.protocol.write_prompt(question, shown))

    async def step(self, text: str) -> Step:
        shown = [self.draw.choice(pictures()) for _ in range(self.draw.choice([0, 0, 1, 1, 2]))]
        call = ToolCall(tool="python", source=text, text=junk(self.draw))
        observation = self._say(self.protocol.write_observation(call, shown, num_previous_images=self.num_shown))
        done = self.draw.random() < 0.25
        return Step(messages=[] if done else observation, reward=0.0, done=done, call=call)

    async def close(self) -> None:
        pass

    def _say(self, messages: list[Message]) -> list[Message]:
        self.said.append(messages)
        self.num_shown += sum(part["type"] == "image" for message in messages for part in message["content"])
        return messages


@dataclass
class RandomTask:
    world: RandomWorld
    rubric: Rubric = field(default_factory=lambda: Rubric(terms={"nothing": RewardTerm(nothing)}))
    name: str = "random"

    @property
    def stop(self) -> Sequence[str]:
        return self.world.protocol.stop

    def env(self, example: Example) -> RandomWorld:
        return self.world


@dataclass
class RandomPolicy:
    """An engine that says junk: text as the tokenizer cuts it, or ids as no tokenizer would; ended, or cut off."""

    renderer: Renderer
    draw: random.Random
    asked: list[list[int]] = field(default_factory=list)
    shown: list[list[Image]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    weight_version: int = 0

    def __post_init__(self) -> None:
        never = {*self.renderer.banned_ids, self.renderer.end_id}
        self.allowed = [token for token in range(len(self.renderer.tokenizer)) if token not in never]

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.asked.append(list(token_ids))
        self.shown.append(list(images))
        renderer, draw = self.renderer, self.draw
        text = junk(draw)
        for name in VISION:
            text = text.replace(name, "")
        ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"] if draw.random() < 0.6 else draw.choices(self.allowed, k=9)
        ids = [token for token in ids if token != renderer.end_id][: sampling.max_tokens - 1]
        finished = draw.random() < 0.7 or not ids
        ids = [*ids, renderer.end_id] if finished else ids
        self.said.append(ids)
        return Completion(ids, [-1.0 - number for number in range(len(ids))], finish_reason=finished, versions=[0] * len(ids))


def play(seed: int, *, renderer: Renderer, engine: InferenceEngine, protocol: ToolProtocol, settings: EpisodeSettings) -> tuple:
    """The rollout of one random episode as a coroutine's parts: (coroutine, its world)."""
    world = RandomWorld(random.Random(seed), protocol)
    task, example = RandomTask(world), Example(id=str(seed), payload={})
    conversation = TokenConversation(engine, renderer, settings)
    return run_episode(task, example, conversation=conversation, settings=settings, group=seed, sample=0), world


def play_alone(seed: int, **how: object) -> tuple[Rollout, RandomWorld]:
    episode, world = play(seed, **how)
    return asyncio.run(episode), world


def written(messages: list[Message], images: list[Image], *, names: Sequence[str]) -> str:
    """Messages in ChatML by hand, ready for the assistant to speak; takes as many images as they hold off the front of the list.

    The names of special tokens have a blank behind their first character; text is in Unicode's normal form C, as Qwen's tokenizer makes it.
    """
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        for part in message["content"]:
            if part["type"] == "image":
                text += f"<|vision_start|>{'<|image_pad|>' * images.pop(0).num_tokens}<|vision_end|>"
                continue
            spelled = part["text"]
            for name in names:
                spelled = spelled.replace(name, f"< {name[1:]}")
            text += unicodedata.normalize("NFC", spelled)
        text += "<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"
