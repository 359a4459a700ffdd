"""Sokoban with a new room for each seed, and the rewards of VAGEN.

A step costs 0.1. A box that is pushed onto a target earns 1, and a box that is pushed off a target
costs 1. When all boxes are on targets, the last step earns 10 more and the episode ends. These
numbers and the default room (6 x 6 cells, one box, a solution of at most 5 moves) are those of
VAGEN (github.com/RAGEN-AI/VAGEN, commit d2b8b30), which plays gym-sokoban 0.0.6. Rooms and pictures
are made by this module, so they differ from VAGEN's.

A room is a square with walls around it. The cells inside are walls with probability `walls`.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

Cell = tuple[int, int]
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Row and column offset of each action, in the order of the action numbers."""
TILE = 32
"""Side of a cell in pixels."""
FLOOR, WALL, TARGET, BOX, PLAYER = (235, 230, 220), (110, 75, 55), (215, 30, 40), (245, 195, 40), (40, 150, 70)
MAX_DRAWS = 100_000
"""Maximum number of rooms that are drawn to find one with a solution of the wanted length."""


class Sokoban(gymnasium.Env):
    """Push every box onto a target."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self, render_mode: str | None = None, *, size: int = 6, num_boxes: int = 1, max_moves: int = 5, walls: float = 0.15
    ) -> None:
        """Create an environment; its room is drawn by `reset`.

        Args:
            render_mode: Render mode of gymnasium.
            size: Number of rows and of columns, including the walls around the room.
            num_boxes: Number of boxes and of targets.
            max_moves: Maximum length of the shortest solution.
            walls: Probability that a cell inside is a wall.
        """
        if not (5 <= size <= 10 and 1 <= num_boxes <= 3 and 1 <= max_moves <= 40 and 0 <= walls <= 0.5):
            given = f"size={size}, num_boxes={num_boxes}, max_moves={max_moves}, walls={walls}"
            raise ValueError(f"{given} must be in 5..10, 1..3, 1..40 and 0..0.5")
        self.render_mode, self.size, self.num_boxes, self.max_moves, self.walls = render_mode, size, num_boxes, max_moves, walls
        self.action_space = spaces.Discrete(len(MOVES))
        self.observation_space = spaces.Box(0, 255, (size * TILE, size * TILE, 3), np.uint8)

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions."""
        return list(MOVES)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw a room that can be solved; the info has the length of its shortest solution."""
        super().reset(seed=seed)
        for _ in range(MAX_DRAWS):
            self._draw_room()
            shortest = count_moves(self.floor, self.player, self.boxes, self.targets, limit=self.max_moves)
            if shortest:
                return self.render(), {"shortest": shortest}
        given = f"size={self.size}, num_boxes={self.num_boxes}, walls={self.walls}"
        raise ValueError(f"none of {MAX_DRAWS} rooms with {given} can be solved in 1..{self.max_moves} moves (max_moves)")

    def _draw_room(self) -> None:
        inside = [(row, column) for row in range(1, self.size - 1) for column in range(1, self.size - 1)]
        is_wall = self.np_random.random(len(inside)) < self.walls
        floor = [cell for cell, wall in zip(inside, is_wall, strict=True) if not wall]
        if len(floor) < 2 * self.num_boxes + 1:
            floor = inside
        order = [floor[at] for at in self.np_random.permutation(len(floor))]
        self.floor, self.player = frozenset(floor), order[0]
        self.boxes, self.targets = frozenset(order[1 : self.num_boxes + 1]), frozenset(order[-self.num_boxes :])

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move in one direction, pushing the box that is there if the cell behind it is free."""
        before = len(self.boxes & self.targets)
        self.player, self.boxes = apply_move(self.floor, self.player, self.boxes, list(MOVES.values())[int(action)])
        after = len(self.boxes & self.targets)
        is_solved = after == self.num_boxes
        reward = STEP_REWARD + BOX_REWARD * (after - before) + SOLVED_REWARD * is_solved
        return self.render(), reward, is_solved, False, {"success": is_solved}

    def render(self) -> np.ndarray:
        """Return the picture: walls, red targets, yellow boxes and a green player.

        A box on a target has a red edge.
        """
        picture = np.empty((self.size * TILE, self.size * TILE, 3), np.uint8)
        picture[:] = WALL
        rows, columns = np.mgrid[:TILE, :TILE] - (TILE - 1) / 2
        square, circle = np.maximum(np.abs(rows), np.abs(columns)), np.hypot(rows, columns)
        for row, column in self.floor:
            tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            tile[1:, 1:] = FLOOR
            is_target = (row, column) in self.targets
            if is_target:
                tile[(circle < 11) & (circle > 6)] = TARGET
            if (row, column) in self.boxes:
                tile[square < 13] = TARGET if is_target else (150, 105, 20)
                tile[square < 9] = BOX
            if (row, column) == self.player:
                tile[circle < 9] = PLAYER
        return picture


def apply_move(floor: frozenset[Cell], player: Cell, boxes: frozenset[Cell], move: Cell) -> tuple[Cell, frozenset[Cell]]:
    """Return the player and the boxes after a move; unchanged if the way is blocked."""
    near = (player[0] + move[0], player[1] + move[1])
    behind = (near[0] + move[0], near[1] + move[1])
    if near not in floor:
        return player, boxes
    if near not in boxes:
        return near, boxes
    if behind not in floor or behind in boxes:
        return player, boxes
    return near, boxes - {near} | {behind}


def count_moves(floor: frozenset[Cell], player: Cell, boxes: Iterable[Cell], targets: frozenset[Cell], *, limit: int) -> int | None:
    """Return the length of a shortest solution; None if there is none with at most `limit` moves.

    The search is breadth-first over the positions of player and boxes.
    """
    start = (player, frozenset(boxes))
    queue, known = deque([(start, 0)]), {start}
    while queue:
        state, length = queue.popleft()
        if state[1] == targets:
            return length
        if length == limit:
            continue
        for move in MOVES.values():
            after = apply_move(floor, *state, move)
            if after not in known:
                known.add(after)
                queue.append((after, length + 1))
    return None
