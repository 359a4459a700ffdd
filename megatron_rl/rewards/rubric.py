"""Rubric: named async reward functions with weights, and scores that can be inspected term by term.

Rubric(
    terms={
        "accuracy": RewardTerm(accuracy),
        "code": RewardTerm(count_executed_code, weight=0.1, requires="accuracy"),
    },
    turn_terms={"evidence": TurnRewardTerm(judged_crops, weight=0.5)},
    vetoes={"too long": answer_is_too_long},
)
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import PermanentInfraError
from megatron_rl.types import Image, Rollout, StopReason, Turn


@dataclass(slots=True, frozen=True, kw_only=True)
class RewardInput:
    """Input of a reward function: the example's payload and the finished episode."""

    payload: Mapping[str, object]
    rollout: Rollout
    """Rollout to score; its reward is not set yet."""
    prompt_images: list[Image] = field(default_factory=list)
    """Images of the first prompt."""

    @property
    def turns(self) -> list[Turn]:
        """Turns of the policy, with their tool calls and observed images."""
        return self.rollout.turns

    @property
    def stop_reason(self) -> StopReason:
        """Reason why the episode ended."""
        return self.rollout.stop_reason

    @property
    def replies(self) -> list[str]:
        """Text of the policy in each turn."""
        return [turn.text for turn in self.turns]


RewardFn = Callable[[RewardInput], Awaitable[float | None]]
"""Returns a reward, or None to abstain: the term is then omitted from the sum and from the reward
terms.
"""
TurnRewardFn = Callable[[RewardInput], Awaitable[list[float | None]]]
"""Returns one value per turn; None for a turn that this reward does not count as a step."""
VetoFn = Callable[[RewardInput], bool]
CORRECT_THRESHOLD = 0.5
"""Minimum value at which a term counts as met, for terms that require it and for `solved_term`."""


@dataclass(slots=True, frozen=True)
class RewardTerm:
    """A reward function for the whole episode, with its weight."""

    reward_fn: RewardFn
    weight: float = 1.0
    requires: str = ""
    """Name of the term that must reach CORRECT_THRESHOLD for this one to count. Otherwise this one
    is 0, and its function is not called.
    """


