"""Starts the agent of an episode with the question and the keys that it needs."""

import asyncio
import base64
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.data.records import IMAGE_PLACEHOLDER
from megatron_rl.tasks.agent.agent_process import Agent, AgentProcess, AgentService, inherited_environment
from megatron_rl.tasks.agent.agent_sandbox import AgentSandbox
from megatron_rl.types import Example
from megatron_rl_sandbox.command import WORK_DIR

EXAMPLE_FILE = "example.json"
"""File in the agent's folder: a JSON object with the fields id, question, system (the question's
system message, or an empty string) and images (paths of PNG files, in order).
"""
REWARD_KEY_VARIABLE = "MEGATRON_RL_REWARD_KEY"


@dataclass(slots=True, frozen=True)
class AgentLaunch:
    """Command or service that runs the agents of a task; one of `command` and `url` is empty."""

    command: Sequence[str] = ()
    """Program and arguments."""
    url: str = ""
    """Address of a service."""
    posts_reward: bool = False
    """True if the agent receives a key with which the reward is posted."""
    trains_abandoned: bool = True
    """False if abandoned responses have no loss (AgentOptions.train_abandoned)."""
    sandbox: AgentSandbox | None = None
    """Sandbox of the command; None if it runs with the rights of the run."""


async def start_agent(launch: AgentLaunch, example: Example, *, base_url: str, keys: Sequence[str], seed: int) -> Agent:
    """Start an agent.

    Args:
        launch: Command or service.
        example: Question.
        base_url: Address of the chat completions.
        keys: Key for requests, and the key that posts the reward if there is one.
        seed: Number for the agent's own random choices.
    """
    if launch.url:
        names = dict(zip(("api_key", "reward_key"), keys, strict=False))
        question = await asyncio.to_thread(describe_example, example)
        return AgentService(launch.url, {**question, "seed": seed, "base_url": base_url, **names})
    sandbox, command = launch.sandbox, fill_command(launch.command, example)
    folder = Path(await asyncio.to_thread(write_folder, example, shown_in=None if sandbox is None else WORK_DIR))
    variables = dict(zip(("OPENAI_API_KEY", REWARD_KEY_VARIABLE), keys, strict=False))
    environment = {"OPENAI_BASE_URL": base_url, "MEGATRON_RL_SEED": str(seed), **variables}
    if sandbox is None:
        return await AgentProcess.start(command, command, folder=folder, environment={**inherited_environment(), **environment})
    isolated, environment = sandbox.wrap(command, environment, base_url=base_url)
    return await AgentProcess.start(command, isolated, folder=folder, environment=environment)


def write_folder(example: Example, *, shown_in: str | None = None) -> str:
    """Create the folder of an agent, with the question and its images as PNG files.

    `shown_in` is the path under which the agent sees the folder; None for its own path.

    The folder contains neither the reference answer nor the other columns of the data, which may
    reveal it.
    """
    folder = Path(tempfile.mkdtemp(prefix="agent_"))
    paths = []
    for number, image in enumerate(example.payload["images"]):
        path = folder / f"image_{number}.png"
        image.open().save(path)
        paths.append(str(path if shown_in is None else Path(shown_in, path.name)))
    (folder / EXAMPLE_FILE).write_text(json.dumps({**_question(example), "images": paths}))
    return str(folder)


def describe_example(example: Example) -> dict[str, object]:
    """Return the fields of EXAMPLE_FILE with the images as data URLs in the format PNG."""
    urls = []
    for image in example.payload["images"]:
        png = io.BytesIO()
        image.open().save(png, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}")
    return {**_question(example), "images": urls}


def _question(example: Example) -> dict[str, object]:
    return {"id": example.id, "question": question_text(example), "system": example.payload["system"]}


def fill_command(command: Sequence[str], example: Example) -> list[str]:
    """Replace {question} in the arguments of the command by the question's text."""
    return [argument.replace("{question}", question_text(example)) for argument in command]


def question_text(example: Example) -> str:
    """Return the question without the placeholders of its images."""
    return str(example.payload["question"]).replace(IMAGE_PLACEHOLDER, "").strip()
