"""Sokoban and FrozenLake: rewards by hand, rooms and maps against searches in this file, and plans
that solve episodes of task=sokoban and task=frozen_lake.
"""

import asyncio
from collections import deque
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
from scipy import ndimage

from megatron_rl.config import TaskSettings
from megatron_rl.rollout.task import Step
from megatron_rl.tasks.gymnasium_envs.environments import puzzles  # noqa: F401 (registers the environments)
from megatron_rl.tasks.gymnasium_envs.environments.frozen_lake import FrozenLake, has_way
from megatron_rl.tasks.gymnasium_envs.environments.sokoban import TILE, Sokoban
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumTask, is_solved
from megatron_rl.types import Rollout, Turn
from tests.contracts.test_configs import settings_of

UP, DOWN, LEFT, RIGHT = range(4)
needs_pygame = pytest.mark.skipif(find_spec("pygame") is None, reason="pygame is not installed")


def make_room(*rows: str) -> Sokoban:
    """Return a room: # wall, P player, X box, O target, + player on a target, * box on a target."""
    env = Sokoban()
    env.size = max(len(rows), len(rows[0]))
    cells = {(row, column): text for row, line in enumerate(rows) for column, text in enumerate(line)}

    def find(*marks: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, mark in cells.items() if mark in marks)

    env.floor, env.boxes, env.targets = find(*" PXO+*"), find("X", "*"), find("O", "+", "*")
    (env.player,), env.num_boxes = find("P", "+"), len(env.boxes)
    return env


def test_rewards_by_hand() -> None:
    """A step costs 0.1; a box onto a target earns 1, off it costs 1; the last box earns 10 more."""
    env = make_room("######", "#PXO #", "#  XO#", "######")
    assert [env.step(action)[1:4] for action in (UP, LEFT, RIGHT, RIGHT)] == [
        (pytest.approx(-0.1), False, False), (pytest.approx(-0.1), False, False),
        (pytest.approx(0.9), False, False), (pytest.approx(-1.1), False, False),
    ]  # fmt: skip
    env = make_room("######", "#P* O#", "#XO  #", "######")
    assert env.step(DOWN)[1] == pytest.approx(-0.1) and env.player == (1, 1), "a box at a wall does not move"
    env = make_room("######", "#PXO #", "######")
    _, reward, is_terminated, is_truncated, info = env.step(RIGHT)
    assert (reward, is_terminated, is_truncated, info) == (pytest.approx(10.9), True, False, {"success": True})
    env = make_room("######", "#PXX #", "#OO  #", "######")
    assert env.step(RIGHT)[1] == pytest.approx(-0.1) and env.player == (1, 1), "two boxes in a row do not move"


def search_plan(env: Any) -> list[int]:
    """Return the actions of a shortest solution, found in copies of the environment."""
    queue, known = deque([(env, [])]), set()
    while queue:
        state, plan = queue.popleft()
        for action in range(4):
            after = deepcopy(state)
            _, _, is_terminated, _, info = after.step(action)
            if is_terminated and info["success"]:
                return [*plan, action]
            place = (after.player, after.boxes)
            if place not in known:
                known.add(place)
                queue.append((after, [*plan, action]))
    raise AssertionError("there is no plan")


@pytest.mark.parametrize(("given", "seeds"), [({}, 20), ({"num_boxes": 2, "max_moves": 12, "size": 6}, 3), ({"size": 5, "walls": 0.5}, 5)])
def test_every_room_has_the_stated_solution(given: dict[str, Any], seeds: int) -> None:
    lengths, rooms = [], set()
    for seed in range(seeds):
        env = Sokoban(**given)
        first, info = env.reset(seed=seed)
        assert info["shortest"] == len(search_plan(env)) <= given.get("max_moves", 5)
        assert len({env.player, *env.boxes, *env.targets}) == 1 + 2 * env.num_boxes == 1 + 2 * len(env.boxes)
        assert np.array_equal(first, Sokoban(**given).reset(seed=seed)[0]), "equal seeds give equal rooms"
        rooms.add(first.tobytes())
        lengths.append(info["shortest"])
    assert len(rooms) == seeds and len({*lengths}) > 1


def test_the_picture_of_a_room() -> None:
    """Every kind of cell has its own picture, and equal cells have equal pictures."""
    env = make_room("#####", "#P  #", "#X*O#", "#####")
    picture, tiles = env.render(), {}
    assert picture.shape == (5 * TILE, 5 * TILE, 3) and picture.dtype == np.uint8
    for row, column, kind in ((0, 0, "wall"), (3, 0, "wall"), (1, 1, "player"), (1, 2, "floor"), (1, 3, "floor"), (2, 1, "box"),
                              (2, 2, "box on target"), (2, 3, "target")):  # fmt: skip
        tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE].tobytes()
        assert tiles.setdefault(kind, tile) == tile
    assert len({*tiles.values()}) == 6


