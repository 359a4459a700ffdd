"""Makes games of ALFWorld from the files in its package: no download, no simulator. Every game is won by the planner before it is kept.

The six kinds of task take turns; scenes of train/ and of eval/ are different floor plans. A game is a folder as ALFWorld lays it out:
game.tw-pddl with the planner's walkthrough, traj_data.json, and for the warm start how it is won, turn by turn: by the planner, who knows
where things are (transcript.json), and by one who searches (search.json).
The same arguments make the same games; what an interrupted run has made is kept by the next.
Small games (the default) are for small policies; --places 0 --things 0 fills a scene as ALFWorld does.
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
from megatron_rl.tasks.alfworld.game_files import GAME, TRANSCRIPTS, Transcript, Turn, require_packages, transcript_of
from megatron_rl.tasks.alfworld.game_generator import Draft, House, drafts, house
from megatron_rl.tasks.alfworld.goals import NAMES, Goal
from megatron_rl.tasks.alfworld.player_pool import Players
from megatron_rl.tasks.alfworld.scene_prompts import View, prompt_of, thoughts_before, write_reply
from megatron_rl.tasks.alfworld.search_expert import Searcher
from megatron_rl.tasks.alfworld.task import MAX_STEPS

TRIES = 20
"""Drafts of one game, until the planner wins one."""
LONGEST = 30
"""Commands to win a game that is kept."""
PARTIAL = ".partial"
WORDS = "words.txt"
WORDS_OF = 60
"""Games whose prompts and replies are in words.txt."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Size:
    places: int
    things: int


def write_game(folder: Path, draft: Draft, rules: House, *, walkthrough: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    goal = draft.goal
    is_lamp = goal.kind == "look"
    parameters = {
        "object_target": goal.thing, "parent_target": "" if is_lamp else goal.place, "toggle_target": goal.place if is_lamp else "",
        "mrecep_target": "", "object_sliced": False,
    }  # fmt: skip
    data = {"task_type": NAMES[goal.kind], "pddl_params": parameters, "scene": {"scene_num": goal.scene}}
    game = {"pddl_domain": rules.domain, "grammar": rules.grammar(draft.task), "pddl_problem": draft.problem}
    (folder / "traj_data.json").write_text(json.dumps(data))
    (folder / GAME).write_text(json.dumps({**game, "solvable": True, "walkthrough": walkthrough}))


async def transcribe(players: Players, game: Path, *, walkthrough: list[str]) -> dict[str, Transcript]:
    """Who wins the game, and how: the planner, or the walkthrough that it left, and the searcher. InfraError: TextWorld failed."""
    player, found = await players.take(str(game)), {}
    try:
        for name in TRANSCRIPTS:
            begun = await player.ask(game=str(game))
            task, view, turns = str(begun.pop("task")), View(**begun), []
            if name == "planner":
                known = walkthrough or (await player.ask(plan=True))["plan"]
                following = ((thoughts_before(known[number:]), command) for number, command in enumerate(known))
            else:
                searcher = Searcher(Goal.named(game.parents[1].name))
                following = (searcher.next(view) for _ in range(MAX_STEPS))
            for thoughts, command in takewhile(bool, following):
                turns.append(Turn(view.text, view.commands, thoughts, command))
                view = View(**await player.ask(command=command))
                if view.won:
                    found[name] = Transcript(task, turns)
                    break
        return found
    finally:
        players.give_back(player)


def write_transcripts(folder: Path, transcripts: dict[str, Transcript]) -> None:
    for name, transcript in transcripts.items():
        (folder / TRANSCRIPTS[name]).write_text(json.dumps(asdict(transcript)))


async def make_one(out: Path, trial: str, players: Players, attempts: Iterator[Draft], rules: House) -> None:
    """The first draft that can be won, as a folder that appears whole."""
    for number, draft in enumerate(attempts):
        folder = out.parent / PARTIAL / f"{out.name}_{trial}_{number}" / draft.goal.folder / trial
        try:
            write_game(folder, draft, rules, walkthrough=[])
            transcripts = await transcribe(players, folder / GAME, walkthrough=[])
        except PermanentInfraError:
            raise
        except InfraError as fault:
            print(f"{trial}: another draft is tried ({fault})", file=sys.stderr)
            transcripts = {}
        if "planner" in transcripts and len(transcripts["planner"].turns) <= LONGEST:
            write_game(folder, draft, rules, walkthrough=transcripts["planner"].played)
            write_transcripts(folder, transcripts)
            (out / draft.goal.folder).mkdir(parents=True, exist_ok=True)
            os.rename(folder, out / draft.goal.folder / trial)
            return
    raise ValueError(f"{out / trial}: none of {TRIES} drafts could be won; choose other --places and --things")


async def make(out: Path, *, nums: dict[str, int], size: Size, seed: int, processes: int, seconds: float) -> int:
    """Returns how many games are new."""
    rules, players, kinds = house(), Players(processes, seconds=seconds), list(NAMES)
    console = Console(stderr=True)
    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=console,
                   transient=True, disable=not console.is_terminal)  # fmt: skip
    wanted = []
    for split, num in nums.items():
        made = {path.parent.name for path in (out / split).glob(f"*/*/{GAME}")}
        wanted += [(split, number) for number in range(num) if f"trial_{number:05d}" not in made]

    async def one(split: str, number: int) -> None:
        dice, kind = random.Random(f"{seed} {split} {number}"), kinds[number % len(kinds)]
        attempts = drafts(rules, split=split, kind=kind, dice=dice, num_places=size.places, num_things=size.things)
        async with places:
            await make_one(out / split, f"trial_{number:05d}", players, islice(attempts, TRIES), rules)
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
            shutil.rmtree(out / PARTIAL, ignore_errors=True)
    return len(wanted)


