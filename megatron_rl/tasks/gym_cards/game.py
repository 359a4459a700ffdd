"""Base classes that turn gymnasium games into tasks and implement the options shared by all games.

Each observation contains everything that the policy can know about the state, so every turn is a
new sequence: one user message with an image and the prompt. A reply without a valid action is
always recorded as a failed call (ToolCall.error) and uses up a turn. The setting
task.options.invalid determines the reward and the next state:

- penalize: the reward is -1, the same as for a bad move, and the state does not change.
- repeat: the reward is 0, the state does not change, and the same observation is returned again.
- noop: the reward is 0, and the environment makes a move that has no effect. In EZPoints and
  Points24, the move appends a blank, which counts toward the length limit of the formula.
  NumberLine and Blackjack do not support this option.
- random: the environment takes a uniformly random action, drawn with the episode's seed, and
  returns the reward of that action. In this case, RL4VLM also takes a random action but records no
  failed call. With this option, a policy that generates nonsense earns the return of random play.
  The reward of a random action depends on a random draw and not on the sampled tokens.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import gymnasium
from PIL.Image import Image as Picture

from megatron_rl.config import TaskSettings, require
from megatron_rl.config.task_options import GameOptions
from megatron_rl.rollout.task import Env, Step, Task, require_options
from megatron_rl.tasks.gym_cards.card_action_parser import ACTION_PARSERS, InvalidAction, find_action_start
from megatron_rl.types import Demonstration, Example, Message, Rollout, ToolCall

INVALID_ACTION_REWARD = -1.0
Plan = TypeVar("Plan")


class StateView(NamedTuple):
    """Observation of a game's state: the image, the prompt and the name of the state."""

    picture: Picture
    prompt: str
    state_name: str = ""
    """Name of the state, returned by `Env.state`."""


def make_user_message(picture: Picture, prompt: str) -> Message:
    """Return a user message with an image and a prompt."""
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]}


def parse_reply(text: str, options: GameOptions, actions: Sequence[str]) -> tuple[int | InvalidAction, ToolCall]:
    """Parse a reply into an action and a ToolCall that records the action.

    Returns:
        A pair (action, call). `action` is an index into `actions`, or the reason why the reply has
        no valid action. If there is no valid action, `call` contains the reason as its error.
    """
    action = ACTION_PARSERS[options.reading](text, actions)
    if isinstance(action, InvalidAction):
        return action, ToolCall(tool="move", source=text, error=str(action), ran=False)
    return action, ToolCall(tool="move", source=actions[action])


class GameEnv(Env):
    """Environment for one episode of a game that begins in a given start state."""

    def __init__(
        self, game: gymnasium.Env, start: Mapping[str, object], *,
        actions: Sequence[str], options: GameOptions, view_state: Callable[[], StateView], noop_action: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """Create the environment for one episode.

        Args:
            game: Game to run.
            start: Argument `options` for the game's `reset`.
            actions: Names of the actions, in the order of the action indices.
            options: Reply format and effect of invalid replies.
            view_state: Function that returns the observation of the game's current state.
            noop_action: Function that returns the index of an action that changes nothing; None if
                the game has no such action.
        """
        self.game, self.start, self.actions, self.options, self.view_state, self.noop_action = (
            game,
            dict(start),
            actions,
            options,
            view_state,
            noop_action,
        )
        self.rng = random.Random()

    @property
    def state(self) -> str:
        """Name of the current state."""
        return self.view_state().state_name

    async def reset(self, seed: int) -> list[Message]:
        """Start the game and return the first observation."""
        self.rng.seed(seed)
        self.game.reset(seed=seed, options=self.start)
        return [self._observation()]

    async def step(self, text: str) -> Step:
        """Apply the action in a reply, or the configured effect of an invalid reply."""
        return replace(self._handle_reply(text), action_char=find_action_start(text))

    def _handle_reply(self, text: str) -> Step:
        action, call = parse_reply(text, self.options, self.actions)
        if not isinstance(action, InvalidAction):
            return self._play_action(action, call)
        if self.options.invalid == "random":
            return self._play_action(self.rng.randrange(len(self.actions)), call)
        if self.options.invalid == "noop":
            assert self.noop_action is not None, "options of a game without such a move refuse it"
            return replace(self._play_action(self.noop_action(), call), reward=0.0)
        reward = INVALID_ACTION_REWARD if self.options.invalid == "penalize" else 0.0
        return Step(messages=[self._observation()], reward=reward, done=False, tool_call=call, is_new_prompt=True)

    def _observation(self) -> Message:
        shown = self.view_state()
        return make_user_message(shown.picture, shown.prompt)

    def _play_action(self, action: int, call: ToolCall) -> Step:
        """Apply an action and return the step.

        The truncation flag of the game is ignored, because task.max_turns cannot exceed the game's
        step limit (`require_turns`).
        """
        _, reward, is_over, _, _ = self.game.step(action)
        if is_over:
            return Step(messages=[], reward=float(reward), done=True, reason="goal" if float(reward) > 0 else "over", tool_call=call)
        return Step(messages=[self._observation()], reward=float(reward), done=False, tool_call=call, is_new_prompt=True)


class GameTask(Task):
    """Base class of tasks that run gymnasium games.

    An episode succeeds if its return is above 0.
    """

    Options: ClassVar[type[GameOptions]] = GameOptions
    demonstration_splits = ("correct", "biased")
    appends_to_sequence = False

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        self.options: Any = require_options(settings, self.Options)

    def require_turns(self, max_steps: int, *, eval_max_steps: int) -> None:
        """Raise ValueError if the configured number of turns exceeds the game's step limit."""
        for key, turns, steps in (
            ("task.max_turns", self.settings.max_turns, max_steps), ("task.eval_max_turns", self.settings.eval_max_turns, eval_max_steps)
        ):  # fmt: skip
            require(turns <= steps, key, turns, f"must be at most {steps} (steps per game)")

    def find_action(self, text: str) -> int | None:
        """Return the index of the last `"action"` in a response."""
        return find_action_start(text)

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the fraction of replies without a valid action, as the metric `invalid`."""
        return {"invalid": invalid_fraction(rollouts)}


def invalid_fraction(rollouts: Sequence[Rollout]) -> float:
    """Return the fraction of replies without a valid action."""
    calls = [turn.tool_call for rollout in rollouts for turn in rollout.turns if turn.tool_call is not None]
    return sum(not call.ran for call in calls) / max(len(calls), 1)


@dataclass(slots=True, frozen=True)
class LazyTranscripts(Sequence[Demonstration], Generic[Plan]):
    """Single-turn demonstrations with images that are drawn on access."""

    plans: list[Plan]
    write_transcript: Callable[[Plan], list[Message]]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        return Demonstration(self.write_transcript(self.plans[index]))
