"""Train in a gymnasium environment, given only its id, with a warm start from a solver.

    python examples/gymnasium_environment.py demonstrate
    python examples/gymnasium_environment.py stage=sft
    python examples/gymnasium_environment.py

`bash launch/install_environments.sh` installs MiniGrid. The policy sees its pictures, and replies
with the name of an action. The first command plays episodes with `demonstrate` and writes them as
transcripts. The second trains on them, and the third continues with GRPO. Expect `return` to rise,
as the policy finds shorter ways to the goal. Other environments of MiniGrid with doors and keys
work with the same solver, for example `task.options.id=MiniGrid-DoorKey-5x5-v0`.
"""

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.cli import cli
from megatron_rl_tools.data.make_gymnasium import main

FOLDER = "runs/examples/gymnasium_environment"
ENVIRONMENT = ["task.options.id=MiniGrid-Empty-Random-5x5-v0", "task.options.kwargs.max_steps=10", "task.max_turns=10"]
DEMONSTRATE = ["--out", f"{FOLDER}/demonstrations", "--episodes", "2", "experiment=minigrid_sft_cpu", *ENVIRONMENT]
SFT = [
    "experiment=minigrid_sft_cpu", "model.path=runs/quickstart/nano", f"run.dir={FOLDER}/sft", "sft.steps=[40]",
    f"task.data.demonstrations=[{FOLDER}/demonstrations/transcripts.jsonl]",
]  # fmt: skip
RL = ["experiment=minigrid_grpo_cpu", f"model.path={FOLDER}/sft/final", f"run.dir={FOLDER}/grpo"]
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Steps in MiniGrid's four directions: right, down, left and up."""
Pose = tuple[int, int, int]
"""Column, row and direction of the agent."""


def find_moves(grid: Any, pose: Pose) -> Iterator[tuple[str, Pose]]:
    """Yield the moves that are possible without opening or picking up anything."""
    column, row, direction = pose
    yield "left", (column, row, (direction - 1) % 4)
    yield "right", (column, row, (direction + 1) % 4)
    ahead = (column + STEPS[direction][0], row + STEPS[direction][1])
    cell = grid.get(*ahead)
    if cell is None or cell.can_overlap():
        yield "forward", (*ahead, direction)


def find_first_move(grid: Any, start: Pose, target: tuple[int, int]) -> str:
    """Return the first move of a shortest way to face the target, or "" if it is ahead already.

    If there is no way, the result is "left".
    """
    queue, firsts = deque([start]), {start: ""}
    while queue:
        pose = queue.popleft()
        if (pose[0] + STEPS[pose[2]][0], pose[1] + STEPS[pose[2]][1]) == target:
            return firsts[pose]
        for name, following in find_moves(grid, pose):
            if following not in firsts:
                firsts[following] = firsts[pose] or name
                queue.append(following)
    return "left"


def demonstrate(env: Any, observation: Any) -> str:
    """Return the next action of a plan: pick up the key, open the door, walk to the goal."""
    world = env.unwrapped
    cells = {cell.type: (index % world.width, index // world.width) for index, cell in enumerate(world.grid.grid) if cell is not None}
    target, action = cells["goal"], "forward"
    if "door" in cells and not world.grid.get(*cells["door"]).is_open:
        target, action = (cells["key"], "pickup") if world.carrying is None else (cells["door"], "toggle")
    column, row = map(int, world.agent_pos)
    return find_first_move(world.grid, (column, row, int(world.agent_dir)), target) or action


if __name__ == "__main__":
    if "demonstrate" in sys.argv:
        sys.argv.remove("demonstrate")
        sys.exit(main(demonstrate, [*DEMONSTRATE, *sys.argv[1:]]))
    defaults = [*(SFT if "stage=sft" in sys.argv else RL), *ENVIRONMENT]
    model = Path(next(word for word in reversed([*defaults, *sys.argv]) if word.startswith("model.path=")).partition("=")[2])
    if not model.exists():
        before = "bash launch/quickstart.sh" if "stage=sft" in sys.argv else "the second command of this file"
        sys.exit(f"error: model.path={model}: no such folder; {before} creates it")
    sys.argv[1:1] = defaults
    cli()
