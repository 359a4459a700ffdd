"""Train an agent that looks at pictures with Python, which runs in the sandbox.

    python launch/launch.py --nproc_per_node 2 examples/tool_agent.py stage=sft
    python launch/launch.py --nproc_per_node 2 examples/tool_agent.py

A picture of 1400 x 1400 pixels has a dot of 12 pixels in the middle. The policy sees the picture at
140 x 140 pixels, where the dot is nearly invisible. Code that crops the picture returns the crop as
a new image, in which the color is easy to see.

The first command teaches the format: half of the demonstrations crop, half guess. The second one
trains with GRPO. Expect `return` and the metric rollout/tool_use to rise.
"""

import random
import sys
from pathlib import Path

from PIL import Image

from megatron_rl.cli import cli
from megatron_rl.config import TaskSettings
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.visual_python.env import AgentEnv
from megatron_rl.tasks.visual_python.message_parts import make_message
from megatron_rl.tasks.visual_python.pyvision import PyVisionProtocol
from megatron_rl.tasks.visual_python.task import make_sandbox, start_sandbox
from megatron_rl.types import Demonstration, Example, ToolCall

RUNS = "runs/examples/tool_agent"
SIZES = ["model.min_pixels=19600", "model.max_pixels=20000", "task=dot", "task.reward=right", "task.max_turns=3", "task.max_new_tokens=80"]
SFT = [
    "model.path=runs/quickstart/nano",
    f"run.dir={RUNS}/sft",
    "sft.splits=[train]",
    "sft.steps=[120]",
    "sft.batch_size=32",
    "optim.lr=2e-3",
]
RL = [
    f"model.path={RUNS}/sft/final",
    f"run.dir={RUNS}/grpo",
    "run.steps=20",
    "optim.lr=2e-4",
    "batch.prompts_per_step=16",
    "batch.group_size=8",
]
COLORS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "black": (0, 0, 0)}
CODE = "image_clue_0.crop((680, 680, 720, 720)).show()"


def right(reply: str, answer: str) -> float:
    """Return 1 if the last response gives the answer."""
    return float(f"\\boxed{{{answer}}}" in reply)


class Dot:
    """A picture that is drawn when it is opened."""

    def __init__(self, color: str) -> None:
        self.color = color

    def open(self) -> Image.Image:
        """Return a new picture with the dot in the middle."""
        picture = Image.new("RGB", (1400, 1400), "white")
        picture.paste(COLORS[self.color], (694, 694, 706, 706))
        return picture


class DotTask(Task):
    """Asks for the color of the dot."""

    runs_code = True
    protocol = PyVisionProtocol(rules="Look, then answer.")
    stop = protocol.stop

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.pool = make_sandbox(settings.sandbox)

    async def start(self) -> None:
        """Start the sandbox pool."""
        await start_sandbox(self.pool, self.settings.sandbox)

    async def close(self) -> None:
        """Close the sandbox pool."""
        await self.pool.close()

    def examples(self, split: str) -> list[Example]:
        """Return one example for each color; both splits are the same."""
        question = {"question": "What color is the dot?", "videos": ()}
        return [Example(id=color, payload={**question, "answer": color, "images": (Dot(color),)}) for color in COLORS]

    def env(self, example: Example) -> AgentEnv:
        """Return the environment that parses responses and runs their code."""
        return AgentEnv(example, protocol=self.protocol, pool=self.pool)

    def demonstrations(self, split: str, *, num: int, seed: int) -> list[Demonstration]:
        """Return transcripts that crop and answer, or guess without a look, half of each."""
        dice = random.Random(seed)
        return [self.demonstrate(dice.choice([*COLORS]), guess=dice.choice([*COLORS]) if dice.random() < 0.5 else "") for _ in range(num)]

    def demonstrate(self, color: str, *, guess: str) -> Demonstration:
        """Return one transcript; it crops the picture if there is no guess."""
        picture = Dot(color).open()
        messages = self.protocol.write_prompt("What color is the dot?", [picture])
        if not guess:
            crop = picture.crop((680, 680, 720, 720))
            messages.append(make_message("assistant", self.protocol.write_code(CODE)))
            messages += self.protocol.write_observation(ToolCall(tool="python", source=CODE), [crop], num_previous_images=1)
        return Demonstration([*messages, make_message("assistant", self.protocol.write_answer(guess or color))])


if __name__ == "__main__":
    defaults = [*SIZES, *(SFT if "stage=sft" in sys.argv else RL)]
    model = Path(next(word for word in reversed([*defaults, *sys.argv]) if word.startswith("model.path=")).partition("=")[2])
    if not model.exists():
        before = "bash launch/quickstart.sh" if "stage=sft" in sys.argv else "the first command of this file"
        sys.exit(f"error: model.path={model}: no such folder; {before} creates it")
    sys.argv[1:1] = defaults
    cli(tasks={"dot": DotTask}, rewards={"right": right})
