"""Generates ALFWorld games from the files in ALFWorld's package, without a download or a simulator.

Only games that the planner wins are kept. The games cycle through the six kinds of task, and train/
and eval/ use different floor plans. A game is a folder in ALFWorld's layout, with game.tw-pddl
(including the planner's walkthrough) and traj_data.json. For the SFT warm start, the folder also
contains two transcripts. The file transcript.json is a transcript of the planner, which knows the
positions of all objects. The file search.json is a transcript of an expert that searches for the
objects.

The same arguments produce the same games. If the tool is interrupted, the next call with the same
arguments keeps the finished games and generates the rest. By default, games are small, for small
policies. With --places 0 --things 0, games have as many receptacles and objects as in ALFWorld.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron_rl.config import require
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.tasks.alfworld.game_files import (
    GAME_FILE,
    TRANSCRIPT_FILES,
    GameTranscript,
    TranscriptTurn,
    load_transcript,
    require_packages,
)
from megatron_rl.tasks.alfworld.game_generator import AlfworldPackage, GameDraft, find_alfworld_package, generate_drafts
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND, AlfworldGoal
from megatron_rl.tasks.alfworld.player_pool import make_player_pool
from megatron_rl.tasks.alfworld.scene_prompts import GameObservation, write_prompt, write_reply, write_thoughts
from megatron_rl.tasks.alfworld.search_expert import SearchExpert
from megatron_rl.tasks.alfworld.task import MAX_STEPS
from megatron_rl.tasks.process_pool import ProcessPool

MAX_DRAFTS_PER_GAME = 20
"""Maximum number of drafts that are tried for one game before the tool gives up."""
MAX_GAME_COMMANDS = 30
"""Maximum number of commands in the planner's solution; games with longer solutions are dropped."""
PARTIAL_SUFFIX = ".partial"
TEXTS_FILE = "words.txt"
NUM_TEXT_GAMES = 60
"""Approximate number of games per player that contribute prompts and replies to words.txt."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GameSize:
    """Number of receptacles and of objects in a generated game; 0 means as many as in ALFWorld."""

    num_receptacles: int
    num_objects: int


def write_game(folder: Path, draft: GameDraft, rules: AlfworldPackage, *, walkthrough: list[str]) -> None:
    """Write a game's files in ALFWorld's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    goal = draft.goal
    is_lamp = goal.kind == "look"
    parameters = {
        "object_target": goal.object_type, "parent_target": "" if is_lamp else goal.receptacle_type,
        "toggle_target": goal.receptacle_type if is_lamp else "",
        "mrecep_target": "", "object_sliced": False,
    }  # fmt: skip
    data = {"task_type": ALFWORLD_NAME_BY_KIND[goal.kind], "pddl_params": parameters, "scene": {"scene_num": goal.scene}}
    game = {"pddl_domain": rules.pddl_domain, "grammar": rules.make_grammar(draft.task_text), "pddl_problem": draft.pddl_problem}
    (folder / "traj_data.json").write_text(json.dumps(data))
    (folder / GAME_FILE).write_text(json.dumps({**game, "solvable": True, "walkthrough": walkthrough}))


async def transcribe_game(players: ProcessPool, game: Path, *, walkthrough: list[str]) -> dict[str, GameTranscript]:
    """Run the planner and the search expert on a game and return the winning transcripts.

    The planner executes the commands in `walkthrough`, or a new plan if `walkthrough` is empty. The
    result is keyed by player; a player that does not win the game is left out.

    Raises:
        InfraError: TextWorld failed.
    """
    player, found = await players.acquire(str(game)), {}
    try:
        for name in TRANSCRIPT_FILES:
            begun = await player.send_request(game=str(game))
            task, view, turns = str(begun.pop("task")), GameObservation(**begun), []
            if name == "planner":
                known = walkthrough or (await player.send_request(plan=True))["plan"]
                following = ((write_thoughts(known[number:]), command) for number, command in enumerate(known))
            else:
                searcher = SearchExpert(AlfworldGoal.from_folder_name(game.parents[1].name))
                following = (searcher.choose_command(view) for _ in range(MAX_STEPS))
            for thoughts, command in takewhile(bool, following):
                turns.append(TranscriptTurn(view.text, view.commands, thoughts, command))
                view = GameObservation(**await player.send_request(command=command))
                if view.is_won:
                    found[name] = GameTranscript(task, turns)
                    break
        return found
    finally:
        players.release(player)


