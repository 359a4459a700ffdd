"""What a task is to the rest of the program: examples, single-use environments that speak messages, and a rubric.

Messages are those of Hugging Face chat templates: {"role": ..., "content": text or parts}, a part being
{"type": "text", "text": ...} or {"type": "image", "image": a PIL picture}.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.rewards.rubric import Rubric

Message = Mapping[str, object]


@dataclass(slots=True, frozen=True)
class Example:
    """One start of an episode. Its payload is the task's own business."""

    id: str
    payload: Mapping[str, object]
    probability: float | None = None
    """How often the task deals this example, where that is known: evaluation then weights by it."""


@dataclass(slots=True, frozen=True)
class Step:
    """What the environment says after a reply of the policy."""

    messages: list[Message]
    """The next observation; empty when done."""
    reward: float
    done: bool
    reason: str = ""
    """Why the episode ended, when done."""
    truncated: bool = False
    """Done because the policy's budget of turns ran out."""
    new_context: bool = False
    """The messages are a whole new prompt (the state is in them) instead of a continuation of the last one."""


class Env(Protocol):
    """Single use: made for one example, run for one episode, discarded."""

    def reset(self, seed: int) -> list[Message]: ...

    def step(self, text: str) -> Step: ...


@dataclass(slots=True, frozen=True)
class Demonstration:
    """A transcript for the supervised warm start: loss on the assistant's messages, on nothing else."""

    messages: list[Message]


class Task(Protocol):
    """A family of examples with their environment and score."""

    name: str
    rubric: Rubric

    def examples(self, split: str) -> list[Example]: ...

    def env(self, example: Example) -> Env: ...

    def demonstrations(self, split: str, *, num: int, seed: int) -> list[Demonstration]: ...

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks on this example, turn by turn."""
        ...

    def success(self, reward: float) -> bool:
        """Whether an episode with this reward counts as solved in evaluations."""
        ...
