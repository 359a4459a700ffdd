"""Registers CrafterReward-v1 and CrafterNoReward-v1 with gymnasium.

The package crafter (1.8.3) registers these ids only with gym, the predecessor of gymnasium. The
adapter changes the interface and nothing else: a step of crafter returns one flag, which is split
into the player's death (terminated) and the limit on the length (truncated).
"""

from typing import Any, ClassVar

import crafter  # pyright: ignore[reportMissingImports] (optional)
import gymnasium
import numpy as np
from gymnasium import spaces

for _name, _has_reward in (("CrafterReward-v1", True), ("CrafterNoReward-v1", False)):
    gymnasium.register(id=_name, entry_point=f"{__name__}:Crafter", kwargs={"reward": _has_reward})


class Crafter(gymnasium.Env):
    """Open world in which the player survives and unlocks achievements.

    The keyword arguments are those of crafter.Env. `size` defaults to a multiple of 9, the number
    of cells in the view, and `length` is the limit on the number of steps.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None, *, size: int = 252, **kwargs: Any) -> None:
        self.render_mode, self.size, self.kwargs = render_mode, size, kwargs
        self.world = crafter.Env(size=(size, size), **kwargs)
        self.names = list(self.world.action_names)
        self.action_space = spaces.Discrete(len(self.names))
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)

    def get_action_meanings(self) -> list[str]:
        """Return crafter's names of the actions."""
        return self.names

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start in a new world."""
        super().reset(seed=seed)
        world_seed = int(self.np_random.integers(2**31 - 1))
        self.world = crafter.Env(size=(self.size, self.size), seed=world_seed, **self.kwargs)
        return self.world.reset(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply an action. `discount` in crafter's info is 0 after the player's death."""
        observation, reward, is_over, info = self.world.step(int(action))
        is_dead = info["discount"] == 0
        return observation, float(reward), is_dead, bool(is_over) and not is_dead, {"achievements": info["achievements"]}

    def render(self) -> np.ndarray:
        """Return the view of the world and the inventory."""
        return self.world.render()