def write_transcripts(folder: Path, transcripts: dict[str, GameTranscript]) -> None:
    """Write the transcripts of a game into the game's folder."""
    for name, transcript in transcripts.items():
        (folder / TRANSCRIPT_FILES[name]).write_text(json.dumps(asdict(transcript)))


async def make_game(out: Path, trial: str, players: ProcessPool, attempts: Iterator[GameDraft], rules: AlfworldPackage) -> None:
    """Create a game from the first draft that the planner wins.

    Drafts that need more than MAX_GAME_COMMANDS commands are skipped. The folder of the game gets
    its final name after the game is complete.

    Raises:
        ValueError: The planner won none of the drafts, or needed more than MAX_GAME_COMMANDS
            commands in those that it won.
    """
    for number, draft in enumerate(attempts):
        folder = out.parent / PARTIAL_SUFFIX / f"{out.name}_{trial}_{number}" / draft.goal.folder_name / trial
        try:
            write_game(folder, draft, rules, walkthrough=[])
            transcripts = await transcribe_game(players, folder / GAME_FILE, walkthrough=[])
        except PermanentInfraError:
            raise
        except InfraError as fault:
            print(f"{trial}: trying another draft ({fault})", file=sys.stderr)
            transcripts = {}
        if "planner" in transcripts and len(transcripts["planner"].turns) <= MAX_GAME_COMMANDS:
            write_game(folder, draft, rules, walkthrough=transcripts["planner"].commands)
            write_transcripts(folder, transcripts)
            (out / draft.goal.folder_name).mkdir(parents=True, exist_ok=True)
            os.rename(folder, out / draft.goal.folder_name / trial)
            return
    raise ValueError(f"{out / trial}: the planner won none of {MAX_DRAFTS_PER_GAME} drafts; choose other values of --places and --things")


async def make_games(out: Path, *, nums: dict[str, int], size: GameSize, seed: int, processes: int, seconds: float) -> int:
    """Generate the missing games and return the number of generated games."""
    rules, players, kinds = find_alfworld_package(), make_player_pool(processes, timeout_s=seconds), list(ALFWORLD_NAME_BY_KIND)
    console = Console(stderr=True)
    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=console,
                   transient=True, disable=not console.is_terminal)  # fmt: skip
    wanted = []
    for split, num in nums.items():
        made = {path.parent.name for path in (out / split).glob(f"*/*/{GAME_FILE}")}
        wanted += [(split, number) for number in range(num) if f"trial_{number:05d}" not in made]

    async def one(split: str, number: int) -> None:
        dice, kind = random.Random(f"{seed} {split} {number}"), kinds[number % len(kinds)]
        attempts = generate_drafts(
            rules, split=split, kind=kind, rng=dice, max_receptacles=size.num_receptacles, max_objects=size.num_objects
        )
        async with places:
            await make_game(out / split, f"trial_{number:05d}", players, islice(attempts, MAX_DRAFTS_PER_GAME), rules)
        bar.advance(line)

    places = asyncio.Semaphore(processes)
    with bar:
        line = bar.add_task("games", total=len(wanted))
        try:
            async with asyncio.TaskGroup() as games:
                for split, number in wanted:
                    games.create_task(one(split, number))
        finally:
            await players.close()
            shutil.rmtree(out / PARTIAL_SUFFIX, ignore_errors=True)
    return len(wanted)


