"""Runs ALFWorld episodes without an engine; the test provides the responses."""

from pathlib import Path

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.config.task_options import AlfworldOptions
from megatron_rl.rollout.task import Step
from megatron_rl.tasks.alfworld.task import AlfworldTask
from megatron_rl.types import Example, Message


def make_task(games: Path, **options: object) -> AlfworldTask:
    data = DataSettings(train=[str(games / "train")], eval=[str(games / "eval")])
    return AlfworldTask(TaskSettings(name="alfworld", max_turns=50, data=data, options=AlfworldOptions(**options)))


async def run_replies(task: AlfworldTask, example: Example, replies: list[str], seed: int = 0) -> tuple[Message, list[Step]]:
    env = task.env(example)
    try:
        (first,) = await env.reset(seed)
        return first, [await env.step(text) for text in replies]
    finally:
        await env.close()


def extract_text(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")
