"""Plain questions about pictures, or about nothing but words: one reply each, no tools. The user's data and the accuracy rubric.

The policy sees the question with its pictures and how to answer, which task.prompt may say in other words; the reply ends the episode. What
is between <answer> and </answer> counts, or in the last \\boxed{} of a reply that has no such block.
"""

import asyncio
from collections.abc import Sequence

from megatron_rl.config import TaskSettings, require
from megatron_rl.data.benchmarks.catalog import compute_benchmark_metrics, load_benchmark_questions
from megatron_rl.rewards import rubrics
from megatron_rl.rewards.judge import make_judge
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.tasks.visual_python.message_parts import insert_images, make_message
from megatron_rl.types import Example, Message, Rollout

ANSWER = "\nThink first. Then write the final answer, and nothing else, between <answer> and </answer>."
PROMPT = "{question}" + ANSWER


class VqaEnv(Env):
    def __init__(self, example: Example, *, prompt: str, system: str) -> None:
        """`prompt` has {question} in it; without a `system` of the task that of the example's row speaks, if there is one."""
        self.example, self.prompt = example, prompt
        self.system = system or str(example.payload["system"])

    async def reset(self, seed: int) -> list[Message]:
        """Nothing is drawn here. InfraError: a picture cannot be opened."""
        pictures = [await asyncio.to_thread(image.open) for image in self.example.payload["images"]]
        before, _, behind = self.prompt.partition("{question}")
        asked = insert_images(str(self.example.payload["question"]), pictures, lambda _, picture: [picture])
        return [*([make_message("system", self.system)] if self.system else []), make_message("user", before, *asked, behind)]

    async def step(self, text: str) -> Step:
        return Step(messages=[], reward=0.0, done=True, reason="answer")


class VqaTask(Task):
    reward_names = ("accuracy",)
    appends_to_sequence = False
    stop = ("</answer>",)

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        require(bool(settings.data.eval), "task.data.eval", settings.data.eval, "give the files of questions that are held out")
        self.prompt, self.system = settings.prompt or PROMPT, settings.system_prompt
        self.judge = make_judge(settings.judge)
        self.rubric = rubrics.build_rubric("accuracy", judge=self.judge, tool_format="")
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        if self.judge is not None:
            await self.judge.start()

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Every row is looked at the first time. ValueError names the first that is no good."""
        if split not in self._splits:
            self._splits[split] = load_benchmark_questions(self.settings.data, split)
        return self._splits[split]

    def env(self, example: Example) -> VqaEnv:
        return VqaEnv(example, prompt=self.prompt, system=self.system)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Those that are quoted of task.data.benchmark."""
        return compute_benchmark_metrics(self.settings.data.benchmark, examples, rollouts)

    def gold_replies(self, example: Example) -> list[str]:
        """Replies that earn full marks."""
        return [f"<answer>{example.payload['answer']}</answer>"]
