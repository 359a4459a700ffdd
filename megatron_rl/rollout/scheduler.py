"""Which prompts are under way, on every rank the same: how many are dealt in a step, in which order, and what is dealt again.

A round is num_prompts of them. A step begins with max_staleness + 1 rounds under way: the capacity of AReaL (arXiv 2505.24298, eq. 3), in
whole groups. It ends when a round's number of prompts is played, among them all that would be too old for the next step; what remains goes
on under the next weights. With max_staleness 0 every step plays its own round, and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.rollout.episode import EpisodeSettings, derive_seed
from megatron_rl.types import Example


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationSettings:
    """How many episodes a training step asks for."""

    num_prompts: int
    """Prompts of one round."""
    group_size: int
    """Episodes of one prompt."""
    max_num_gen_batches: int
    """Rounds of one step at most."""
    max_staleness: int = 0
    """Versions that the weights may have gone on since a rollout's oldest token, when it is trained on."""
    num_steps: int | None = None
    """Steps of the run: no more is dealt than they train on. None: not known."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ScheduledGroup:
    """A prompt whose episodes are to be played, are under way, or are done and not yet trained on."""

    example: Example
    settings: EpisodeSettings
    """With the seed of the step that it was dealt in."""
    prompt_index: int = 0
    """In the order of all prompts that a run ever deals."""


class PromptScheduler:
    """Groups are numbered as they are dealt, from 0 wherever a step begins with none under way."""

    def __init__(
        self, examples: Callable[[], Sequence[Example]], *, settings: GenerationSettings, episode_settings: EpisodeSettings
    ) -> None:
        self._examples, self._settings, self._episode_settings = examples, settings, episode_settings
        self.num_generation_batches = 0
        """Rounds that were dealt: where the sampler stands. A resumed run sets it."""
        self.pending_prompt_indices: list[int] = []
        """Places of prompts that were dealt and not played to their end, or not trained on: they are dealt again before any other."""
        self.active_groups: dict[int, ScheduledGroup] = {}
        """Under way, by group."""
        self._next = 0

    def due_groups(self, step: int, oldest_versions: Mapping[int, int | None]) -> set[int]:
        """The groups that this step is the last to be trained on. `oldest_versions` as in drop_stale. At most a round: each step takes
        one's number, and begins no more than that."""
        limit = step - self._settings.max_staleness
        return {group for group in self.active_groups if oldest_versions.get(group) is not None and oldest_versions[group] <= limit}

    def drop_stale(self, step: int, oldest_versions: Mapping[int, int | None]) -> list[int]:
        """The groups that must not be trained on in this step or later; their prompts are owed. `oldest_versions` has the version of each
        group's oldest weights, None where none were asked yet. A step waits for those that are due: what is left was asked of a server
        whose answer told its version too late."""
        if not self.active_groups:
            self._next = 0
        limit = step - self._settings.max_staleness
        stale = [group for group in self.active_groups if oldest_versions.get(group) is not None and oldest_versions[group] < limit]
        self.pending_prompt_indices += [self.active_groups.pop(group).prompt_index for group in stale]
        return stale

    def schedule(self, step: int) -> dict[int, ScheduledGroup]:
        """More groups, until max_staleness + 1 rounds are under way, or all that the run's steps will need."""
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
        """These are trained on: they are under way no more."""
        for group in groups:
            del self.active_groups[group]

    @property
    def unfinished_prompt_indices(self) -> list[int]:
        """Places of all prompts that were dealt and of which nothing was trained on: what the run's next life deals first."""
        return sorted([dealt.prompt_index for dealt in self.active_groups.values()] + self.pending_prompt_indices)


def choose_prompts(examples: Sequence[Example], num: int, *, seed: int, batch_index: int) -> list[Example]:
    """The examples of one round, a function of seed and round alone, so that a resumed run deals what the unbroken one would have.

    Where the task states how often it deals each example, drawn with those probabilities; otherwise without repetition within an epoch.
    """
    if examples[0].probability is not None:
        generator = np.random.default_rng(derive_seed(seed, batch_index, 0))
        picks = generator.choice(len(examples), size=num, p=[example.probability for example in examples])
        return [examples[pick] for pick in picks]
    positions = range(batch_index * num, (batch_index + 1) * num)
    epochs = {position // len(examples) for position in positions}
    orders = {epoch: np.random.default_rng(derive_seed(seed, epoch, 1)).permutation(len(examples)) for epoch in epochs}
    return [examples[orders[position // len(examples)][position % len(examples)]] for position in positions]
