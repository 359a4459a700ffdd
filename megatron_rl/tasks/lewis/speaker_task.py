"""The speaker of the Lewis game: one reply about one picture, rewarded by the listener that must find it among the candidates."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config import TaskSettings
from megatron_rl.rewards.rubric import Outcome
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.lewis.demonstrations import SPLITS, demonstrated
from megatron_rl.tasks.lewis.games import PictureEnv, PredictionLog, games, shown_of, situated_round, speaker_round
from megatron_rl.tasks.lewis.listener_client import Keys, ListenerClient, Shown, listener_of
from megatron_rl.tasks.lewis.rewards import hearing, speaker_rubric
from megatron_rl.tasks.lewis.sheets import Sheets
from megatron_rl.tasks.task_options import LewisSpeakerOptions
from megatron_rl.types import Demonstration, Example, Rollout


async def shown(outcome: Outcome) -> Sequence[Shown]:
    """The round's candidates, as files."""
    return await asyncio.to_thread(lambda: [shown_of(image) for image in outcome.payload["candidates"]])


async def problem(example: Example) -> str:
    return str(example.payload["question"])


class LewisSpeakerTask(Task):
    Options = LewisSpeakerOptions

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options: LewisSpeakerOptions = settings.options or LewisSpeakerOptions()
        self.listener = listener_of(settings.listener)
        self.log = PredictionLog(options.log)
        self.witnesses = {name: self._witness(name, options) for name in options.held_out_listeners}
        self.sheets = Sheets(Path(options.sheets)) if options.sheets else None
        self.rubric = speaker_rubric(
            hearing(self.listener, shown), parts=options.parts, mode=options.mode, variant=options.variant, tell=self.log,
            witnesses={name: hearing(client, shown) for name, client in self.witnesses.items()},
            **({"show": self.sheets.note} if self.sheets else {}),
        )  # fmt: skip
        self._round_of = situated_round if "overlap" in options.parts else speaker_round
        self.stop = ("</location>",) if "overlap" in options.parts else ("</detailed>",)
        self._splits: dict[str, Sequence[Example]] = {}

    def _witness(self, name: str, options: LewisSpeakerOptions) -> ListenerClient:
        """Asked as the listener is, but for its address and its token: who is told the listener's could ask it in the run's name."""
        keys = Keys(f"witness {name}", f"task.options.held_out_listeners.{name}", f"task.options.held_out_token_files.{name}")
        token_file = options.held_out_token_files.get(name, "")
        settings = replace(
            self.settings.listener, urls=[options.held_out_listeners[name]], token_file=token_file, partner_is_training=False, cache=""
        )
        return ListenerClient(settings, keys)

    async def start(self) -> None:
        self.log.start()
        for client in (self.listener, *self.witnesses.values()):
            await client.start()

    async def close(self) -> None:
        for client in (self.listener, *self.witnesses.values()):
            await client.close()
        self.log.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Every row is looked at the first time. ValueError names the first that is no good."""
        if split not in self._splits:
            self._splits[split] = games(self.settings.data, split, self._round_of)
        return self._splits[split]

    def env(self, example: Example) -> PictureEnv:
        return PictureEnv(example, problem)

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Those of demonstrations.py, of the rounds to train on; or the user's transcripts."""
        if split in SPLITS:
            return demonstrated(self.examples("train"), split, num=num, seed=seed)
        return super().demonstrations(split, num=num, seed=seed)

    def figures(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The drift, where a listener called frozen hears: the partner's share of right picks less that listener's."""
        if self.sheets is not None:
            self.sheets.draw(examples, rollouts)
        both = [(each.reward_terms["picked"], each.reward_terms["frozen"]) for each in rollouts if "frozen" in each.reward_terms]
        return {"drift": sum(partner - frozen for partner, frozen in both) / len(both)} if both else {}
