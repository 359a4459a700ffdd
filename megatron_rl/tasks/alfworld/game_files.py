"""ALFWorld game files and their transcripts.

Games are the official ones in ALFWORLD_DATA, or those that tools/data/make_alfworld.py generates. A
game is a folder with game.tw-pddl, named and laid out as in ALFWorld (goals.FOLDER_PATTERN). The
folder may also contain transcripts that win the game turn by turn.
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
from megatron_rl.tasks.alfworld.goals import AlfworldGoal
from megatron_rl.types import Example

GAME_FILE = "game.tw-pddl"
TRANSCRIPT_FILES = {"planner": "transcript.json", "searcher": "search.json"}
"""File name of the winning transcript of each demonstrator."""
MAX_GAME_BYTES = 64 << 20
OFFICIAL_FOLDERS = {"train": "json_2.1.1/train", "eval": "json_2.1.1/valid_unseen"}
"""Folder below ALFWORLD_DATA of each of our splits; valid_unseen has scenes that train does not
have.
"""
MAKE_COMMAND = "python tools/data/make_alfworld.py --out data/alfworld"
GAMES_REMEDY = (
    f"give a folder of games: the official ones by ALFWORLD_DATA (alfworld-download), or make some with `{MAKE_COMMAND}` and use "
    "task.data.train=[data/alfworld/train] task.data.eval=[data/alfworld/eval]"
)
REQUIRED_PACKAGES = {"textworld": "textworld", "fast_downward": "fast-downward-textworld", "tatsu": "tatsu", "mementos": "mementos"}


@dataclass(slots=True, frozen=True)
class TranscriptTurn:
    """One turn of a transcript: observation text, admissible commands, thoughts and command."""

    text: str
    commands: list[str]
    thoughts: str
    command: str
    """Command that the demonstrator runs."""


@dataclass(slots=True, frozen=True)
class GameTranscript:
    """Transcript that wins a game."""

    task: str
    turns: list[TranscriptTurn]

    @property
    def commands(self) -> list[str]:
        """Commands of all turns."""
        return [turn.command for turn in self.turns]


def require_packages() -> None:
    """Raise ValueError if a package that ALFWorld needs is not installed."""
    lacking = [package for module, package in REQUIRED_PACKAGES.items() if importlib.util.find_spec(module) is None]
    require(not lacking, "task.name", "alfworld", f"needs {', '.join(lacking)}; run: bash launch/install_alfworld.sh")


def find_game_folders(data: DataSettings, split: str) -> list[Path]:
    """Return the folders that hold a split's games.

    Raises:
        ValueError: No folder is configured, or one does not exist.
    """
    key, given = f"task.data.{split}", [Path(folder) for folder in (data.train if split == "train" else data.eval)]
    if not given:
        root = os.environ.get("ALFWORLD_DATA", "")
        require(bool(root), key, given, GAMES_REMEDY)
        key, given = "ALFWORLD_DATA", [Path(root) / OFFICIAL_FOLDERS[split]]
    for folder in given:
        require(folder.is_dir(), key, folder, f"no such folder; {GAMES_REMEDY}")
    return given


def find_games(folders: Sequence[Path], *, config_key: str) -> list[Path]:
    """Return the folder of every game that can be won.

    The order depends only on the names of the folders.

    Raises:
        ValueError: There is no such game.
    """
    found = [path.parent for folder in folders for path in sorted(folder.rglob(GAME_FILE)) if _is_playable(path)]
    require(
        bool(found), config_key, ", ".join(map(str, folders)), f"no {GAME_FILE} of a task that ALFWorld plays lies there; {GAMES_REMEDY}"
    )
    random.Random(0).shuffle(found)  # sorted by name, a prefix would contain only one kind of game
    return found


def _is_playable(path: Path) -> bool:
    """Return True for a supported game that is not marked as unsolvable.

    The files of official games state whether a solution is known.
    """
    is_known = AlfworldGoal.from_folder_name(path.parents[1].name) is not None and is_regular(path)
    return is_known and b'"solvable": false' not in read_bytes(path, at_most=MAX_GAME_BYTES)


def make_example(folder: Path, *, picture: str) -> Example:
    """Return the example of a game."""
    goal = AlfworldGoal.from_folder_name(folder.parent.name)
    assert goal is not None, folder
    payload = {"game": str(folder / GAME_FILE), "kind": goal.kind, "scene": goal.scene, "picture": picture}
    return Example(id=f"{folder.parent.name}/{folder.name}", payload=payload, source=goal.kind)


@lru_cache(maxsize=4096)
def load_transcript(folder: Path, player: str = "planner") -> GameTranscript:
    """Return the transcript of a game by a demonstrator (cached)."""
    read = read_json(folder / TRANSCRIPT_FILES[player])
    return GameTranscript(read["task"], [TranscriptTurn(**turn) for turn in read["turns"]])
