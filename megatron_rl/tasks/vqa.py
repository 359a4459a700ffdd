r"""Single-turn question answering without tools, on questions with or without images.

The user provides the data, and the accuracy rubric scores the reply. The default prompt contains
the question with its images and an instruction on the answer format. The setting task.prompt
replaces the default prompt. The reply ends the episode. The answer is the text between <answer> and
</answer>. If the reply has no such block, the answer is the content of the last \boxed{} in the
reply.
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
    """Environment for one question, which the policy answers in a single turn."""

    def __init__(self, example: Example, *, prompt: str, system: str) -> None:
        """Create the environment for one example.

        Args:
            example: Question, images and optional system message.
            prompt: Template of the user message; contains {question}.
            system: System message. An empty string selects the example's own system message, if the
                example has one.
        """
        self.example, self.prompt = example, prompt
        self.system = system or str(example.payload["system"])

    async def reset(self, seed: int) -> list[Message]:
        """Return the messages of the prompt. The seed is not used.

        Raises:
            InfraError: An image cannot be opened.
        """
        pictures = [await asyncio.to_thread(image.open) for image in self.example.payload["images"]]
        before, _, behind = self.prompt.partition("{question}")
        asked = insert_images(str(self.example.payload["question"]), pictures, lambda _, picture: [picture])
        return [*([make_message("system", self.system)] if self.system else []), make_message("user", before, *asked, behind)]

    async def step(self, text: str) -> Step:
        """End the episode with the reply as the answer."""
        return Step(messages=[], reward=0.0, done=True, reason="answer")


class VqaTask(Task):
    """Task with questions from the user's files, scored by the accuracy rubric."""

    reward_names = ("accuracy",)
    appends_to_sequence = False
    stop = ("</answer>",)

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        require(bool(settings.data.eval), "task.data.eval", settings.data.eval, "set the files that contain the held-out questions")
        self.prompt, self.system = settings.prompt or PROMPT, settings.system_prompt
        self.judge = make_judge(settings.judge)
        self.rubric = rubrics.build_rubric("accuracy", judge=self.judge, tool_format="")
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        """Start the judge, if one is configured."""
        if self.judge is not None:
            await self.judge.start()

    async def close(self) -> None:
        """Close the judge, if one is configured."""
        if self.judge is not None:
            await self.judge.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return the questions of a split. The first call validates every row.

        Raises:
            ValueError: A row is invalid; the message names the first invalid row.
        """
        if split not in self._splits:
            self._splits[split] = load_benchmark_questions(self.settings.data, split)
        return self._splits[split]

    def env(self, example: Example) -> VqaEnv:
        """Return a new environment for one question."""
        return VqaEnv(example, prompt=self.prompt, system=self.system)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the benchmark's metrics if `task.data.benchmark` is set."""
        return compute_benchmark_metrics(self.settings.data.benchmark, examples, rollouts)

    def gold_replies(self, example: Example) -> list[str]:
        """Return a list that contains one reply that earns the full reward."""
        return [f"<answer>{example.payload['answer']}</answer>"]
