"""What the games are as tasks: an episode of a gymnasium environment in messages, and what their options mean.

The picture is the state, so every turn is a new context: one user message with the picture and the prompt. A reply without an action is a
call that went wrong, always counted (ToolCall.error), and uses up a turn; task.options.invalid says what else it does:

    penalize    pays -1, the game stands still
    noop        pays nothing, the game stands still
    repeat      the same, and the policy is told why and asked again
    random      plays an action drawn uniformly, and pays what that earns. So does RL4VLM, which counts nothing: a policy that writes
                nonsense earns what chance earns, and a turn's reward depends on a draw that is in nobody's logprobs
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import gymnasium
from PIL.Image import Image as Picture

from megatron_rl.config import TaskSettings, require
from megatron_rl.tasks.base import Env, Step, Task
from megatron_rl.tasks.gym_cards.replies import READINGS, Invalid, action_at
from megatron_rl.tasks.options import GameOptions
from megatron_rl.types import Demonstration, Message, ToolCall

PENALTY = -1.0
Shown = tuple[Picture, str]
"""The picture of a state, and the prompt."""
Plan = TypeVar("Plan")


def asked(picture: Picture, prompt: str) -> Message:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]}


class GameEnv(Env):
    """One episode of a game that starts as said."""

    def __init__(
        self, game: gymnasium.Env, start: Mapping[str, object], *,
        actions: Sequence[str], options: GameOptions, show: Callable[[], Shown],
    ) -> None:  # fmt: skip
        """`start` is what the game's reset takes as options; `show` looks at the game."""
        self.game, self.start, self.actions, self.options, self.show = game, dict(start), actions, options, show
        self.dice = random.Random()

    async def reset(self, seed: int) -> list[Message]:
        self.dice.seed(seed)
        self.game.reset(seed=seed, options=self.start)
        return [asked(*self.show())]

    async def step(self, text: str) -> Step:
        played = self._answer(text)
        return replace(played, action_at=action_at(text))

    def _answer(self, text: str) -> Step:
        action = READINGS[self.options.reading](text, self.actions)
        if not isinstance(action, Invalid):
            return self._play(action, ToolCall(tool="move", source=self.actions[action]))
        told = f"Your last reply was invalid: {action}." if self.options.invalid == "repeat" else ""
        call = ToolCall(tool="move", source=text, text=told, error=str(action), ran=False)
        if self.options.invalid == "random":
            return self._play(self.dice.randrange(len(self.actions)), call)
        picture, prompt = self.show()
        reward = PENALTY if self.options.invalid == "penalize" else 0.0
        messages = [asked(picture, f"{told} {prompt}" if told else prompt)]
        return Step(messages=messages, reward=reward, done=False, call=call, new_context=True)

    def _play(self, action: int, call: ToolCall) -> Step:
        """A game's own limit of steps is no end here: task.max_turns is at most as long."""
        _, reward, is_over, _, _ = self.game.step(action)
        if is_over:
            return Step(messages=[], reward=float(reward), done=True, reason="goal" if reward > 0 else "over", call=call)
        return Step(messages=[asked(*self.show())], reward=float(reward), done=False, call=call, new_context=True)


class GameTask(Task):
    """A game for the trainer. An episode succeeds when its return is above 0."""

    Options = GameOptions

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


@dataclass(slots=True, frozen=True)
class Transcripts(Sequence[Demonstration], Generic[Plan]):
    """Single turns, whose pictures are drawn when they are asked for."""

    plans: list[Plan]
    write: Callable[[Plan], list[Message]]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Demonstration:
        return Demonstration(self.write(self.plans[index]))
