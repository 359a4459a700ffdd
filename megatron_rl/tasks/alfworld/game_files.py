"""ALFWorld game files and their transcripts.

Games are the official games in ALFWORLD_DATA, or games that tools/data/make_alfworld.py has
generated. A game is a folder that contains the file game.tw-pddl. Folders are named as in ALFWorld
(goals.FOLDER_PATTERN). The folder of a game may also contain transcripts of won episodes.
"""

import importlib.util
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rl.config import DataSettings, require
from megatron_rl.io.bounded_files import is_regular, read_bytes
from megatron_rl.io.jsonl import read_json
from megatron_rl.tasks.alfworld.goals import AlfworldGoal
from megatron_rl.types import Example

GAME_FILE = "game.tw-pddl"
TRANSCRIPT_FILES = {"planner": "transcript.json", "searcher": "search.json"}
"""Maps each demonstrator to the file name of its transcripts."""
MAX_GAME_BYTES = 64 << 20
OFFICIAL_FOLDERS = {"train": "json_2.1.1/train", "eval": "json_2.1.1/valid_unseen"}
"""Maps each split to its folder in ALFWORLD_DATA. The scenes of the valid_unseen split do not occur
in the train split.
"""
MAKE_COMMAND = "python tools/data/make_alfworld.py --out data/alfworld"
GAMES_REMEDY = (
    f"set ALFWORLD_DATA to the folder of the official games (alfworld-download), or generate games with `{MAKE_COMMAND}` and set "
    "task.data.train=[data/alfworld/train] task.data.eval=[data/alfworld/eval]"
)
REQUIRED_PACKAGES = {"textworld": "textworld", "fast_downward": "fast-downward-textworld", "tatsu": "tatsu", "mementos": "mementos"}


@dataclass(slots=True, frozen=True)
class TranscriptTurn:
    """Turn of a transcript: observation text, admissible commands, thoughts and chosen command."""

    text: str
    commands: list[str]
    thoughts: str
    command: str
    """Command that the demonstrator runs."""


@dataclass(slots=True, frozen=True)
class GameTranscript:
    """Transcript of a won episode."""

    task: str
    turns: list[TranscriptTurn]

    @property
    def commands(self) -> list[str]:
        """Commands of all turns."""
        return [turn.command for turn in self.turns]


def require_packages() -> None:
    """Raise ValueError if a package that ALFWorld needs is not installed."""
    lacking = [package for module, package in REQUIRED_PACKAGES.items() if importlib.util.find_spec(module) is None]
    require(not lacking, "task.name", "alfworld", f"requires {', '.join(lacking)}; run: bash launch/install_alfworld.sh")


def find_game_folders(data: DataSettings, split: str) -> list[Path]:
    """Return the configured folders that contain the games of a split.

    Raises:
        ValueError: No folder is configured, or a configured folder does not exist.
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
    """Return the folder of every supported game that is not marked as unsolvable.

    The games are shuffled in an order that depends only on the folder names.

    Raises:
        ValueError: No game is found.
    """
    found = [path.parent for folder in folders for path in sorted(folder.rglob(GAME_FILE)) if _is_playable(path)]
    require(bool(found), config_key, ", ".join(map(str, folders)), f"contains no {GAME_FILE} of a supported game; {GAMES_REMEDY}")
    random.Random(0).shuffle(found)  # if sorted by name, the first games would all be of one kind
    return found


def _is_playable(path: Path) -> bool:
    """Return True if the game is supported and not marked as unsolvable in its file.

    The file of an official game states whether a solution is known.
    """
    is_known = AlfworldGoal.from_folder_name(path.parents[1].name) is not None and is_regular(path)
    return is_known and b'"solvable": false' not in read_bytes(path, at_most=MAX_GAME_BYTES)


def make_example(folder: Path, *, picture: str) -> Example:
    """Return the example for the game in a folder."""
    goal = AlfworldGoal.from_folder_name(folder.parent.name)
    assert goal is not None, folder
    payload = {"game": str(folder / GAME_FILE), "kind": goal.kind, "scene": goal.scene, "picture": picture}
    return Example(id=f"{folder.parent.name}/{folder.name}", payload=payload, source=goal.kind)


@lru_cache(maxsize=4096)
def load_transcript(folder: Path, player: str = "planner") -> GameTranscript:
    """Return a demonstrator's transcript of a game. The result is cached."""
    read: Any = read_json(folder / TRANSCRIPT_FILES[player])
    return GameTranscript(read["task"], [TranscriptTurn(**turn) for turn in read["turns"]])
