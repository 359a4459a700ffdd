"""FrozenLake with a new map for each seed, and the rewards of VAGEN.

Maps follow the rules of VAGEN (github.com/RAGEN-AI/VAGEN, commit d2b8b30): a square of ice with
holes, in which start and goal are two different random cells, with a way between them. The ice is
not slippery. The rewards are 10 at the goal and 0 elsewhere, which is gymnasium's reward of 1 plus
VAGEN's bonus of 9. Maps are drawn by this module, so equal seeds give other maps than VAGEN's.

Rules, rendering and moves are those of gymnasium's FrozenLakeEnv, which needs pygame.
"""

from collections import deque
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

GOAL_REWARD = 10
MAX_DRAWS = 10_000
"""Maximum number of maps that are drawn to find one with a way from start to goal."""


class FrozenLake(gymnasium.Env):
    """Walk over ice to the goal; an episode ends at the goal or in a hole."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, *, size: int = 4, frozen: float = 0.8, is_slippery: bool = False) -> None:
        """Create an environment; its map is drawn by `reset`.

        Args:
            render_mode: Render mode of gymnasium.
            size: Number of rows and of columns.
            frozen: Probability that a cell is ice instead of a hole.
            is_slippery: True if moves may go sideways, as in gymnasium.
        """
        if not 2 <= size <= 16 or not 0 < frozen <= 1:
            raise ValueError(f"size={size} must be in 2..16 and frozen={frozen} in (0, 1]")
        self.render_mode, self.size, self.frozen, self.is_slippery = render_mode, size, frozen, is_slippery
        self.action_space, self.observation_space = spaces.Discrete(4), spaces.Discrete(size * size)
        self.lake: FrozenLakeEnv | None = None

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions, in gymnasium's order."""
        return ["Left", "Down", "Right", "Up"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Draw a map and start at its start."""
        super().reset(seed=seed)
        self.close()
        self.lake = FrozenLakeEnv(
            render_mode=self.render_mode, desc=self._draw_map(), is_slippery=self.is_slippery, reward_schedule=(GOAL_REWARD, 0, 0)
        )
        observation, _ = self.lake.reset(seed=int(self.np_random.integers(2**31)))
        return int(observation), {}

    def _draw_map(self) -> list[str]:
        for _ in range(MAX_DRAWS):
            cells = np.where(self.np_random.random((self.size, self.size)) < self.frozen, "F", "H")
            start, goal = self.np_random.choice(self.size**2, 2, replace=False)
            cells.flat[start], cells.flat[goal] = "S", "G"
            if has_way(cells):
                return ["".join(row) for row in cells]
        raise ValueError(f"none of {MAX_DRAWS} maps with size={self.size} and frozen={self.frozen} has a way to the goal")

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Move in one direction."""
        assert self.lake is not None, "step before reset"
        observation, reward, is_terminated, *_ = self.lake.step(action)
        info = {"success": reward == GOAL_REWARD} if is_terminated else {}
        return int(observation), float(reward), bool(is_terminated), False, info

    def render(self) -> Any:
        """Return the picture of gymnasium's FrozenLake."""
        assert self.lake is not None, "render before reset"
        return self.lake.render()

    def close(self) -> None:
        """Close gymnasium's environment."""
        if self.lake is not None:
            self.lake.close()


def has_way(cells: np.ndarray) -> bool:
    """Return True if the goal can be reached from the start without stepping into a hole."""
    size, start = len(cells), tuple(int(at) for at in np.argwhere(cells == "S")[0])
    queue, known = deque([start]), {start}
    while queue:
        row, column = queue.popleft()
        if cells[row, column] == "G":
            return True
        for near in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if min(near) >= 0 and max(near) < size and near not in known and cells[near] != "H":
                known.add(near)
                queue.append(near)
    return False
