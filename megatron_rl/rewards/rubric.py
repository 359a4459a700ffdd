"""A rubric: named async reward functions with weights. What it returns can be read part by part.

Rubric(
    parts={"accuracy": Part(accuracy), "code": Part(executed_code_turns, weight=0.1, needs="accuracy")},
    turn_parts={"evidence": TurnPart(judged_crops, weight=0.5)},
    vetoes={"too long": answer_is_too_long},
)
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import PermanentInfraError
from megatron_rl.types import Image, Rollout, StopReason, Turn


@dataclass(slots=True, frozen=True, kw_only=True)
class Outcome:
    """What is scored: the example's payload, the policy's turns with what came of them, and how the episode ended."""

    payload: Mapping[str, object]
    rollout: Rollout
    """The episode, which has no reward yet."""
    images: list[Image] = field(default_factory=list)
    """Those of the first prompt."""

    @property
    def turns(self) -> list[Turn]:
        return self.rollout.turns

    @property
    def end(self) -> StopReason:
        return self.rollout.stop_reason

    @property
    def replies(self) -> list[str]:
        return [turn.text for turn in self.turns]


Reward = Callable[[Outcome], Awaitable[float | None]]
"""None where it has no opinion: the part then counts nothing, and is not among the rewards."""
TurnReward = Callable[[Outcome], Awaitable[list[float | None]]]
"""One value a turn; None for a turn that is no step in the sense of this reward."""
Veto = Callable[[Outcome], bool]
CORRECT = 0.5
"""A part that others need counts as met from here on."""


@dataclass(slots=True, frozen=True)
class Part:
    reward: Reward
    weight: float = 1.0
    needs: str = ""
    """The part that must be at least CORRECT for this one to count: a bonus. Otherwise it is 0 and its function is not called."""


@dataclass(slots=True, frozen=True)
class TurnPart:
    reward: TurnReward
    weight: float = 1.0
    mean: bool = True
    """The episode gets the mean over the turns that are steps (0 without any), or else their sum."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Score:
    reward: float
    """Sum of all weighted parts, turn parts included."""
    outcome: float
    """The same without the turn parts."""
    rewards: dict[str, float]
    """By part that had an opinion, unweighted; a veto that holds is there with 1."""
    turns: list[float | None]
    """What each turn is worth as a step of the turn parts, weighted; None where it is no step of any."""
    gains: list[float]
    """What each turn changed in `reward`: they and `outcome` sum to it. For a part that is a mean: how far it moved the mean so far."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Rubric:
    """A veto that holds takes every positive part away and spares the penalties; its reward functions are then called all the same."""

    parts: Mapping[str, Part] = field(default_factory=dict)
    turn_parts: Mapping[str, TurnPart] = field(default_factory=dict)
    vetoes: Mapping[str, Veto] = field(default_factory=dict)
    solved_by: str = ""
    """The part that says whether an episode is solved: at least CORRECT. Empty: every reward above 0 does."""

    def __post_init__(self) -> None:
        names = [*self.parts, *self.turn_parts, *(f"veto {name}" for name in self.vetoes)]
        if len(set(names)) < len(names):
            raise ValueError(f"rubric: a name stands twice in {names}")
        for name, part in self.parts.items():
            if part.needs and (part.needs not in self.parts or self.parts[part.needs].needs):
                raise ValueError(f"rubric: {name} needs {part.needs!r}, which is no part, or itself needs one")

    async def score(self, outcome: Outcome) -> Score:
        """An exception of a part is the caller's: it fails the rollout, it is never a 0. PermanentInfraError: no part has an opinion."""
        free = [name for name, part in self.parts.items() if not part.needs]
        values, turn_values = await asyncio.gather(
            asyncio.gather(*(self.parts[name].reward(outcome) for name in free)),
            asyncio.gather(*(part.reward(outcome) for part in self.turn_parts.values())),
        )
        rewards = {name: float(value) for name, value in zip(free, values, strict=True) if value is not None}
        earned = [name for name, part in self.parts.items() if part.needs and rewards.get(part.needs, 0.0) >= CORRECT]
        rewards |= dict.fromkeys((name for name, part in self.parts.items() if part.needs), 0.0)
        bonuses = await asyncio.gather(*(self.parts[name].reward(outcome) for name in earned))
        rewards |= {name: float(value) for name, value in zip(earned, bonuses, strict=True) if value is not None}
        if self.parts and not self.turn_parts and not rewards:
            raise PermanentInfraError(
                f"rewards {', '.join(self.parts)}: none has an opinion on {outcome.rollout.example_id}; one must give a number"
            )
        held = [name for name, veto in self.vetoes.items() if veto(outcome)]
        if held:
            rewards = {name: min(value, 0.0) for name, value in rewards.items()}
        turns: list[float | None] = [None] * len(outcome.turns)
        gains = [0.0] * len(outcome.turns)
        for (name, part), given in zip(self.turn_parts.items(), turn_values, strict=True):
            if len(given) != len(turns):
                raise ValueError(f"rubric: {name} gave {len(given)} values for {len(turns)} turns")
            steps = [None if value is None else min(float(value), 0.0) if held else float(value) for value in given]
            so_far = running(steps, mean=part.mean)
            rewards[name] = so_far[-1] if so_far else 0.0
            for number, step in enumerate(steps):
                gains[number] += part.weight * (so_far[number] - (so_far[number - 1] if number else 0.0))
                if step is not None:
                    turns[number] = (turns[number] or 0.0) + part.weight * step
        total = sum(part.weight * rewards[name] for name, part in self.parts.items() if name in rewards)
        earned_by_turns = sum(part.weight * rewards[name] for name, part in self.turn_parts.items())
        rewards |= {f"veto {name}": float(name in held) for name in self.vetoes}
        return Score(reward=total + earned_by_turns, outcome=total, rewards=rewards, turns=turns, gains=gains)

    def solves(self, rollout: Rollout) -> bool:
        """Whether a rollout that it scored is solved."""
        return rollout.reward_terms.get(self.solved_by, 0.0) >= CORRECT if self.solved_by else rollout.reward > 0


def running(steps: Sequence[float | None], *, mean: bool) -> list[float]:
    """The sum of the steps up to each turn, or their mean; None is no step. Example: [1, None, 0], mean -> [1, 1, 0.5]."""
    values, total, count = [], 0.0, 0
    for step in steps:
        if step is not None:
            total, count = total + step, count + 1
        values.append(total / max(count, 1) if mean else total)
    return values


async def environment_rewards(outcome: Outcome) -> list[float | None]:
    """What the environment gave, turn by turn. With TurnPart(mean=False) the episode's reward is its undiscounted return."""
    return [turn.reward for turn in outcome.turns]
