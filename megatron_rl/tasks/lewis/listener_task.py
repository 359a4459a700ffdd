"""Task that trains the listener of the Lewis game.

The listener answers one of three questions: whether two images show the same object, which
candidate shows the same object as the query, or whether a description fits an image.
"""

import asyncio
import json
from collections.abc import Sequence

from megatron_rl.config import TaskSettings, require
from megatron_rl.config.task_options import LewisListenerOptions
from megatron_rl.data.transcripts import TRANSCRIPTS_SPLIT
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.task import Env, Task
from megatron_rl.tasks.lewis.demonstrations import DEMONSTRATION_SPLITS, make_color_question, make_demonstrations
from megatron_rl.tasks.lewis.description import parse_description
from megatron_rl.tasks.lewis.games import (
    PredictionLog,
    SingleImageEnv,
    load_description_examples,
    load_examples,
    make_comparison_payload,
    make_selection_payload,
    make_speaker_payload,
)
from megatron_rl.tasks.lewis.rewards import listener_rubric
from megatron_rl.tasks.lewis.speaker_client import SpeakerClient
from megatron_rl.tasks.vqa import VqaEnv
from megatron_rl.types import Demonstration, Example


class LewisListenerTask(Task):
    """Listener task. task.options.reward selects the question and the reward."""

    Options = LewisListenerOptions
    demonstration_splits = (*DEMONSTRATION_SPLITS, TRANSCRIPTS_SPLIT)

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options: LewisListenerOptions = settings.options or LewisListenerOptions()
        self.log = PredictionLog(options.log)
        urls, remedy = settings.speaker.urls, "require task.options.reward=heard; set this reward or remove the URLs"
        require(not urls or options.reward == "heard", "task.speaker.urls", urls, remedy)
        self.speaker = SpeakerClient(settings.speaker) if urls else None
        self.rubric = listener_rubric(reward_name=options.reward, variant=options.variant, log_prediction=self.log)
        self._uses_descriptions = options.reward == "heard"
        self._make_payload = make_selection_payload if options.reward == "selection" else make_comparison_payload
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        """Open the prediction log, and connect to the speaker if one is configured."""
        self.log.start()
        if self.speaker is not None:
            await self.speaker.start()

    async def close(self) -> None:
        """Close the prediction log and the connection to the speaker, if one is configured."""
        if self.speaker is not None:
            await self.speaker.close()
        self.log.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return the examples of a split. The first call validates every row.

        Raises:
            ValueError: A row is invalid; the message names the first invalid row.
        """
        if split not in self._splits:
            heard = self._uses_descriptions
            self._splits[split] = (
                load_description_examples(self.settings.data, split)
                if heard
                else load_examples(self.settings.data, split, self._make_payload)
            )
        return self._splits[split]

    def env(self, example: Example) -> Env:
        """Return a new environment for one question."""
        return SingleImageEnv(example, self._make_question) if self._uses_descriptions else VqaEnv(example, prompt="{question}", system="")

    async def _make_question(self, example: Example) -> str:
        """Return the listener's question, which contains a description of the round's image.

        The description comes from the speaker's reply. If no speaker is configured, the description
        names the colors of the object.

        Raises:
            PermanentInfraError: The speaker's reply contains no description.
        """
        shown, category = example.payload["shown"], str(example.payload["category"])
        if self.speaker is None:
            return await asyncio.to_thread(make_color_question, shown, category=category)
        reply = await self.speaker.describe_image(await asyncio.to_thread(shown.read), category=category)
        question = parse_description(reply, category=category).question
        if not question:
            raise PermanentInfraError(f"{example}: the speaker's reply contains no description ({reply[:60]!r})")
        return question

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Return generated demonstrations or the user's transcripts.

        For the splits in DEMONSTRATION_SPLITS, demonstrations are generated from the speaker rounds
        of the train split. For other split names, the user's transcripts are returned.
        """
        if split in DEMONSTRATION_SPLITS:
            return make_demonstrations(load_examples(self.settings.data, "train", make_speaker_payload), split, num=num, seed=seed)
        return super().demonstrations(split, num=num, seed=seed)

    def gold_replies(self, example: Example) -> list[str]:
        """Return a list that contains one reply that earns the full reward."""
        if self._uses_descriptions:
            return [str(example.payload["answer"])]
        return [f"```json\n{json.dumps({'Reasoning': 'seen', 'Answer': example.payload['answer']})}\n```"]
