"""What the games are as tasks: an episode of a gymnasium environment in messages, and what their options mean.

The picture is the state, so every turn is a new context: one user message with the picture and the prompt. A reply without an action is a
call that went wrong, always counted (ToolCall.error), and uses up a turn; task.options.invalid says what else it does:

    penalize    pays -1, in all four games what they take for a bad move; the game stands still
    repeat      pays nothing; the game stands still, and the same observation is shown again
    noop        pays nothing; the game makes the move that changes nothing: in the points games a blank takes up an entry of the
                formula, as a number without a card does. NumberLine and Blackjack have no such move and refuse it
    random      plays an action drawn uniformly by the episode's seed, and pays what that earns. So does RL4VLM, which counts nothing: a
                policy that writes nonsense earns what chance earns, and a turn's reward depends on a draw that is in nobody's logprobs
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import gymnasium
from PIL.Image import Image as Picture

from megatron_rl.config import TaskSettings, require
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.tasks.gym_cards.action_parser import ACTION_PARSERS, InvalidAction, find_action_start
from megatron_rl.tasks.task_options import GameOptions
from megatron_rl.types import Demonstration, Example, Message, Rollout, ToolCall

INVALID_ACTION_REWARD = -1.0
Plan = TypeVar("Plan")


class StateView(NamedTuple):
    """What a policy sees of a state."""

    picture: Picture
    prompt: str
    state_name: str = ""
    """Env.state."""


def make_user_message(picture: Picture, prompt: str) -> Message:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]}


def parse_reply(text: str, options: GameOptions, actions: Sequence[str]) -> tuple[int | InvalidAction, ToolCall]:
    """The action that a reply names, and the reply as a call: of the action, or one that went wrong."""
    action = ACTION_PARSERS[options.reading](text, actions)
    if isinstance(action, InvalidAction):
        return action, ToolCall(tool="move", source=text, error=str(action), ran=False)
    return action, ToolCall(tool="move", source=actions[action])


class GameEnv(Env):
    """One episode of a game that starts as said."""

    def __init__(
        self, game: gymnasium.Env, start: Mapping[str, object], *,
        actions: Sequence[str], options: GameOptions, view_state: Callable[[], StateView], noop_action: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """`start` is what the game's reset takes as options; `view_state` looks at the game; `noop_action` is the move that changes
        nothing."""
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
        return self.view_state().state_name

    async def reset(self, seed: int) -> list[Message]:
        self.rng.seed(seed)
        self.game.reset(seed=seed, options=self.start)
        return [self._observation()]

    async def step(self, text: str) -> Step:
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
        """A game's own limit of steps is no end here: task.max_turns is at most as long."""
        _, reward, is_over, _, _ = self.game.step(action)
        if is_over:
            return Step(messages=[], reward=float(reward), done=True, reason="goal" if reward > 0 else "over", tool_call=call)
        return Step(messages=[self._observation()], reward=float(reward), done=False, tool_call=call, is_new_prompt=True)


class GameTask(Task):
    """A game for the trainer. An episode succeeds when its return is above 0."""

    Options = GameOptions
    appends_to_sequence = False

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        settings.require_no_words()
        options = self.Options() if settings.options is None else settings.options
        require(isinstance(options, self.Options), "task.options", options, f"are not those of this task; choose task={self.name}")
        self.options: Any = options

    def require_turns(self, max_steps: int, *, eval_max_steps: int) -> None:
        """ValueError where an episode could go on when its game is over."""
        for key, turns, steps in (
            ("task.max_turns", self.settings.max_turns, max_steps), ("task.eval_max_turns", self.settings.eval_max_turns, eval_max_steps)
        ):  # fmt: skip
            require(turns <= steps, key, turns, f"the game has {steps} steps, use no more")

    def extra_metrics(self, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The share of replies without an action."""
        calls = [turn.tool_call for rollout in rollouts for turn in rollout.turns if turn.tool_call is not None]
        return {"invalid": sum(not call.ran for call in calls) / max(len(calls), 1)}


@dataclass(slots=True, frozen=True)
class LazyTranscripts(Sequence[Demonstration], Generic[Plan]):
    """Single turns, whose pictures are drawn when they are asked for."""

    plans: list[Plan]
    write_transcript: Callable[[Plan], list[Message]]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        return Demonstration(self.write_transcript(self.plans[index]))
