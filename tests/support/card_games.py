"""Runs episodes of the card games with given responses."""

import asyncio

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import TASK_OPTIONS
from megatron_rl.registry import build_task
from megatron_rl.rollout.task import Step, Task
from megatron_rl.types import Example, Message

SMALL_OPTIONS = {"points24": {"train_hands": 200, "eval_hands": 100}, "blackjack": {"train_hands": 200, "eval_drawings": 1}}


def build_card_task(name: str, **options: object) -> Task:
    return build_task(TaskSettings(name=name, max_turns=7, options=TASK_OPTIONS[name](**{**SMALL_OPTIONS.get(name, {}), **options})))


def image_and_text(message: Message) -> tuple[bytes, str]:
    """Return the policy's input in a message: the image's bytes and the text."""
    image, text = message["content"]
    return image["image"].tobytes(), text["text"]


def play_replies(task: Task, example: Example, replies: list[str], seed: int = 0) -> list[Step]:
    """Run an episode and return its steps. Only the last one may end the episode."""

    async def episode() -> list[Step]:
        env = task.env(example)
        (first,) = await env.reset(seed)
        assert [part["type"] for part in first["content"]] == ["image", "text"]
        return [await env.step(text) for text in replies]

    steps = asyncio.run(episode())
    assert not any(step.done for step in steps[:-1])
    return steps
