"""Where games are, and what each is: official ones in ALFWORLD_DATA, or what tools/data/make_alfworld.py made.

A game is a folder with game.tw-pddl, named and laid out as ALFWorld does it (goals.FOLDER); beside it there may be transcripts: how the
game is won, turn by turn.
"""

import importlib.util
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_rl.config import DataSettings, require
from megatron_rl.io.bounded_files import is_regular, read_bytes
from megatron_rl.io.jsonl import read_json
from megatron_rl.tasks.alfworld.goals import Goal
from megatron_rl.types import Example

GAME = "game.tw-pddl"
TRANSCRIPTS = {"planner": "transcript.json", "searcher": "search.json"}
"""How the game is won, by whom."""
MAX_GAME_BYTES = 64 << 20
OFFICIAL = {"train": "json_2.1.1/train", "eval": "json_2.1.1/valid_unseen"}
"""Under ALFWORLD_DATA, by our split; valid_unseen has scenes that train has not."""
MAKE = "python tools/data/make_alfworld.py --out data/alfworld"
REMEDY = (
    f"give a folder of games: the official ones by ALFWORLD_DATA (alfworld-download), or make some with `{MAKE}` and use "
    "task.data.train=[data/alfworld/train] task.data.eval=[data/alfworld/eval]"
)
PACKAGES = {"textworld": "textworld", "fast_downward": "fast-downward-textworld", "tatsu": "tatsu", "mementos": "mementos"}


@dataclass(slots=True, frozen=True)
class Turn:
    text: str
    commands: list[str]
    thoughts: str
    command: str
    """What is played."""


@dataclass(slots=True, frozen=True)
class Transcript:
    task: str
    turns: list[Turn]

    @property
    def played(self) -> list[str]:
        return [turn.command for turn in self.turns]


def require_packages() -> None:
    lacking = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    require(not lacking, "task.name", "alfworld", f"needs {', '.join(lacking)}; run: bash launch/install_alfworld.sh")


def folders_of(data: DataSettings, split: str) -> list[Path]:
    """The folders that hold a split's games. ValueError: none is named, or one is not there."""
    key, given = f"task.data.{split}", [Path(folder) for folder in (data.train if split == "train" else data.eval)]
    if not given:
        root = os.environ.get("ALFWORLD_DATA", "")
        require(bool(root), key, given, REMEDY)
        key, given = "ALFWORLD_DATA", [Path(root) / OFFICIAL[split]]
    for folder in given:
        require(folder.is_dir(), key, folder, f"no such folder; {REMEDY}")
    return given


def games_of(folders: Sequence[Path], *, key: str) -> list[Path]:
    """The folder of every game that can be won, in an order that depends on their names alone. ValueError: there is none."""
    found = [path.parent for folder in folders for path in sorted(folder.rglob(GAME)) if _is_played(path)]
    require(bool(found), key, ", ".join(map(str, folders)), f"no {GAME} of a task that ALFWorld plays lies there; {REMEDY}")
    random.Random(0).shuffle(found)  # by name they are sorted by kind: fewer would all be of one
    return found


def _is_played(path: Path) -> bool:
    """Official games say of themselves whether a solution is known."""
    is_known = Goal.named(path.parents[1].name) is not None and is_regular(path)
    return is_known and b'"solvable": false' not in read_bytes(path, at_most=MAX_GAME_BYTES)


def example_of(folder: Path, *, picture: str) -> Example:
    goal = Goal.named(folder.parent.name)
    assert goal is not None, folder
    payload = {"game": str(folder / GAME), "kind": goal.kind, "scene": goal.scene, "picture": picture}
    return Example(id=f"{folder.parent.name}/{folder.name}", payload=payload, source=goal.kind)


@lru_cache(maxsize=4096)
def transcript_of(folder: Path, player: str = "planner") -> Transcript:
    read = read_json(folder / TRANSCRIPTS[player])
    return Transcript(read["task"], [Turn(**turn) for turn in read["turns"]])
