r"""Single-turn question answering without tools, on questions with or without images.

The user provides the data, and the accuracy rubric scores the reply. The default prompt contains
the question with its images and an instruction on the answer format. The setting task.prompt
replaces the default prompt. The reply ends the episode. The answer is the text between <answer> and
</answer>. If the reply has no such block, the answer is the content of the last \boxed{} in the
reply.
"""

import asyncio
import random
from collections.abc import Sequence

from megatron_rl.config import TaskSettings, require
from megatron_rl.data.transcripts import ANSWERS_SPLIT, TRANSCRIPTS_SPLIT
from megatron_rl.rewards import rubrics
from megatron_rl.rollout.task import Env, Step
from megatron_rl.tasks.question_task import QuestionTask
from megatron_rl.tasks.visual_python.message_parts import insert_images, make_message
from megatron_rl.types import Demonstration, Example, Message

ANSWER = "\nThink first. Then write the final answer, and nothing else, between <answer> and </answer>."
PROMPT = "{question}" + ANSWER
MAX_QUOTED = 60
"""Maximum number of characters that a warning quotes from a prompt."""


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
        return await asyncio.to_thread(self.make_prompt)

    def make_prompt(self) -> list[Message]:
        """Return the messages of the prompt."""
        pictures = [image.open() for image in self.example.payload["images"]]
        before, _, behind = self.prompt.partition("{question}")
        asked = insert_images(str(self.example.payload["question"]), pictures, lambda _, picture: [picture])
        return [*([make_message("system", self.system)] if self.system else []), make_message("user", before, *asked, behind)]

    async def step(self, text: str) -> Step:
        """End the episode with the reply as the answer."""
        return Step(messages=[], reward=0.0, done=True, reason="answer")


class AnsweredQuestions(Sequence[Demonstration]):
    """Questions with their reference answers as replies; images are opened on access."""

    def __init__(self, task: "VqaTask", questions: Sequence[Example]) -> None:
        self._task, self._questions = task, questions

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Demonstration:
        question = self._questions[index]
        (reply,) = self._task.gold_replies(question)
        messages = [*self._task.env(question).make_prompt(), make_message("assistant", reply)]
        return Demonstration(messages, where=question.where)


class VqaTask(QuestionTask):
    """Task with questions from the user's files, scored by the accuracy rubric."""

    reward_names = ("accuracy",)
    appends_to_sequence = False
    demonstration_splits = (TRANSCRIPTS_SPLIT, ANSWERS_SPLIT)
    stop = ("</answer>",)

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        require(bool(settings.data.eval), "task.data.eval", settings.data.eval, "set the files that contain the held-out questions")
        self.prompt, self.system = settings.prompt or PROMPT, settings.system_prompt
        self.rubric = rubrics.build_rubric("accuracy", judge=self.judge, tool_format="")

    def default_demonstration_split(self) -> str:
        """Return transcripts if there are any, else answers."""
        return TRANSCRIPTS_SPLIT if self.settings.data.demonstrations else ANSWERS_SPLIT

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Return demonstrations of a split.

        The split answers contains `num` training questions in random order, each with its reference
        answer as the reply.
        """
        if split != ANSWERS_SPLIT:
            return super().demonstrations(split, num=num, seed=seed)
        questions = self.examples("train")
        order = random.Random(seed).sample(range(len(questions)), k=min(num, len(questions)))
        return AnsweredQuestions(self, [questions[index] for index in order])

    def find_prompt_mismatch(self, messages: Sequence[Message]) -> str:
        """Compare the end of the first question with the text that task.prompt puts behind it."""
        behind = self.prompt.partition("{question}")[2].strip()
        asked = next((message for message in messages if message["role"] == "user"), None)
        content = asked["content"] if asked else ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if text.strip().endswith(behind):
            return ""
        return f"the question ends with {text.strip()[-MAX_QUOTED:]!r}; the task ends it with {behind[-MAX_QUOTED:]!r}"

    def env(self, example: Example) -> VqaEnv:
        """Return a new environment for one question."""
        return VqaEnv(example, prompt=self.prompt, system=self.system)

    def gold_replies(self, example: Example) -> list[str]:
        """Return a list that contains one reply that earns the full reward."""
        return [f"<answer>{example.payload['answer']}</answer>"]
