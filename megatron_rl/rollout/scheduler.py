"""Decides how many prompts run in each step, in which order, and which prompts are rerun.

The schedule is the same on every rank. A generation batch consists of num_prompts prompts. When a
step begins, max_staleness + 1 generation batches are in progress; this is the capacity limit of
AReaL (arXiv 2505.24298, eq. 3), counted in whole groups. The step ends when num_prompts groups have
finished, including all groups that would be too stale for the next step. Unfinished groups continue
with the updated weights. With max_staleness=0, each generation batch starts and finishes within one
step.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from megatron_rl.rollout.episode import EpisodeSettings, derive_seed
from megatron_rl.types import Example


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationSettings:
    """Settings that determine how many episodes a training step generates."""

    num_prompts: int
    """Number of prompts per generation batch."""
    group_size: int
    """Number of episodes per prompt."""
    max_num_gen_batches: int
    """Maximum number of generation batches per step."""
    max_staleness: int = 0
    """Maximum staleness, in weight versions, of a rollout's oldest token when the rollout is used
    for training.
    """
    num_steps: int | None = None
    """Total number of training steps of the run; prompts that the remaining steps do not need are
    not scheduled. None if unknown.
    """
    outage_timeout_s: float = 0.0
    """Maximum time in seconds for which rollouts that failed in an infrastructure outage are
    retried.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class ScheduledGroup:
    """Group of episodes that is scheduled, in progress, or finished but not yet trained on."""

    example: Example
    settings: EpisodeSettings
    """Episode settings with the seed of the step that scheduled the group."""
    prompt_index: int = 0
    """Zero-based index of the prompt in the run's prompt order."""


class PromptScheduler:
    """Decides which groups are in progress.

    Groups are numbered in the order in which they are scheduled. Numbering restarts at 0 whenever a
    step begins without active groups.
    """

    def __init__(
        self, examples: Callable[[], Sequence[Example]], *, settings: GenerationSettings, episode_settings: EpisodeSettings
    ) -> None:
        self._examples, self._settings, self._episode_settings = examples, settings, episode_settings
        self.num_generation_batches = 0
        """Number of generation batches drawn so far, which is the state of the prompt sampler. A
        resumed run sets this number to its recorded value.
        """
        self.pending_prompt_indices: list[int] = []
        """Indices of prompts that were drawn, have no active group, and were not trained on. These
        prompts are scheduled before any new prompt.
        """
        self.active_groups: dict[int, ScheduledGroup] = {}
        """Groups in progress, or finished but not yet trained on, by group number."""
        self._next = 0

    def due_groups(self, step: int, oldest_versions: Mapping[int, int | None]) -> set[int]:
        """Return the groups that will be too stale for any step after `step`.

        `oldest_versions` maps each group number to the oldest weight version that the group has
        used, or to None before the group's first request. At most num_prompts groups are due,
        because each step uses num_prompts groups and starts at most num_prompts new groups.
        """
        limit = step - self._settings.max_staleness
        return {group for group in self.active_groups if (oldest := oldest_versions.get(group)) is not None and oldest <= limit}

    def drop_stale(self, step: int, oldest_versions: Mapping[int, int | None]) -> list[int]:
        """Drop the groups that are too stale for this step, and return their numbers.

        The prompts of the dropped groups become pending again. Every step waits for the groups at
        the staleness limit (`due_groups`). Therefore, a group is dropped here only if a server
        reported its weight version too late.

        Args:
            step: Index of the step that is about to begin.
            oldest_versions: Oldest weight version used by each group, keyed by group number; None
                before the group's first request.
        """
        if not self.active_groups:
            self._next = 0
        limit = step - self._settings.max_staleness
        stale = [group for group in self.active_groups if (oldest := oldest_versions.get(group)) is not None and oldest < limit]
        self.pending_prompt_indices += [self.active_groups.pop(group).prompt_index for group in stale]
        return stale

    def schedule(self, step: int) -> dict[int, ScheduledGroup]:
        """Schedule new groups and return them, keyed by group number.

        After the call, max_staleness + 1 generation batches are in progress, or fewer if the
        remaining steps of the run need fewer.
        """
        size, num_batches = self._settings.num_prompts, self._settings.max_staleness + 1
        if self._settings.num_steps is not None:
            num_batches = min(num_batches, self._settings.num_steps - step)
        num = num_batches * size - len(self.active_groups)
        while len(self.pending_prompt_indices) < num:
            self.pending_prompt_indices += range(self.num_generation_batches * size, (self.num_generation_batches + 1) * size)
            self.num_generation_batches += 1
        prompt_indices, self.pending_prompt_indices = self.pending_prompt_indices[: max(num, 0)], self.pending_prompt_indices[max(num, 0) :]
        episode_settings = self._episode_settings.at_step(step)
        new = {
            self._next + number: ScheduledGroup(example=example, settings=episode_settings, prompt_index=place)
            for number, (place, example) in enumerate(zip(prompt_indices, self._examples_at(prompt_indices), strict=True))
        }
        self._next += len(new)
        self.active_groups |= new
        return new

    def _examples_at(self, indices: Sequence[int]) -> list[Example]:
        size, seed = self._settings.num_prompts, self._episode_settings.seed
        batch_indices = {place // size: None for place in indices}
        prompts = {number: choose_prompts(self._examples(), size, seed=seed, batch_index=number) for number in batch_indices}
        return [prompts[place // size][place % size] for place in indices]

    def finish(self, groups: Sequence[int]) -> None:
        """Remove `groups`, which are used for training, from the active groups."""
        for group in groups:
            del self.active_groups[group]

    @property
    def unfinished_prompt_indices(self) -> list[int]:
        """Sorted indices of the prompts that were drawn but not trained on.

        A resumed run schedules these prompts first.
        """
        return sorted([dealt.prompt_index for dealt in self.active_groups.values()] + self.pending_prompt_indices)

    @property
    def epoch(self) -> float:
        """Number of prompts trained on so far, divided by the number of training examples."""
        drawn = self.num_generation_batches * self._settings.num_prompts
        return (drawn - len(self.unfinished_prompt_indices)) / len(self._examples())


def choose_groups(finished: Sequence[int], due: Set[int], *, num: int) -> list[int]:
    """Return the numbers of the `num` groups that the step trains on, in ascending order.

    `finished` are the finished groups in ascending order. Those that are due come first, as no
    later step can train on them; then those that were scheduled first.
    """
    return sorted(sorted(finished, key=lambda group: group not in due)[:num])


def choose_prompts(examples: Sequence[Example], num: int, *, seed: int, batch_index: int) -> list[Example]:
    """Return the examples of one generation batch.

    The choice depends only on the seed and the batch index, so a resumed run uses the same prompts
    as an uninterrupted run. If the examples have a `probability`, they are drawn with replacement
    according to these probabilities. Without probabilities, each epoch uses every example once, in
    random order.
    """
    if examples[0].probability is not None:
        generator = np.random.default_rng(derive_seed(seed, batch_index, 0))
        probabilities = [example.probability for example in examples if example.probability is not None]
        picks = generator.choice(len(examples), size=num, p=probabilities)
        return [examples[pick] for pick in picks]
    positions = range(batch_index * num, (batch_index + 1) * num)
    epochs = {position // len(examples) for position in positions}
    orders = {epoch: np.random.default_rng(derive_seed(seed, epoch, 1)).permutation(len(examples)) for epoch in epochs}
    return [examples[orders[position // len(examples)][position % len(examples)]] for position in positions]
