"""A rubric: named async reward functions with weights. What it returns can be read part by part.

Rubric(
    parts={"accuracy": Part(accuracy), "code": Part(executed_code_turns, weight=0.1, needs="accuracy")},
    turn_parts={"evidence": TurnRewardTerm(judged_crops, weight=0.5)},
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
    """What is scored: the example's payload, the policy's turns with what came of them, and how the episode ended."""

    payload: Mapping[str, object]
    rollout: Rollout
    """The episode, which has no reward yet."""
    prompt_images: list[Image] = field(default_factory=list)
    """Those of the first prompt."""

    @property
    def turns(self) -> list[Turn]:
        return self.rollout.turns

    @property
    def stop_reason(self) -> StopReason:
        return self.rollout.stop_reason

    @property
    def replies(self) -> list[str]:
        return [turn.text for turn in self.turns]


RewardFn = Callable[[RewardInput], Awaitable[float | None]]
"""None where it has no opinion: the part then counts nothing, and is not among the rewards."""
TurnRewardFn = Callable[[RewardInput], Awaitable[list[float | None]]]
"""One value a turn; None for a turn that is no step in the sense of this reward."""
VetoFn = Callable[[RewardInput], bool]
CORRECT_THRESHOLD = 0.5
"""A part that others need counts as met from here on."""


@dataclass(slots=True, frozen=True)
class RewardTerm:
    reward_fn: RewardFn
    weight: float = 1.0
    requires: str = ""
    """The part that must be at least CORRECT for this one to count: a bonus. Otherwise it is 0 and its function is not called."""


@dataclass(slots=True, frozen=True)
class TurnRewardTerm:
    reward_fn: TurnRewardFn
    weight: float = 1.0
    averages_turns: bool = True
    """The episode gets the mean over the turns that are steps (0 without any), or else their sum."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RubricScore:
    reward: float
    """Sum of all weighted parts, turn parts included."""
    outcome_reward: float
    """The same without the turn parts."""
    reward_terms: dict[str, float]
    """By part that had an opinion, unweighted; a veto that holds is there with 1."""
    step_scores: list[float | None]
    """What each turn is worth as a step of the turn parts, weighted; None where it is no step of any."""
    reward_deltas: list[float]
    """What each turn changed in `reward`: they and `outcome` sum to it. For a part that is a mean: how far it moved the mean so far."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rubric:
    """A veto that holds takes every positive part away and spares the penalties; its reward functions are then called all the same."""

    terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    turn_terms: Mapping[str, TurnRewardTerm] = field(default_factory=dict)
    vetoes: Mapping[str, VetoFn] = field(default_factory=dict)
    solved_term: str = ""
    """The part that says whether an episode is solved: at least CORRECT. Empty: every reward above 0 does."""

    def __post_init__(self) -> None:
        names = [*self.terms, *self.turn_terms, *(f"veto {name}" for name in self.vetoes)]
        if len(set(names)) < len(names):
            raise ValueError(f"rubric: a name stands twice in {names}")
        for name, part in self.terms.items():
            if part.requires and (part.requires not in self.terms or self.terms[part.requires].requires):
                raise ValueError(f"rubric: {name} needs {part.requires!r}, which is no part, or itself needs one")

    async def score(self, reward_input: RewardInput) -> RubricScore:
        """An exception of a part is the caller's: it fails the rollout, it is never a 0. PermanentInfraError: no part has an opinion."""
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
        """Whether a rollout that it scored is solved."""
        return rollout.reward_terms.get(self.solved_term, 0.0) >= CORRECT_THRESHOLD if self.solved_term else rollout.reward > 0


def cumulative(steps: Sequence[float | None], *, mean: bool) -> list[float]:
    """The sum of the steps up to each turn, or their mean; None is no step. Example: [1, None, 0], mean -> [1, 1, 0.5]."""
    values, total, count = [], 0.0, 0
    for step in steps:
        if step is not None:
            total, count = total + step, count + 1
        values.append(total / max(count, 1) if mean else total)
    return values


async def environment_rewards(reward_input: RewardInput) -> list[float | None]:
    """Return the reward that the environment gave each turn. With TurnRewardTerm(mean=False) the episode's reward is its undiscounted
    return."""
    return [turn.reward for turn in reward_input.turns]