def write_words(out: Path) -> None:
    """Texts as the policy reads and writes them, for the tokenizer of a small one (make_tiny_qwen2_5_vl.py --words)."""
    texts = []
    for player, name in TRANSCRIPTS.items():
        found = sorted((out / "train").glob(f"*/*/{name}"))
        for path in found[:: max(1, len(found) // WORDS_OF)]:
            transcript = transcript_of(path.parent, player)
            for number, turn in enumerate(transcript.turns):
                view = View(turn.text, turn.commands, won=False, met=0, conditions=1)
                texts.append(prompt_of(transcript.task, view, before=transcript.played[:number]))
                texts.append(write_reply(turn.thoughts, turn.command))
    partial = out / f".{WORDS}.partial"
    partial.write_text("\n".join(texts) + "\n")
    partial.replace(out / WORDS)


async def transcribe_all(root: Path, *, processes: int, seconds: float) -> int:
    """A transcript for every game under a folder that has none, official ones too. Returns how many are new."""
    players = Players(processes, seconds=seconds)
    games = [path for path in sorted(root.rglob(GAME)) if not (path.parent / TRANSCRIPTS["planner"]).exists()]
    written = 0
    try:
        for game in (game for game in games if Goal.named(game.parents[1].name) is not None):
            walkthrough = json.loads(game.read_text()).get("walkthrough") or []
            transcripts = await transcribe(players, game, walkthrough=walkthrough)
            write_transcripts(game.parent, transcripts)
            written += "planner" in transcripts
    finally:
        await players.close()
    return written


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--transcribe", type=Path, metavar="DIR", help="make no games: write transcripts beside those that lie there")
    parser.add_argument("--num-train", type=int, default=3000, metavar="N", help="games of train (default 3000)")
    parser.add_argument("--num-eval", type=int, default=200, metavar="N", help="games of eval (default 200)")
    parser.add_argument("--places", type=int, default=6, metavar="N", help="receptacles of a game; 0: all of its scene (default 6)")
    parser.add_argument("--things", type=int, default=5, metavar="N", help="things that lie there; 0: as ALFWorld (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="processes of TextWorld (default: one a core)")
    parser.add_argument("--seconds", type=float, default=120.0, help="what the planner may take for a game (default 120)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> str:
    require_packages()
    require((options.out is None) != (options.transcribe is None), "--out", options.out, "give either --out or --transcribe")
    started = time.monotonic()
    if options.transcribe is not None:
        require(options.transcribe.is_dir(), "--transcribe", options.transcribe, "no such folder")
        num = asyncio.run(transcribe_all(options.transcribe, processes=options.processes, seconds=options.seconds))
        return f"{num} new transcripts in {options.transcribe}"
    for key in ("num_train", "num_eval", "processes"):
        require(getattr(options, key) >= 1, f"--{key.replace('_', '-')}", getattr(options, key), "must be at least 1")
    for key, least in (("places", 4), ("things", 3)):
        value = getattr(options, key)
        require(value == 0 or value >= least, f"--{key}", value, f"must be at least {least}, or 0 for all")
    nums = {"train": options.num_train, "eval": options.num_eval}
    size = Size(places=options.places, things=options.things)
    new = asyncio.run(
        make(options.out, nums=nums, size=size, seed=options.seed, processes=options.processes, seconds=options.seconds)
    )  # fmt: skip
    write_words(options.out)
    spent = time.monotonic() - started
    return f"{sum(nums.values())} games in {options.out}, {new} of them new, {60 * new / spent:.0f} a minute"


def main(arguments: list[str] | None = None) -> int:
    code = 0
    try:
        print(run(parse_arguments(arguments)))
    except* (ValueError, PermanentInfraError) as errors:
        print(*errors.exceptions, sep="\n", file=sys.stderr)
        code = 2
    return code


if __name__ == "__main__":
    sys.exit(main())
