"""Shortest plan for MiniGrid-DoorKey, found by breadth-first search in MiniGrid itself."""

from collections import deque
from copy import deepcopy
from typing import Any

import gymnasium

ACTIONS = ("left", "right", "forward", "pickup", "toggle")


def plan_door_key(*, seed: int) -> tuple[list[str], float]:
    """Return the names of the actions of a shortest plan, and the reward of its last step."""
    import minigrid  # noqa: F401  # pyright: ignore[reportMissingImports] (optional; registers the environments)

    start: Any = gymnasium.make("MiniGrid-DoorKey-5x5-v0").unwrapped
    start.reset(seed=seed)
    queue, known = deque([(start, [])]), set()
    while queue:
        env, plan = queue.popleft()
        for name in ACTIONS:
            after = deepcopy(env)
            _, reward, is_terminated, _, _ = after.step(after.actions[name])
            if is_terminated:
                return [*plan, name], reward
            state = (after.agent_pos, after.agent_dir, after.grid.encode().tobytes(), after.carrying is not None)
            if state not in known:
                known.add(state)
                queue.append((after, [*plan, name]))
    raise AssertionError("there is no plan")