def test_settings_without_a_room() -> None:
    for given in ({"size": 4}, {"num_boxes": 4}, {"max_moves": 0}, {"walls": 0.6}):
        with pytest.raises(ValueError, match="must be in"):
            Sokoban(**given)
    with pytest.raises(ValueError, match="must be in"):
        FrozenLake(size=1)


def test_every_map_has_a_way() -> None:
    """The goal is in the start's connected region, by scipy's labels; `has_way` agrees on maps of
    which half have none. Equal seeds give equal maps, and start and goal are anywhere.
    """
    starts = set()
    for seed in range(20):
        env = FrozenLake(frozen=0.6)
        env.reset(seed=seed)
        cells = env.lake.desc.astype(str)
        labels = ndimage.label(cells != "H")[0]
        (start,), (goal,) = np.argwhere(cells == "S"), np.argwhere(cells == "G")
        assert labels[tuple(start)] == labels[tuple(goal)] != 0
        again = FrozenLake(frozen=0.6)
        again.reset(seed=seed)
        assert np.array_equal(again.lake.desc, env.lake.desc)
        starts.add(tuple(start))
    assert len(starts) > 5
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        cells = np.where(rng.random((4, 4)) < 0.5, "F", "H")
        cells[0, 0], cells[3, 3] = "S", "G"
        labels = ndimage.label(cells != "H")[0]
        found.append(has_way(cells))
        assert found[-1] == (labels[0, 0] == labels[3, 3])
    assert {*found} == {True, False}


def test_the_rewards_of_frozen_lake() -> None:
    """10 at the goal, 0 in a hole and elsewhere, from a map of one row each."""
    env = FrozenLake(size=2, frozen=1)
    env.reset(seed=0)
    for desc, action, expected in ((["SG", "FF"], 2, (10.0, True, {"success": True})), (["SH", "FG"], 2, (0.0, True, {"success": False})),
                                   (["SH", "FG"], 1, (0.0, False, {}))):  # fmt: skip
        env.lake = type(env.lake)(desc=desc, is_slippery=False, reward_schedule=(10, 0, 0))
        env.lake.reset(seed=0)
        _, reward, is_terminated, is_truncated, info = env.step(action)
        assert (reward, is_terminated, info) == expected and not is_truncated


def play_plan(name: str, words: list[str], *, seed: int) -> list[Step]:
    """Play a plan in an episode of the task with this name, three moves in a reply."""
    settings = settings_of(f"task={name}", "model.path=here", "run.dir=there").task
    assert isinstance(settings, TaskSettings)
    task = GymnasiumTask(settings)

    async def play() -> list[Step]:
        env, steps = task.env(task.examples("train")[seed]), []
        try:
            (first,) = await env.reset(0)
            assert words[0] in first["content"][1]["text"] and "<answer>" in first["content"][1]["text"]
            for start in range(0, len(words), 3):
                steps.append(await env.step(f"<think>go</think><answer>{', '.join(words[start : start + 3])}</answer>"))
        finally:
            await env.close()
            await task.close()
        return steps

    steps = asyncio.run(play())
    turns = [Turn(sequence=0, token_span=(0, 0), text="", reward=step.reward, tool_call=step.tool_call) for step in steps]
    rollout = Rollout(task="gymnasium", example_id="", group=0, sample_index=0, turns=turns, reason=steps[-1].reason)
    assert is_solved(rollout, task.options) and steps[-1].done and not steps[-1].is_truncated
    return steps


def test_a_plan_solves_sokoban() -> None:
    """The plan of a search earns -0.1 for each move, 1 for the box, 10 for the end, and 0.5 for the
    format of each reply.
    """
    direct = gymnasium.make("puzzles/Sokoban-v0").unwrapped
    for seed in (0, 1):
        direct.reset(seed=seed)
        plan = search_plan(direct)
        steps = play_plan("sokoban", [direct.get_action_meanings()[action] for action in plan], seed=seed)
        num_replies = -(-len(plan) // 3)
        assert len(steps) == num_replies
        assert sum(step.reward for step in steps) == pytest.approx(11 - 0.1 * len(plan) + 0.5 * num_replies)


@needs_pygame
def test_a_plan_solves_frozen_lake() -> None:
    """A shortest way, by a search on the map, earns 10 and 0.5 for the format of each reply."""
    env = FrozenLake()
    env.reset(seed=3)
    cells = env.lake.desc.astype(str)
    (start,), (goal,) = (list(map(tuple, np.argwhere(cells == mark))) for mark in "SG")
    queue, known = deque([(start, [])]), {start}
    while queue:
        (row, column), plan = queue.popleft()
        if (row, column) == goal:
            break
        steps = {"Left": (row, column - 1), "Down": (row + 1, column), "Right": (row, column + 1), "Up": (row - 1, column)}
        for word, near in steps.items():
            if min(near) >= 0 and max(near) < 4 and near not in known and cells[near] != "H":
                known.add(near)
                queue.append((near, [*plan, word]))
    played = play_plan("frozen_lake", plan, seed=3)
    assert sum(step.reward for step in played) == pytest.approx(10 + 0.5 * len(played))
