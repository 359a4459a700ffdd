"""What a task is to the rest of the program: examples, single-use environments that speak messages, and a rubric."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.rewards.rubric import Rubric
from megatron_rl.types import Demonstration, Example, Message, Rollout, ToolCall


@dataclass(slots=True, frozen=True)
class Step:
    """What the environment says after a reply of the policy."""

    messages: list[Message]
    """The next observation; empty when done."""
    reward: float
    done: bool
    reason: str = ""
    """Why the episode ended, when done."""
    call: ToolCall | None = None
    """What the reply asked for, if it asked for anything."""
    new_context: bool = False
    """The messages are a whole new prompt (the state is in them) instead of a continuation of the last one."""


class Env(Protocol):
    """Single use: made for one example, run for one episode, closed however that ends. Raises HostFault for trouble that is ours."""

    async def reset(self, seed: int) -> list[Message]: ...

    async def step(self, text: str) -> Step: ...

    async def close(self) -> None: ...


class Task(Protocol):
    """A family of examples with their environment and score."""

    name: str
    rubric: Rubric
    stop: Sequence[str]
    """A reply ends where it has written one of these (which stays in it), or where the policy ends it."""

    async def start(self) -> None:
        """Take what episodes share (sandbox, judge), in the event loop that runs them. Called once, on the leader of each engine."""
        ...

    async def close(self) -> None: ...

    def examples(self, split: str) -> Sequence[Example]: ...

    def env(self, example: Example) -> Env: ...

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Each is asked for when it is trained on, and may be made only then."""
        ...

    def gold(self, example: Example) -> list[str]:
        """Replies that earn full marks on this example, turn by turn."""
        ...

    def success(self, rollout: Rollout) -> bool:
        """Whether a scored episode counts as solved in evaluations."""
        ...
