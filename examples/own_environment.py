"""Train in your own environment, which shows the policy pictures.

    python launch/launch.py --nproc_per_node 2 examples/own_environment.py

A gauge has six levels. The bar is blue up to the level or the mark, whichever is lower. What is
missing to the mark is gray, what is too much is red. The policy raises or lowers the level by one
in each turn and sees a new picture, until the level is at the mark. A move toward the mark earns
1 / (distance at the start), so the best episode earns 1. Any other move, and an invalid response,
costs as much.

The quickstart's warm start answers in the right format but has never seen a gauge. Expect `return`
to rise from below 0 toward 1.
"""

import re
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from megatron_rl.cli import cli
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.types import Example, Message

MODEL = "runs/quickstart/sft/final"
DEFAULTS = [
    "experiment=numberline_grpo_cpu",
    f"model.path={MODEL}",
    "task=gauge",
    "task.max_turns=6",
    "task.max_new_tokens=48",
    "batch.prompts_per_step=16",
    "run.dir=runs/examples/own_environment",
    "run.steps=40",
]
PROMPT = 'Move the level to the mark. Answer with one JSON object: {"thoughts": text, "action": "-" or "+"}'


def draw_gauge(level: int, mark: int) -> Image.Image:
    """Return the picture of a gauge, 140 x 140 pixels."""
    picture = Image.new("RGB", (140, 140), "white")
    pen = ImageDraw.Draw(picture)
    low, high = sorted((level, mark))
    pen.rectangle((40, 130 - 24 * high, 100, 139), fill="red" if level > mark else "gray")
    pen.rectangle((40, 130 - 24 * low, 100, 139), fill="blue")
    return picture


class Gauge(Env):
    """One episode, which begins at a level and ends at the mark."""

    def __init__(self, level: int, mark: int) -> None:
        self.level, self.mark, self.distance = level, mark, abs(level - mark)

    def observe(self) -> list[Message]:
        """Return the user message with the picture of the current level."""
        parts = [{"type": "image", "image": draw_gauge(self.level, self.mark)}, {"type": "text", "text": PROMPT}]
        return [{"role": "user", "content": parts}]

    async def reset(self, seed: int) -> list[Message]:
        """Return the first prompt."""
        return self.observe()

    async def step(self, text: str) -> Step:
        """Move the level by the last action in the response."""
        actions = re.findall(r'"action": "([+-])"', text)
        before = abs(self.level - self.mark)
        if actions:
            self.level = min(max(self.level + (1 if actions[-1] == "+" else -1), 0), 5)
        after = abs(self.level - self.mark)
        reward = (1 if after < before else -1) / self.distance
        return Step(messages=self.observe() if after else [], reward=reward, done=after == 0, is_new_prompt=True)


class GaugeTask(Task):
    """Starts at which the level is not at the mark."""

    appends_to_sequence = False

    def examples(self, split: str) -> list[Example]:
        """Return one example for each level and mark; both splits are the same."""
        return [Example(id=f"{level}{mark}", payload={}) for level in range(6) for mark in range(6) if level != mark]

    def env(self, example: Example) -> Gauge:
        """Return a new environment."""
        return Gauge(*map(int, example.id))


if __name__ == "__main__":
    if not any(word.startswith("model.path=") for word in sys.argv) and not Path(MODEL).exists():
        sys.exit(f"error: model.path={MODEL}: no such folder; bash launch/quickstart.sh creates it")
    sys.argv[1:1] = DEFAULTS
    cli(tasks={"gauge": GaugeTask})
