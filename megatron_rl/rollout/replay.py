"""Replays the recorded rollouts of a run (rollouts.save=all) instead of generating rollouts.

With the settings and initial weights of the recorded run, training reproduces every loss, gradient
and weight of that run, regardless of the trainer's parallel layout.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_rl.config import Settings, require
from megatron_rl.distributed.world import World, raise_on_all_ranks
from megatron_rl.observe.rollout_store import num_rows, read_num_gen_batches, read_rollouts, step_path, without_training_columns
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.manager import GatherRolloutsFn
from megatron_rl.rollout.scheduler import GenerationSettings, PromptScheduler
from megatron_rl.types import Rollout, StopReason


class RolloutReplay:
    """Returns recorded rollouts through the interface of RolloutManager (rollout/manager.py).

    All ranks must call each method together. Each rank reads its share of a step's rollouts and
    images.
    """

    num_stale = 0

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        gather_rollouts: GatherRolloutsFn,
        generation_settings: GenerationSettings,
        episode_settings: EpisodeSettings,
    ) -> None:
        self._folder, self._gather, self._rank, self._size = folder, gather_rollouts, world.rank, world.size
        self._warns_without_final_state = episode_settings.keeps_final_state and world.is_main
        self.scheduler = PromptScheduler(lambda: (), settings=generation_settings, episode_settings=episode_settings)

    def generate(self, step: int, *, is_enough: Callable[[list[Rollout]], bool]) -> list[Rollout]:
        """Return the recorded rollouts of a step.

        Raises:
            ValueError: The step's file is damaged or lacks an image.
        """
        path = step_path(self._folder, step)
        rollouts = self._gather(raise_on_all_ranks(lambda: self._read_share(path)))
        self._warn_without_final_state(path, rollouts)
        self.scheduler.num_generation_batches += read_num_gen_batches(path)
        is_enough(rollouts)
        return rollouts

    def _read_share(self, path: Path) -> list[Rollout]:
        num = num_rows(path)
        mine = range(self._rank * num // self._size, (self._rank + 1) * num // self._size)
        return [without_training_columns(rollout) for rollout in read_rollouts(path, mine)]

    def _warn_without_final_state(self, path: Path, rollouts: list[Rollout]) -> None:
        """Print a warning, once per run, if truncated episodes cannot be bootstrapped."""
        lacking = sum(each.stop_reason is StopReason.ENV_TRUNCATED and each.final_state is None for each in rollouts)
        if lacking and self._warns_without_final_state:
            self._warns_without_final_state = False
            remedy = "record with algo.bootstrap_truncated=true"
            print(
                f"warning: {path}: {lacking} truncated episodes have no final state, so the value after their end is 0; {remedy}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Do nothing: no engine needs the weights."""

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Do nothing: the trainer always has the device."""
        yield

    def metrics(self) -> dict[str, float]:
        """Return an empty dict, because a replay has no engine metrics."""
        return {}

    def busy_s(self) -> float:
        """Return 0: there is no engine."""
        return 0.0


def require_recorded_steps(settings: Settings) -> None:
    """Raise ValueError if the recording lacks a step that this run needs."""
    for step in range(settings.run.steps):
        path = step_path(Path(settings.rollouts.replay_from), step)
        remedy = f"step {step} is missing; use RUN/rollouts of a run with rollouts.save=all, or lower run.steps"
        require(path.is_file(), "rollouts.replay_from", settings.rollouts.replay_from, remedy)
