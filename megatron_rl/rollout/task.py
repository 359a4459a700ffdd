"""What a task is to the rest of the program: examples, single-use environments that speak messages, and a rubric.

A task of your own is a subclass that has `examples` and `env`; all else has defaults (docs/extend.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.config import TaskSettings, require
from megatron_rl.data.transcripts import load_demonstrations
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.types import Demonstration, Example, Message, Rollout, ToolCall

if TYPE_CHECKING:  # it brings openai
    from megatron_rl.rewards.judge import Judge


@dataclass(slots=True, frozen=True)
class Step:
    """What the environment says after a reply of the policy."""

    messages: list[Message]
    """The next observation; empty when done."""
    reward: float
    done: bool
    reason: str = ""
    """Why the episode ended, when done."""
    tool_call: ToolCall | None = None
    """What the reply asked for, if it asked for anything."""
    action_char: int | None = None
    """Character of the reply at which the action begins, behind the thoughts (algo.thought_logprob_scale), if the reply has such parts."""
    is_new_prompt: bool = False
    """The messages are a whole new prompt (the state is in them) instead of a continuation of the last one."""


class Env(ABC):
    """Single use: made for one example, run for one episode, closed however that ends. Raises InfraError for trouble that is ours."""

    @property
    def state(self) -> str:
        """A name for the state that the next reply answers, the same in every episode of an example that comes to that state, at whatever
        turn. Empty: it is not told, and algo.turn_credit=gigpo compares the turn with no other."""
        return ""

    @abstractmethod
    async def reset(self, seed: int) -> list[Message]: ...

    @abstractmethod
    async def step(self, text: str) -> Step: ...

    async def close(self) -> None:
        """Give back what the episode took."""
        return


class Task(ABC):
    """A family of examples with their environment and score."""

    Options: ClassVar[type | None] = None
    """A dataclass of settings that this task alone has; settings.options is one of it."""
    reward_names: ClassVar[Sequence[str]] = ()
    """Names that task.reward may have besides those of a user's own functions. Empty: the task is scored in one way only."""
    rubric: Rubric = Rubric(turn_terms={"return": TurnRewardTerm(environment_rewards, averages_turns=False)})
    """The undiscounted sum of what the environment gives, where a task does not say otherwise."""
    judge: "Judge | None" = None
    """Whom its rubric asks."""
    runs_code: ClassVar[bool] = False
    """Its episodes have boxes of task.sandbox."""
    appends_to_sequence: ClassVar[bool] = True
    """Whether its environments append messages behind a reply. False where an episode has one reply, or every turn is a new prompt."""
    stop: Sequence[str] = ()
    """A reply ends where it has written one of these (which stays in it), or where the policy ends it."""

    def __init__(self, settings: TaskSettings) -> None:
        self.settings, self.name = settings, settings.name

    async def start(self) -> None:
        """Take what episodes share (sandbox, judge), in the event loop that runs them. Called once, on the leader of each engine."""
        return

    async def close(self) -> None:
        """Give it back."""
        return

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """Those of split train or eval."""

    @abstractmethod
    def env(self, example: Example) -> Env:
        """A new environment for one episode."""

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Of a split; each is asked for when it is trained on, and may be made only then. A task that makes none has the user's transcripts
        alone, which every task has (sft.py)."""
        return load_demonstrations(self.settings.data, split, num=num, seed=seed)

    def success(self, rollout: Rollout) -> bool:
        """Whether a scored episode counts as solved in evaluations."""
        return self.rubric.is_solved(rollout)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What an evaluation says of these scored episodes besides, as eval/greedy_NAME: `success` and `return` take the place of the means
        where a task knows better. Rollout.group is a position in `examples`."""
        return {}


def require_task(name: str, task: object) -> None:
    """ValueError: what a user's own file calls a task is none, or only half of one."""
    key = f"tasks[{name!r}]"
    require(isinstance(task, type) and issubclass(task, Task), key, task, "must be a class below megatron_rl.rollout.task.Task")
    lacking = ", ".join(sorted(task.__abstractmethods__))
    require(not lacking, key, task.__name__, f"lacks {lacking}")
    require(task.Options is None or is_dataclass(task.Options), f"{key}.Options", task.Options, "must be a dataclass")
