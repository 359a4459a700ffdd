"""Defines the task interface: examples, single-use environments and a rubric.

A custom task subclasses `Task` and implements `examples` and `env`; everything else has a default
(docs/extend.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from megatron_rl.config import TaskSettings, require
from megatron_rl.data.transcripts import TRANSCRIPTS_SPLIT, load_demonstrations
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.types import Demonstration, Example, Message, Rollout, ToolCall

if TYPE_CHECKING:  # imports openai
    from megatron_rl.rewards.judge import Judge
    from megatron_rl.rollout.engine import ResponseSize

Options = TypeVar("Options")


@dataclass(slots=True, frozen=True)
class Step:
    """Result of one environment step, which follows a response of the policy."""

    messages: list[Message]
    """Messages of the next observation. If `done` is True, they are used only if `is_truncated` is
    True, for the value of the final state (algo.bootstrap_truncated), and may be empty.
    """
    reward: float
    """Reward given by the environment for this step."""
    done: bool
    reason: str = ""
    """Reason why the episode ended if `done` is True. Otherwise, the environment's note on the
    state, which is recorded if a limit of the policy ends the episode after this step.
    """
    is_truncated: bool = False
    """True if the environment ended the episode in a state that is not terminal, as `truncated` of
    gymnasium; used only if `done` is True.
    """
    tool_call: ToolCall | None = None
    """Tool call in the response, or None."""
    action_char: int | None = None
    """Index of the character in the response at which the action begins, after the thoughts. Used
    by algo.thought_logprob_scale. None if the response is not divided into thoughts and action.
    """
    is_new_prompt: bool = False
    """True if `messages` are a complete prompt, including the environment's state, and start a new
    sequence; False if `messages` continue the current sequence.
    """
    after_turn: int | None = None
    """Index of the turn that `messages` follow; None for the last turn. If an earlier turn is
    named, `messages` start a branch that shares the tokens up to the end of that turn. Not used if
    `is_new_prompt` is True.
    """


class Env(ABC):
    """Environment of one episode.

    An environment is created for one example, used for one episode, and closed regardless of how
    the episode ends. Methods raise InfraError for infrastructure failures.
    """

    @property
    def state(self) -> str:
        """Name of the environment's current state; empty if unknown.

        Equal states of the same example must have the same name in all episodes and turns.
        algo.turn_credit=gigpo compares turns with the same state name, except turns with an empty
        name.
        """
        return ""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end the next response, in addition to those of the task (Task.stop)."""
        return ()

    @property
    def untrained_turns(self) -> Sequence[int]:
        """Indices of the turns that have no loss; read at the end of the episode."""
        return ()

    @abstractmethod
    async def reset(self, seed: int) -> list[Message]:
        """Start the episode and return the messages of the prompt."""
        ...

    @abstractmethod
    async def step(self, text: str) -> Step:
        """Apply the policy's response `text` and return the result."""
        ...

    def note_response_size(self, size: "ResponseSize") -> None:
        """Receive the numbers of tokens of the response that the next call of `step` applies.

        The default does nothing. The method is not called if the numbers are unknown.
        """
        return

    async def close(self) -> None:
        """Release the resources of the episode."""
        return


class Task(ABC):
    """Defines a set of examples, their environments, and their rewards."""

    Options: ClassVar[type | None] = None
    """Dataclass of settings specific to this task; `settings.options` is an instance of this class.
    """
    reward_names: ClassVar[Sequence[str]] = ()
    """Accepted values of task.reward, in addition to the names of user-defined reward functions.
    Empty if the task has only one reward.
    """
    rubric: Rubric = Rubric(turn_terms={"return": TurnRewardTerm(environment_rewards, averages_turns=False)})
    """Rubric that scores the episodes; the default is the undiscounted sum of environment rewards.
    """
    judge: "Judge | None" = None
    """Judge used by the rubric."""
    runs_code: ClassVar[bool] = False
    """True if episodes run code in the sandbox (task.sandbox)."""
    appends_to_sequence: ClassVar[bool] = True
    """True if observations are appended to the sequence after a response. False if every episode
    has a single response, or if every turn starts from a new prompt.
    """
    demonstration_splits: ClassVar[tuple[str, ...]] = (TRANSCRIPTS_SPLIT,)
    """Splits of demonstrations for supervised training."""
    stop: Sequence[str] = ()
    """Strings that end a response, in addition to the policy's own end token. The stop string is
    part of the response.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self.settings, self.name = settings, settings.name

    async def start(self) -> None:
        """Acquire the resources that episodes share, such as a sandbox or a judge.

        Called once on the leader of each engine, in the event loop that runs the episodes.
        """
        return

    async def close(self) -> None:
        """Release the resources acquired by `start`."""
        return

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """Return the examples of `split`, which is "train" or "eval"."""

    @abstractmethod
    def env(self, example: Example) -> Env:
        """Return a new environment for one episode."""

    def default_demonstration_split(self) -> str:
        """Return the split that is used if sft.splits is empty.

        Raises:
            ValueError: The task has several splits.
        """
        names = ", ".join(self.demonstration_splits)
        example = f"'sft.splits=[{self.demonstration_splits[0]}]' 'sft.steps=[N]'"
        require(len(self.demonstration_splits) == 1, "sft.splits", [], f"choose from the task's splits, {names}: {example}")
        return self.demonstration_splits[0]

    def demonstrations(self, split: str, *, num: int, seed: int) -> Sequence[Demonstration]:
        """Return demonstrations of a split for supervised training.

        The returned sequence may create each demonstration lazily, since a demonstration is
        accessed only when it is trained on. The default implementation reads the transcripts in
        task.data.demonstrations.
        """
        return load_demonstrations(self.settings.data, split, num=num, seed=seed)

    def find_prompt_mismatch(self, messages: Sequence[Message]) -> str:
        """Describe how a transcript's prompt differs from the prompts of this task.

        Return '' if there is no difference, or if the task cannot tell.
        """
        return ""

    def find_action(self, text: str) -> int | None:
        """Return the index of the character at which the action of a response begins.

        Used by distill.apply_to=responses, where the thoughts before the action have a loss. Return
        None if the response has no action, or is not divided; the whole response then has a loss.
        """
        return None

    def success(self, rollout: Rollout) -> bool:
        """Return True if a scored rollout counts as solved in evaluations."""
        return self.rubric.is_solved(rollout)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return additional evaluation metrics for scored rollouts, logged as eval/greedy_NAME.

        A metric named `success` or `return` replaces the default metric of that name. Rollout.group
        is an index into `examples`.
        """
        return {}


def require_options(settings: TaskSettings, kind: type[Options]) -> Options:
    """Return the options of the task, with defaults if none are set.

    Raises:
        ValueError: The options are those of a different task.
    """
    options = kind() if settings.options is None else settings.options
    remedy = f"are options of a different task; choose task={settings.name}"
    require(isinstance(options, kind), "task.options", options, remedy)
    return cast(Options, options)


def require_task(name: str, task: Any) -> None:
    """Raise ValueError unless a user-defined task is a concrete subclass of `Task`."""
    key = f"tasks[{name!r}]"
    require(isinstance(task, type) and issubclass(task, Task), key, task, "must be a subclass of megatron_rl.rollout.task.Task")
    lacking = ", ".join(sorted(task.__abstractmethods__))
    require(not lacking, key, task.__name__, f"does not implement {lacking}")
    require(task.Options is None or is_dataclass(task.Options), f"{key}.Options", task.Options, "must be a dataclass")
