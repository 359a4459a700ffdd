"""A rubric is a weighted list of named async reward functions; what it returns can be read part by part."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Outcome:
    """What is scored: the example's payload, the policy's replies, and what the environment gave for each of them."""

    payload: Mapping[str, object]
    replies: list[str]
    turn_rewards: list[float]


Reward = Callable[[Outcome], Awaitable[float]]


async def environment_return(outcome: Outcome) -> float:
    """The sum of the environment's rewards over the episode's turns, undiscounted."""
    return float(sum(outcome.turn_rewards))


@dataclass(slots=True, frozen=True)
class Rubric:
    """Named rewards and their weights. Example: Rubric(rewards={"return": environment_return}, weights={"return": 1.0})."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.rewards.keys() != self.weights.keys():
            raise ValueError(f"rubric: rewards {sorted(self.rewards)} and weights {sorted(self.weights)} must have the same names")

    async def score(self, outcome: Outcome) -> tuple[float, dict[str, float]]:
        """The weighted sum and the unweighted parts. An exception of a part is the caller's: it fails the rollout, it is never a 0."""
        names = list(self.rewards)
        values = await asyncio.gather(*(self.rewards[name](outcome) for name in names))
        parts = dict(zip(names, values, strict=True))
        return sum(self.weights[name] * value for name, value in parts.items()), parts
