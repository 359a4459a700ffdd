"""Episodes of task=agent with real agent processes, the real server and a scripted engine."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image as pil

from megatron_rl.config import TaskSettings
from megatron_rl.config.rollout import DataSettings
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.rollout.conversation import SequenceLimits, TokenConversation
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.tasks.agent.task import AgentTask
from megatron_rl.types import Image, Rollout
from tests.conftest import SUPPORT

AGENT = SUPPORT / "agents" / "talking_agent.py"
SETTINGS = EpisodeSettings(
    temperature=1.0, max_turns=6, max_new_tokens=8, max_sequence_tokens=4000, max_images=8, env_timeout_s=60.0, seed=0
)


@dataclass
class Counting:
    """Engine that gives the texts in order, and then the number of the request: `r2`, `r3`, ..."""

    renderer: Renderer
    texts: Sequence[str] = ()
    weight_version: int = 0
    contexts: list[list[int]] = field(default_factory=list)
    stops: list[tuple[str, ...]] = field(default_factory=list)

    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        await asyncio.sleep(0.05)  # lets requests arrive at the same time
        self.contexts.append(list(token_ids))
        self.stops.append(sampling.stop)
        number = len(self.contexts) - 1
        text = self.texts[number] if number < len(self.texts) else f"r{number}"
        end = () if any(each in text for each in sampling.stop) else (self.renderer.end_id,)
        ids = [*self.renderer.tokenizer(text)["input_ids"], *end]
        return Completion(ids, [-0.5] * len(ids), is_stopped=True, weight_versions=[0] * len(ids))


def make_task(
    folder: Path, mode: str, *, command: Sequence[str] = (), url: str = "", system: str = "", reward: str = "", **given: object
) -> AgentTask:
    """Return a task with one question and the agent `talking_agent.py MODE`, or another agent."""
    pil.new("RGB", (60, 60), "red").save(folder / "red.png")
    row = {"question": "<image>Which color?", "answer": "r1", "images": ["red.png"], **({"system": system} if system else {})}
    (folder / "q.jsonl").write_text(json.dumps(row) + "\n")
    data = DataSettings(train=[str(folder / "q.jsonl")], eval=[str(folder / "q.jsonl")])
    options = AgentOptions(command=[] if url else list(command) or [sys.executable, str(AGENT), mode], url=url, **given)
    return AgentTask(TaskSettings(name="agent", data=data, options=options, reward=reward))


def play(
    folder: Path, renderer: Renderer, mode: str, *, texts: Sequence[str] = (), settings: EpisodeSettings = SETTINGS, **given: object
) -> tuple[Rollout, Counting]:
    """Run one episode of `talking_agent.py MODE`, or of another agent."""
    engine = Counting(renderer, texts)
    return play_task(make_task(folder, mode, **given), engine, settings=settings), engine


def play_task(task: AgentTask, engine: "Counting", *, settings: EpisodeSettings = SETTINGS) -> Rollout:
    """Run one episode of the only training question of a task."""

    async def run() -> Rollout:
        await task.start()
        try:
            conversation = TokenConversation(engine, engine.renderer, SequenceLimits(max_sequence_tokens=4000, max_images=8))
            (example,) = task.examples("train")
            return await run_episode(task, example, conversation=conversation, settings=settings, group=0, sample_index=0)
        finally:
            await task.close()

    return asyncio.run(run())


def as_text(renderer: Renderer, tokens: Sequence[int]) -> str:
    """Return the decoded tokens, without those of images."""
    return renderer.tokenizer.decode(tokens).replace("<|image_pad|>", "")
