"""Random tool-use episodes with junk in the questions, the observations and the image sizes, in the
syntax of any tool protocol.

The episode, its renderer and its limits are the real ones. Only the environment is fake, and the
policy if a test wants that.
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
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
SIDES = (1, 5, 28, 40, 57, 84, 111, 200, 420)


@cache
def make_pictures() -> list[Pillow.Image]:
    """Return 200 images of block noise in the modes that a sandbox returns.

    No side is more than 100 times the other.
    """
    draw = random.Random(0)
    made = []
    for seed in range(200):
        width, height = draw.choice(SIDES), draw.choice(SIDES)
        blocks = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
        resized = Pillow.fromarray(blocks).resize((min(width, 100 * height), min(height, 100 * width)))
        made.append(resized.convert(draw.choice(["RGB", "RGB", "L", "RGBA"])))
    return made


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(8)))


async def zero_reward(outcome: RewardInput) -> float:
    return 0.0


@dataclass
class RandomEnv(Env):
    """An environment that records its messages: the prompt first, then one observation per turn."""

    rng: random.Random
    protocol: ToolProtocol
    sent_messages: list[list[Message]] = field(default_factory=list)
    num_images: int = 0

    async def reset(self, seed: int) -> list[Message]:
        shown = [self.rng.choice(make_pictures()) for _ in range(self.rng.randrange(3))]
        question = random_text(self.rng) + "".join(f"<image>{random_text(self.rng)}" for _ in shown) * self.rng.randrange(2)
        return self._record(self.protocol.write_prompt(question, shown))

    async def step(self, text: str) -> Step:
        shown = [self.rng.choice(make_pictures()) for _ in range(self.rng.choice([0, 0, 1, 1, 2]))]
        call = ToolCall(tool="python", source=text, text=random_text(self.rng))
        observation = self._record(self.protocol.write_observation(call, shown, num_previous_images=self.num_images))
        done = self.rng.random() < 0.25
        return Step(messages=[] if done else observation, reward=0.0, done=done, tool_call=call)

    async def close(self) -> None:
        pass

    def _record(self, messages: list[Message]) -> list[Message]:
        self.sent_messages.append(messages)
        self.num_images += sum(part["type"] == "image" for message in messages for part in message["content"])
        return messages


@dataclass
class RandomTask:
    random_env: RandomEnv
    rubric: Rubric = field(default_factory=lambda: Rubric(terms={"nothing": RewardTerm(zero_reward)}))
    name: str = "random"

    @property
    def stop(self) -> Sequence[str]:
        return self.random_env.protocol.stop

    def env(self, example: Example) -> RandomEnv:
        return self.random_env


@dataclass
class RandomPolicy:
    """An engine that generates junk: tokenized text or token ids that no tokenizer would produce,
    either finished or cut off.
    """

    renderer: Renderer
    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    prompt_images: list[list[Image]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    weight_version: int = 0

    def __post_init__(self) -> None:
        never = {*self.renderer.banned_ids, self.renderer.end_id}
        self.allowed = [token for token in range(len(self.renderer.tokenizer)) if token not in never]

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        self.prompts.append(list(token_ids))
        self.prompt_images.append(list(images))
        renderer, draw = self.renderer, self.rng
        text = random_text(draw)
        for name in VISION_TOKENS:
            text = text.replace(name, "")
        ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"] if draw.random() < 0.6 else draw.choices(self.allowed, k=9)
        ids = [token for token in ids if token != renderer.end_id][: sampling.max_tokens - 1]
        finished = draw.random() < 0.7 or not ids
        ids = [*ids, renderer.end_id] if finished else ids
        self.replies.append(ids)
        return Completion(ids, [-1.0 - number for number in range(len(ids))], is_stopped=finished, weight_versions=[0] * len(ids))


def make_episode(seed: int, *, renderer: Renderer, engine: InferenceEngine, protocol: ToolProtocol, settings: EpisodeSettings) -> tuple:
    """Return the coroutine of one random episode and its environment."""
    world = RandomEnv(random.Random(seed), protocol)
    task, example = RandomTask(world), Example(id=str(seed), payload={})
    conversation = TokenConversation(engine, renderer, settings)
    return run_episode(task, example, conversation=conversation, settings=settings, group=seed, sample_index=0), world


def run_random_episode(seed: int, **how: object) -> tuple[Rollout, RandomEnv]:
    episode, world = make_episode(seed, **how)
    return asyncio.run(episode), world


def render_chatml(messages: list[Message], images: list[Image], *, special_tokens: Sequence[str]) -> str:
    """Render messages in ChatML independently of the renderer, up to the assistant's turn. Removes
    the images of the messages from the front of the list.

    The names of special tokens get a space after their first character. Text is in Unicode normal
    form C, as Qwen's tokenizer produces it.
    """
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        for part in message["content"]:
            if part["type"] == "image":
                text += f"<|vision_start|>{'<|image_pad|>' * images.pop(0).num_tokens}<|vision_end|>"
                continue
            spelled = part["text"]
            for name in special_tokens:
                spelled = spelled.replace(name, f"< {name[1:]}")
            text += unicodedata.normalize("NFC", spelled)
        text += "<|im_end|>\n"
    return f"{text}<|im_start|>assistant\n"
