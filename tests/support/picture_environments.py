"""Small gymnasium environments with pictures, which fail in every way that task=gymnasium handles.

The ids need this module: tests.support.picture_environments:Walk-v0.
"""

import ctypes
import enum
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

MODULE = "tests.support.picture_environments"


class Actions(enum.IntEnum):
    """Actions of `Walk`, counted from 2."""

    walk = 2
    rest = 3
    jump = 4


class Faults(enum.IntEnum):
    """Actions of `Faulty`."""

    walk = 0
    error = 1
    quit = 2
    crash = 3
    hang = 4
    slow = 5
    nan_reward = 6
    nan_observation = 7
    new_space = 8


class PictureEnv(gymnasium.Env):
    """Environment that shows a random picture of 12 x 8 pixels in every state."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (as in gymnasium)
    observation_space = spaces.Discrete(1)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_steps = 0
        self.draw()
        return self.observe(), {}

    def draw(self) -> None:
        self.picture = self.np_random.integers(0, 256, (8, 12, 3), np.uint8)

    def observe(self) -> Any:
        return 0

    def render(self) -> Any:
        return self.picture

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.draw()
        return self.observe(), 0.0, False, False, {}


class Walk(PictureEnv):
    """Random rewards, until a walk that is longer than `length` steps, or a jump.

    Rewards come from the environment's own generator and from numpy's global one.
    """

    observation_space = spaces.Dict({"mission": spaces.Text(99), "steps": spaces.Discrete(99)})

    def __init__(self, render_mode: str | None = None, *, length: int = 3, states_success: bool = False) -> None:
        super().__init__(render_mode)
        self.actions, self.action_space = Actions, spaces.Discrete(3, start=2)
        self.length, self.states_success = length, states_success

    def observe(self) -> Any:
        return {"mission": f"walk {self.length} steps, {self.num_steps} done", "steps": self.num_steps}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        observation, *_ = super().step(action)
        is_over = self.num_steps >= self.length or action == Actions.jump
        info = {"success": np.bool_(self.num_steps >= 2)} if self.states_success else {}
        return observation, self.np_random.random() + np.random.random(), is_over, False, info


class Still(PictureEnv):
    """Shows the same picture in every state and pays 1 per step, until gymnasium's time limit."""

    action_space = spaces.Discrete(2)

    def draw(self) -> None:
        self.picture = np.full((8, 12, 3), 99, np.uint8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, 1.0, *rest


class Faulty(PictureEnv):
    """Fails as its action says. `close` creates a file in the folder `closed`."""

    def __init__(self, render_mode: str | None = None, *, closed: str = "") -> None:
        super().__init__(render_mode)
        self.actions, self.action_space, self.closed = Faults, spaces.Discrete(len(Faults)), closed

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        match Faults(action):
            case Faults.error:
                raise ZeroDivisionError("an error of the environment")
            case Faults.quit:
                os._exit(3)
            case Faults.crash:
                ctypes.string_at(0)
            case Faults.hang:
                time.sleep(60)
            case Faults.slow:
                time.sleep(0.3)
            case Faults.nan_reward:
                reward = float("nan")
            case Faults.nan_observation:
                observation = {"a": [np.zeros(2), np.array([0.0, np.nan], np.float32)]}
            case Faults.new_space:
                self.action_space = spaces.Discrete(2)
        return observation, reward, *rest

    def close(self) -> None:
        if self.closed:
            (Path(self.closed) / str(os.getpid())).touch()


SPACES = {
    "multi_discrete": spaces.MultiDiscrete([3, 2], start=[0, 5]),
    "box": spaces.Box(np.array([-1, 0], np.float32), np.array([0.7, 10], np.float32)),
    "square": spaces.Box(-1, 1, (2, 2), np.float64),
    "integers": spaces.Box(-3, 3, (1,), np.int8),
    "unbounded": spaces.Box(-1, np.inf, (2,)),
    "large": spaces.Box(-1, 1, (17,)),
    "empty": spaces.Box(-1, 1, (0,)),
    "many_choices": spaces.MultiDiscrete([2] * 17),
    "binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"a": spaces.Discrete(2)}),
    "tuple": spaces.Tuple([spaces.Discrete(2)]),
    "text": spaces.Text(5),
    "discrete": spaces.Discrete(4),
}


class AnySpace(PictureEnv):
    """Has the action space with the name `space`. Its observation is the text of the last action."""

    observation_space = spaces.Text(99)

    def __init__(self, render_mode: str | None = None, *, space: str = "discrete") -> None:
        super().__init__(render_mode)
        by_chance = spaces.Discrete(1 + int.from_bytes(os.urandom(7)))
        self.action_space, self.last = by_chance if space == "random" else SPACES[space], "none"

    def observe(self) -> str:
        return self.last

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.last = f"{action.dtype} {action.tolist()}"
        return super().step(action)


class Meanings(AnySpace):
    """Names its actions as the Atari environments do."""

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "UP", "DOWN", "FIRE"]


class Commands(AnySpace):
    """Takes texts with blanks. Its observation is the last text."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Text(99, charset="abcdefghijklmnopqrstuvwxyz ")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.last = action
        return PictureEnv.step(self, action)


class TwoActions(gymnasium.ActionWrapper):
    """Offers two actions of `Walk`: its last and its first one, with the numbers of its first two."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(2, start=2)

    def action(self, action: Any) -> Any:
        return np.int64([Actions.jump, Actions.walk][action - 2])


class AtReset(PictureEnv):
    """Fails when it is created, reset or rendered, as `fault` says."""

    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, *, fault: str) -> None:
        super().__init__(render_mode)
        self.fault = fault
        if fault == "module":
            import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        _, info = super().reset(**given)
        match self.fault:
            case "crash":
                ctypes.string_at(0)
            case "hang":
                time.sleep(60)
            case "quit":
                os._exit(0)
            case "error":
                raise ZeroDivisionError("an error of the environment")
            case "prints":
                print('{"grammar": {}}')
        return (np.array([np.nan]) if self.fault == "nan" else 0), info

    def render(self) -> Any:
        match self.fault:
            case "package":
                raise gymnasium.error.DependencyNotInstalled('pygame is not installed,\n run `pip install "gymnasium[box2d]"`')
            case "list":
                return [self.picture]
            case "float":
                return self.picture / 255
            case "gray":
                return self.picture[..., 0]
        return self.picture


class Leftover(PictureEnv):
    """Shows how many environments were reset before in this process or the one it was forked from.

    The first reset of a process leaves a thread or an open file behind, as `leaves` says.
    """

    num_resets = 0
    left: ClassVar[list[object]] = []
    observation_space, action_space = spaces.Text(99), spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, *, leaves: str = "") -> None:
        super().__init__(render_mode)
        self.leaves = leaves

    def observe(self) -> str:
        if self.num_steps == 0:
            Leftover.num_resets += 1
            if self.leaves == "thread":
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            elif self.leaves == "file":
                self.left.append(os.open("/dev/null", os.O_RDONLY))
        return f"reset {Leftover.num_resets}"


class NoPictures(PictureEnv):
    """Renders only text."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    action_space = spaces.Discrete(2)


def make_two_actions(**kwargs: Any) -> gymnasium.Env:
    return TwoActions(Walk(**kwargs))


for _name in ("Walk", "Still", "Faulty", "AnySpace", "Commands", "Meanings", "AtReset", "Leftover", "NoPictures"):
    gymnasium.register(id=f"{_name}-v0", entry_point=f"{MODULE}:{_name}")
gymnasium.register(id="TwoActions-v0", entry_point=make_two_actions)
