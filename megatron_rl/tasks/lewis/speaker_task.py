"""Task that trains the speaker of the Lewis game, which describes one image in one reply.

The main reward depends on the listener, which must identify the image among the candidates.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import LewisSpeakerOptions
from megatron_rl.data.transcripts import TRANSCRIPTS_SPLIT
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.rollout.task import Task
from megatron_rl.tasks.lewis.demonstrations import DEMONSTRATION_SPLITS, make_demonstrations
from megatron_rl.tasks.lewis.games import (
    PredictionLog,
    SingleImageEnv,
    load_examples,
    make_situated_payload,
    make_speaker_payload,
    read_image_file,
)
from megatron_rl.tasks.lewis.listener_client import ImageFile, ListenerClient, ListenerConfigKeys, make_listener_client
from megatron_rl.tasks.lewis.rewards import make_listener_fn, speaker_rubric
from megatron_rl.tasks.lewis.sheets import ContactSheets
from megatron_rl.types import Demonstration, Example, Rollout


async def read_candidates(reward_input: RewardInput) -> Sequence[ImageFile]:
    """Return the image files of the candidates in a round."""
    return await asyncio.to_thread(lambda: [read_image_file(image) for image in reward_input.payload["candidates"]])


async def get_question(example: Example) -> str:
    """Return the question in an example."""
    return str(example.payload["question"])


class LewisSpeakerTask(Task):
    """Speaker task: single-turn descriptions of images, scored with a listener."""

    Options = LewisSpeakerOptions
    demonstration_splits = (*DEMONSTRATION_SPLITS, TRANSCRIPTS_SPLIT)

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options: LewisSpeakerOptions = settings.options or LewisSpeakerOptions()
        self.listener = make_listener_client(settings.listener)
        self.log = PredictionLog(options.log)
        self.held_out_listeners = {name: self._make_held_out_listener(name, options) for name in options.held_out_listeners}
        self.contact_sheets = ContactSheets(Path(options.sheets)) if options.sheets else None
        self.rubric = speaker_rubric(
            make_listener_fn(self.listener, read_candidates), term_names=options.parts, accuracy_mode=options.accuracy_mode,
            variant=options.variant, log_prediction=self.log, word_cost=options.word_cost,
            held_out_listeners={name: make_listener_fn(client, read_candidates) for name, client in self.held_out_listeners.items()},
            **({"record_score": self.contact_sheets.record} if self.contact_sheets else {}),
        )  # fmt: skip
        self._make_payload = make_situated_payload if "overlap" in options.parts else make_speaker_payload
        self.stop = ("</location>",) if "overlap" in options.parts else ("</detailed>",)
        self._splits: dict[str, Sequence[Example]] = {}

    def _make_held_out_listener(self, name: str, options: LewisSpeakerOptions) -> ListenerClient:
        """Return the client of a held-out listener.

        The client uses the settings of task.listener with a different URL and token, and without a
        cache file. The client never sends the token of task.listener. Otherwise, the operator of
        the held-out listener could use this token to access the listener that determines the
        reward.
        """
        keys = ListenerConfigKeys(
            f"held-out listener {name}", f"task.options.held_out_listeners.{name}", f"task.options.held_out_token_files.{name}"
        )
        token_file = options.held_out_token_files.get(name, "")
        settings = replace(
            self.settings.listener, urls=[options.held_out_listeners[name]], token_file=token_file, partner_is_training=False, cache=""
        )
        return ListenerClient(settings, keys)

    async def start(self) -> None:
        """Open the prediction log and connect to all listeners."""
        self.log.start()
        for client in (self.listener, *self.held_out_listeners.values()):
            await client.start()

    async def close(self) -> None:
        """Close the connections to all listeners and the prediction log."""
        for client in (self.listener, *self.held_out_listeners.values()):
            await client.close()
        self.log.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return the examples of a split, one per round. The first call validates every row.

        Raises:
            ValueError: A row is invalid; the message names the first invalid row.
        """
        if split not in self._splits:
            self._splits[split] = load_examples(self.settings.data, split, self._make_payload)
        return self._splits[split]

    def env(self, example: Example) -> SingleImageEnv:
        """Return a new environment for one round."""
        return SingleImageEnv(example, get_question)

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Return generated demonstrations or the user's transcripts.

        For the splits in DEMONSTRATION_SPLITS, demonstrations are generated from the rounds of the
        train split. For other split names, the user's transcripts are returned.
        """
        if split in DEMONSTRATION_SPLITS:
            return make_demonstrations(self.examples("train"), split, num=num, seed=seed)
        return super().demonstrations(split, num=num, seed=seed)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Draw the contact sheet, if configured, and return the metric `drift`.

        The drift is the accuracy of the listener minus the accuracy of the held-out listener named
        `frozen`. Without a held-out listener of this name, the metric is omitted.
        """
        if self.contact_sheets is not None:
            self.contact_sheets.draw_sheet(examples, rollouts)
        both = [(each.reward_terms["picked"], each.reward_terms["frozen"]) for each in rollouts if "frozen" in each.reward_terms]
        return {"drift": sum(partner - frozen for partner, frozen in both) / len(both)} if both else {}
