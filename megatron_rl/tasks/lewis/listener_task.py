"""The listener of the Lewis game in training: do two pictures show the same, or which candidate shows what the query shows?"""

import asyncio
import json
from collections.abc import Sequence

from megatron_rl.config import TaskSettings, require
from megatron_rl.errors import PermanentInfraError
from megatron_rl.rollout.task import Env, Task
from megatron_rl.tasks.lewis.demonstrations import SPLITS, demonstrated, told_question
from megatron_rl.tasks.lewis.description import described
from megatron_rl.tasks.lewis.games import PictureEnv, PredictionLog, compared_round, games, heard_rounds, selected_round, speaker_round
from megatron_rl.tasks.lewis.rewards import listener_rubric
from megatron_rl.tasks.lewis.speaker_client import SpeakerClient
from megatron_rl.tasks.task_options import LewisListenerOptions
from megatron_rl.tasks.vqa import VqaEnv
from megatron_rl.types import Demonstration, Example


class LewisListenerTask(Task):
    Options = LewisListenerOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options: LewisListenerOptions = settings.options or LewisListenerOptions()
        self.log = PredictionLog(options.log)
        urls, remedy = settings.speaker.urls, "describe for task.options.reward=heard alone; choose it, or leave them out"
        require(not urls or options.reward == "heard", "task.speaker.urls", urls, remedy)
        self.speaker = SpeakerClient(settings.speaker) if urls else None
        self.rubric = listener_rubric(reward=options.reward, variant=options.variant, tell=self.log)
        self._is_heard = options.reward == "heard"
        self._round_of = selected_round if options.reward == "selection" else compared_round
        self._splits: dict[str, Sequence[Example]] = {}

    async def start(self) -> None:
        self.log.start()
        if self.speaker is not None:
            await self.speaker.start()

    async def close(self) -> None:
        if self.speaker is not None:
            await self.speaker.close()
        self.log.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Every row is looked at the first time. ValueError names the first that is no good."""
        if split not in self._splits:
            heard = self._is_heard
            self._splits[split] = heard_rounds(self.settings.data, split) if heard else games(self.settings.data, split, self._round_of)
        return self._splits[split]

    def env(self, example: Example) -> Env:
        return PictureEnv(example, self._question) if self._is_heard else VqaEnv(example, prompt="{question}", system="")

    async def _question(self, example: Example) -> str:
        """PermanentInfraError: the speaker says nothing that could be asked about."""
        shown, category = example.payload["shown"], str(example.payload["category"])
        if self.speaker is None:
            return await asyncio.to_thread(told_question, shown, category=category)
        reply = await self.speaker.describe(await asyncio.to_thread(shown.read), category=category)
        question = described(reply, category=category).question
        if not question:
            raise PermanentInfraError(f"{example}: the speaker describes nothing ({reply[:60]!r})")
        return question

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Those of demonstrations.py, of speakers' rounds to train on; or the user's transcripts."""
        if split in SPLITS:
            return demonstrated(games(self.settings.data, "train", speaker_round), split, num=num, seed=seed)
        return super().demonstrations(split, num=num, seed=seed)

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks."""
        if self._is_heard:
            return [str(example.payload["answer"])]
        return [f"```json\n{json.dumps({'Reasoning': 'seen', 'Answer': example.payload['answer']})}\n```"]
