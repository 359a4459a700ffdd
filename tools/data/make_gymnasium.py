"""Writes demonstrations of task=gymnasium, for the SFT warm start.

The demonstrator is a function in a file of your own, which calls `main` and is started with the
options below (docs/gymnasium.md):

    # my_solver.py
    import sys

    from megatron_rl_tools.data.make_gymnasium import main


    def demonstrate(env, observation):
        return env.action_space.sample()


    if __name__ == "__main__":
        sys.exit(main(demonstrate))

The settings of the task are those of training, as KEY=VALUE, so the prompts and pictures are the
same. Started by itself, this file plays random actions, for a first try. By default, only solved
episodes are written. The folder is written atomically:

    transcripts.jsonl      one line per turn: {"messages": [...], "id", "source", "question",
                           "answer", "step", "reward"}; reward is the return of the episode
    images/KEY.png         pictures of the transcripts
    words.txt              prompts and replies, for make_tiny_qwen2_5_vl.py --words
    demonstrations.json    origin: settings, versions, demonstrator, and numbers of episodes
"""

import argparse
import asyncio
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

import megatron_rl
from megatron_rl.config import Settings, require
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.export.sft_transcripts import TRANSCRIPTS_FILE
from megatron_rl.io.jsonl import to_json_line, write_lines_atomically
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.observe.recorder import image_file_name
from megatron_rl.rollout.renderer import image_key
from megatron_rl.tasks.gymnasium_envs.demonstrations import DemonstrationPlayer, Demonstrator, PlayedEpisode
from megatron_rl.tasks.gymnasium_envs.environment_client import ENVIRONMENT
from megatron_rl.types import Message
from megatron_rl.weights.formats.tensor_files import atomic_folder
from megatron_rl_tools.commands import run_command

ORIGIN_FILE, WORDS_FILE = "demonstrations.json", "words.txt"
UNUSED = ("model.path=unused", "run.dir=unused")
"""Settings that every run needs, and that demonstrations do not use."""


def write_message(message: Message, folder: Path) -> Message:
    """Write the pictures of a message into a folder, and return the message with their paths."""
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            name = image_file_name(image_key(part["image"]))
            if not (folder / name).exists():
                part["image"].save(folder / name)
            part = {**part, "image": name}
        parts.append(part)
    return {**message, "content": parts}


def make_rows(episode: PlayedEpisode, folder: Path, *, source: str) -> Iterator[dict[str, object]]:
    """Yield the lines of one episode, one per turn; every turn starts from a new prompt."""
    for step, (messages, reply) in enumerate(episode.turns):
        said = {"role": "assistant", "content": [{"type": "text", "text": reply}]}
        about = {"id": f"seed{episode.seed}", "source": source, "question": "", "answer": "", "step": step}
        yield {"messages": [*(write_message(message, folder) for message in messages), said], **about, "reward": episode.episode_return}


def write_words(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the different texts of all messages."""
    texts = dict.fromkeys(
        part["text"] for row in rows for message in row["messages"] for part in message["content"] if part["type"] == "text"
    )
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def describe_origin(settings: Settings, demonstrator: Demonstrator, given: argparse.Namespace) -> dict[str, object]:
    """Return what determined the demonstrations."""
    path = Path(inspect.getsourcefile(demonstrator) or "")
    assert isinstance(settings.task.options, GymnasiumOptions)
    return {
        "task_options": asdict(settings.task.options),
        "max_turns": settings.task.max_turns,
        "demonstrator": demonstrator.__name__,
        "demonstrator_file": path.name,
        "demonstrator_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        "first_seed": given.first_seed,
        "random": given.random,
        "all": given.all,
        "versions": {"megatron-rl": megatron_rl.__version__, "gymnasium": version("gymnasium")},
    }


def make_demonstrations(settings: Settings, demonstrator: Demonstrator, given: argparse.Namespace) -> str:
    """Play the episodes, write the folder, and return a one-line summary.

    Raises:
        ValueError: A setting is wrong, the demonstrator failed, or it solved no episode.
    """
    options = settings.task.options
    require(isinstance(options, GymnasiumOptions), "task", settings.task.name, "demonstrations need task=gymnasium")
    assert isinstance(options, GymnasiumOptions)
    require(not given.out.exists(), "--out", given.out, "exists; choose another folder")
    require(given.episodes >= 1, "--episodes", given.episodes, "must be at least 1")
    seeds = range(given.first_seed, given.first_seed + given.episodes)
    remedy = f"must be within the training seeds, 0 to {options.train_seeds - 1}; change --episodes or task.options.train_seeds"
    require(seeds[0] >= 0 and seeds[-1] < options.train_seeds, "--first-seed", f"{seeds[0]}, last seed {seeds[-1]}", remedy)
    os.environ.update(ENVIRONMENT.environment)
    player = DemonstrationPlayer(settings.task, demonstrator, random_fraction=given.random)
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with atomic_folder(given.out) as folder, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        (folder / image_file_name("x")).parent.mkdir()
        rows, solved = [], 0
        for seed in bar.track(seeds, description="episodes"):
            episode = asyncio.run(player.play(seed))
            solved += episode.is_solved
            if episode.is_solved or given.all:
                rows += make_rows(episode, folder, source=options.id)
        remedy = f"the demonstrator solved none of {len(seeds)} episodes; see task.options.success_reward, or write them with --all"
        require(bool(rows), "--episodes", given.episodes, remedy)
        write_lines_atomically(folder / TRANSCRIPTS_FILE, rows)
        write_words(rows, folder / WORDS_FILE)
        origin = {**describe_origin(settings, demonstrator, given), "episodes": len(seeds), "solved": solved, "turns": len(rows)}
        (folder / ORIGIN_FILE).write_text(to_json_line(origin) + "\n", encoding="ascii")
    return f"{solved} of {len(seeds)} episodes solved, {len(rows)} turns written: {given.out / TRANSCRIPTS_FILE}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=f"Play episodes of task=gymnasium with a demonstrator, and write {TRANSCRIPTS_FILE} for SFT.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out data/door_key --episodes 500 experiment=minigrid_sft_cpu
  %(prog)s --out data/crossing task=gymnasium task.options.id=MiniGrid-SimpleCrossingS9N1-v0 task.options.history=2""",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the task, as in training")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--episodes", type=int, default=200, metavar="N", help="number of episodes to play (default: 200)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="first training seed (default: 0)")
    parser.add_argument(
        "--random", type=float, default=0.0, metavar="FRACTION", help="fraction of the actions that are random instead (default: 0)"
    )
    parser.add_argument("--all", action="store_true", help="also write episodes that are not solved")
    return parser.parse_intermixed_args(arguments)


def play_randomly(env: Any, observation: Any) -> Any:
    """Return a random action."""
    return env.action_space.sample()


def main(demonstrator: Demonstrator, arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: make_demonstrations(compose_settings([*UNUSED, *given.settings]), demonstrator, given), out=given.out)


if __name__ == "__main__":
    sys.exit(main(play_randomly))