@dataclass(slots=True, frozen=True)
class TurnRewardTerm:
    """A reward function with one value per turn, with its weight."""

    reward_fn: TurnRewardFn
    weight: float = 1.0
    averages_turns: bool = True
    """Reward the episode with the mean over the turns that are steps (0 without any); False uses
    their sum.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class RubricScore:
    """Score of an episode, in total, by term and by turn."""

    reward: float
    """Weighted sum of all terms, including turn terms."""
    outcome_reward: float
    """Weighted sum of the terms without turn terms."""
    reward_terms: dict[str, float]
    """Unweighted value of each term that did not abstain; vetoes are included, with 1 if they hold.
    """
    step_scores: list[float | None]
    """Weighted sum of the turn terms for each turn; None for a turn that is a step of none."""
    reward_deltas: list[float]
    """Change of `reward` by each turn; these and `outcome_reward` sum to `reward`. For a term that
    averages turns, this is the change of the running mean.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class Rubric:
    """Terms, turn terms and vetoes of a task's reward.

    A veto removes all positive values and keeps the penalties. The reward functions are called
    nevertheless.
    """

    terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    turn_terms: Mapping[str, TurnRewardTerm] = field(default_factory=dict)
    vetoes: Mapping[str, VetoFn] = field(default_factory=dict)
    solved_term: str = ""
    """Name of the term that must reach CORRECT_THRESHOLD for the episode to be solved; if empty,
    any positive reward counts.
    """

    def __post_init__(self) -> None:
        names = [*self.terms, *self.turn_terms, *(f"veto {name}" for name in self.vetoes)]
        if len(set(names)) < len(names):
            raise ValueError(f"rubric: a name stands twice in {names}")
        for name, part in self.terms.items():
            if part.requires and (part.requires not in self.terms or self.terms[part.requires].requires):
                raise ValueError(f"rubric: {name} needs {part.requires!r}, which is no part, or itself needs one")

    async def score(self, reward_input: RewardInput) -> RubricScore:
        """Compute the score of an episode.

        Exceptions of reward functions propagate: the caller marks the rollout as failed, and they
        never become a reward of 0.

        Raises:
            PermanentInfraError: All terms abstain.
            ValueError: A turn term returned a wrong number of values.
        """
        free = [name for name, part in self.terms.items() if not part.requires]
        values, turn_values = await asyncio.gather(
            asyncio.gather(*(self.terms[name].reward_fn(reward_input) for name in free)),
            asyncio.gather(*(part.reward_fn(reward_input) for part in self.turn_terms.values())),
        )
        rewards = {name: float(value) for name, value in zip(free, values, strict=True) if value is not None}
        earned = [name for name, part in self.terms.items() if part.requires and rewards.get(part.requires, 0.0) >= CORRECT_THRESHOLD]
        rewards |= dict.fromkeys((name for name, part in self.terms.items() if part.requires), 0.0)
        bonuses = await asyncio.gather(*(self.terms[name].reward_fn(reward_input) for name in earned))
        rewards |= {name: float(value) for name, value in zip(earned, bonuses, strict=True) if value is not None}
        if self.terms and not self.turn_terms and not rewards:
            raise PermanentInfraError(
                f"rewards {', '.join(self.terms)}: none has an opinion on {reward_input.rollout.example_id}; one must give a number"
            )
        held = [name for name, veto in self.vetoes.items() if veto(reward_input)]
        if held:
            rewards = {name: min(value, 0.0) for name, value in rewards.items()}
        turns: list[float | None] = [None] * len(reward_input.turns)
        gains = [0.0] * len(reward_input.turns)
        for (name, part), given in zip(self.turn_terms.items(), turn_values, strict=True):
            if len(given) != len(turns):
                raise ValueError(f"rubric: {name} gave {len(given)} values for {len(turns)} turns")
            steps = [None if value is None else min(float(value), 0.0) if held else float(value) for value in given]
            so_far = cumulative(steps, mean=part.averages_turns)
            rewards[name] = so_far[-1] if so_far else 0.0
            for number, step in enumerate(steps):
                gains[number] += part.weight * (so_far[number] - (so_far[number - 1] if number else 0.0))
                if step is not None:
                    turns[number] = (turns[number] or 0.0) + part.weight * step
        total = sum(part.weight * rewards[name] for name, part in self.terms.items() if name in rewards)
        earned_by_turns = sum(part.weight * rewards[name] for name, part in self.turn_terms.items())
        rewards |= {f"veto {name}": float(name in held) for name in self.vetoes}
        return RubricScore(
            reward=total + earned_by_turns, outcome_reward=total, reward_terms=rewards, step_scores=turns, reward_deltas=gains
        )

    def is_solved(self, rollout: Rollout) -> bool:
        """Return True if a rollout scored by this rubric is solved."""
        return rollout.reward_terms.get(self.solved_term, 0.0) >= CORRECT_THRESHOLD if self.solved_term else rollout.reward > 0


def cumulative(steps: Sequence[float | None], *, mean: bool) -> list[float]:
    """Return the running sum or mean of the steps up to each turn; None is no step.

    Example: [1, None, 0] with mean=True -> [1, 1, 0.5].
    """
    values, total, count = [], 0.0, 0
    for step in steps:
        if step is not None:
            total, count = total + step, count + 1
        values.append(total / max(count, 1) if mean else total)
    return values


async def environment_rewards(reward_input: RewardInput) -> list[float | None]:
    """Return the environment's reward of each turn.

    With TurnRewardTerm(averages_turns=False), the episode's reward is the undiscounted return.
    """
    return [turn.reward for turn in reward_input.turns]