def write_tokenizer_texts(out: Path) -> None:
    """Write prompts and replies of games in the training split to words.txt.

    The texts are used to train the tokenizer of a small policy (make_tiny_qwen2_5_vl.py --words).
    """
    texts = []
    for player, name in TRANSCRIPT_FILES.items():
        found = sorted((out / "train").glob(f"*/*/{name}"))
        for path in found[:: max(1, len(found) // NUM_TEXT_GAMES)]:
            transcript = load_transcript(path.parent, player)
            for number, turn in enumerate(transcript.turns):
                view = GameObservation(turn.text, turn.commands, is_won=False, num_met=0, num_conditions=1)
                texts.append(write_prompt(transcript.task, view, history=transcript.commands[:number]))
                texts.append(write_reply(turn.thoughts, turn.command))
    partial = out / f".{TEXTS_FILE}.partial"
    partial.write_text("\n".join(texts) + "\n")
    partial.replace(out / TEXTS_FILE)


async def transcribe_all(root: Path, *, processes: int, seconds: float) -> int:
    """Write transcripts for all games below `root` that have no planner transcript.

    Official ALFWorld games are supported too. Returns the number of transcribed games that the
    planner won.
    """
    players = make_player_pool(processes, timeout_s=seconds)
    games = [path for path in sorted(root.rglob(GAME_FILE)) if not (path.parent / TRANSCRIPT_FILES["planner"]).exists()]
    written = 0
    try:
        for game in (game for game in games if AlfworldGoal.from_folder_name(game.parents[1].name) is not None):
            walkthrough = json.loads(game.read_text()).get("walkthrough") or []
            transcripts = await transcribe_game(players, game, walkthrough=walkthrough)
            write_transcripts(game.parent, transcripts)
            written += "planner" in transcripts
    finally:
        await players.close()
    return written


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out data/alfworld
  %(prog)s --out data/alfworld_easy --num-train 60 --num-eval 12 --places 4 --things 3
  %(prog)s --transcribe $ALFWORLD_DATA/json_2.1.1/train              walkthroughs of official games, for the warm start
  python launch/train.py task=alfworld 'task.data.train=[data/alfworld/train]' 'task.data.eval=[data/alfworld/eval]' ...""",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for train/, eval/ and words.txt")
    parser.add_argument(
        "--transcribe", type=Path, metavar="DIR", help="do not generate games; write transcripts for the existing games in this folder"
    )
    parser.add_argument("--num-train", type=int, default=3000, metavar="N", help="number of games in train (default 3000)")
    parser.add_argument("--num-eval", type=int, default=200, metavar="N", help="number of games in eval (default 200)")
    parser.add_argument(
        "--places", type=int, default=6, metavar="N", help="receptacles per game; 0: all receptacles of the scene (default 6)"
    )
    parser.add_argument("--things", type=int, default=5, metavar="N", help="objects per game; 0: as in ALFWorld (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="TextWorld processes (default: one per core)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the planner per game, in seconds (default 120)")
    return parser.parse_args(arguments)


def run_options(options: argparse.Namespace) -> str:
    """Run the parsed command and return a one-line summary."""
    require_packages()
    require((options.out is None) != (options.transcribe is None), "--out", options.out, "set exactly one of --out and --transcribe")
    started = time.monotonic()
    if options.transcribe is not None:
        require(options.transcribe.is_dir(), "--transcribe", options.transcribe, "no such folder")
        num = asyncio.run(transcribe_all(options.transcribe, processes=options.processes, seconds=options.seconds))
        return f"{num} new transcripts in {options.transcribe}"
    for key in ("num_train", "num_eval", "processes"):
        require(getattr(options, key) >= 1, f"--{key.replace('_', '-')}", getattr(options, key), "must be at least 1")
    for key, least in (("places", 4), ("things", 3)):
        value = getattr(options, key)
        require(value == 0 or value >= least, f"--{key}", value, f"must be at least {least}, or 0 for as many as in ALFWorld")
    nums = {"train": options.num_train, "eval": options.num_eval}
    size = GameSize(num_receptacles=options.places, num_objects=options.things)
    new = asyncio.run(
        make_games(options.out, nums=nums, size=size, seed=options.seed, processes=options.processes, seconds=options.seconds)
    )  # fmt: skip
    write_tokenizer_texts(options.out)
    spent = time.monotonic() - started
    return f"{sum(nums.values())} games in {options.out}, {new} of them new, {60 * new / spent:.0f} per minute"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    code = 0
    try:
        print(run_options(parse_arguments(arguments)))
    except* (ValueError, PermanentInfraError) as errors:
        print(*errors.exceptions, sep="\n", file=sys.stderr)
        code = 2
    return code


if __name__ == "__main__":
    sys.exit(main())
