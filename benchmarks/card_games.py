"""GRPO, GiGPO and PPO on the GymCards games and ALFWorld, with a nano model and several seeds.

    .venv/bin/python benchmarks/card_games.py --out runs/games  # runs missing cells, prints table
    .venv/bin/python benchmarks/card_games.py --out runs/games --cells number_line/ppo --seeds 0
    .venv/bin/python benchmarks/card_games.py --out runs/games --table      # prints the table only
    # Smoke test, one step per run:
    .venv/bin/python benchmarks/card_games.py --out runs/tiny --tiny --seeds 0

A cell is one run of an algorithm on a game with one seed. The seed determines the initial weights,
the demonstrations and the rollouts. Cells run one at a time on one core. All cells with the same
game and seed start from one SFT checkpoint. An interrupted run is resumed. Success is the success
rate of the game's own evaluation (docs/games.md, docs/alfworld.md) with greedy decoding. The
columns "CPU min" contain the processor time, in minutes, of a run and its child processes.
Processor time depends less on other load on the machine than wall time does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from numberline import ROOT
from visual_search import processor_s

CELLS = {
    "number_line/grpo": ["experiment=numberline_grpo_cpu"],
    "number_line/gigpo": ["experiment=numberline_grpo_cpu", "algo=gigpo"],
    "number_line/ppo": ["experiment=numberline_ppo_cpu"],
    "ez_points/ppo": ["experiment=ezpoints_ppo_cpu"],
    "blackjack/ppo": ["experiment=blackjack_ppo_cpu"],
    "points24/ppo": ["experiment=points24_ppo_cpu"],
    "alfworld/ppo": ["experiment=alfworld_ppo_cpu"],
}
ONE_SEED = ("points24/ppo", "alfworld/ppo")


@dataclass(slots=True, frozen=True)
class Game:
    """SFT experiment of a game, and reference success rates on the game in percent."""

    warm_start: str
    random: float
    best: float
    published: str


GAMES = {
    "number_line": Game("numberline_sft_cpu", 28.3, 100.0, "RL4VLM 89.4, GFlowVLM 100"),
    "ez_points": Game("ezpoints_sft_cpu", 0.064, 100.0, "RL4VLM 50.0, CoSo 50"),
    "blackjack": Game("blackjack_sft_cpu", 28.1, 42.95, "RL4VLM 40.2, GFlowVLM 43.8"),
    "points24": Game("points24_sft_cpu", 0.0, 70.2, "RL4VLM 2.3, GTR-Turbo 53.5"),
    "alfworld": Game("alfworld_sft_cpu", 2.0, 100.0, "RL4VLM 21.7, on official games"),
}
TINY = ["task.eval_samples=1", "task.max_new_tokens=8", "task.max_turns=1"]
TINY_STAGE = {
    "sft": ["sft.steps=[1]", "sft.splits=[correct]", "sft.num_demonstrations=4", "sft.batch_size=2"],
    "rl": ["run.steps=1", "batch.prompts_per_step=2", "batch.minibatches=1"],
}
TINY_GAME = {"ez_points": ["task.max_turns=7"], "blackjack": ["task.options.eval_drawings=1"]}


def train(folder: Path, *overrides: str) -> None:
    """Run a training run to its end, unless it is already finished.

    The processor seconds of the run, summed over all attempts, are written to a file next to the
    run directory.
    """
    clock = folder.with_name(f"{folder.name}.seconds")
    if not (folder / "eval.json").exists():
        spent, before = float(clock.read_text()) if clock.exists() else 0.0, processor_s()
        command = [sys.executable, "launch/train.py", *overrides, f"run.dir={folder}", "checkpoint.every=10"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with folder.with_name(f"{folder.name}.log").open("a") as log:
                subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            clock.write_text(f"{spent + processor_s() - before:.1f}\n")


def make(tool: str, folder: Path, *arguments: object) -> None:
    """Run a script in tools/data unless its output exists."""
    if not folder.exists():
        command = [sys.executable, f"tools/data/{tool}.py", "--out", folder, *arguments]
        subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def play(cell: str, seed: int, out: Path, *, tiny: bool) -> None:
    """Run a cell.

    If the SFT run for the cell's game and seed is missing, it is run first.
    """
    game, algorithm = cell.split("/")
    home, nano, given = out / f"seed{seed}" / game, out / f"seed{seed}" / "nano", [f"run.seed={seed}"]
    if game == "alfworld":
        games, nano = out / "alfworld_games", home / "nano"
        make("make_alfworld", games)
        make("make_tiny_qwen2_5_vl", nano, "--seed", seed, "--words", games / "words.txt", "--vocab", 1400)
        given += [f"task.data.{split}=[{games / split}]" for split in ("train", "eval")]
    make("make_tiny_qwen2_5_vl", nano, "--seed", seed)
    small = [[*TINY, *TINY_STAGE[stage], *TINY_GAME.get(game, [])] if tiny else [] for stage in ("sft", "rl")]
    train(home / "sft", f"experiment={GAMES[game].warm_start}", f"model.path={nano}", *given, *small[0])
    train(home / algorithm, *CELLS[cell], f"model.path={home / 'sft' / 'final'}", *given, *small[1])


def table(out: Path, seeds: list[int]) -> str:
    """Return a Markdown table with the mean, minimum and maximum over the finished seeds."""
    head = "| game | algorithm | seeds | after SFT | after RL | random play | best possible | published (7B) | SFT, CPU min | RL, CPU min |"
    lines = [head, "|" + "---|" * 10]
    for cell in CELLS:
        game, algorithm = cell.split("/")
        homes = [out / f"seed{seed}" / game for seed in seeds if (out / f"seed{seed}" / game / algorithm / "eval.json").exists()]
        found, minutes = "not run | | ", " | "
        if homes:
            before, after = ([_success(home / stage) for home in homes] for stage in ("sft", algorithm))
            found = f"{len(homes)} | {_spread(before)} | {_spread(after)}"
            minutes = " | ".join(f"{_minutes(homes, stage):.1f}" for stage in ("sft", algorithm))
        known = GAMES[game]
        lines.append(f"| {game} | {algorithm} | {found} | {known.random} | {known.best} | {known.published} | {minutes} |")
    return "\n".join(lines)


def _minutes(homes: list[Path], stage: str) -> float:
    return statistics.fmean(float((home / f"{stage}.seconds").read_text()) for home in homes) / 60


def _success(folder: Path) -> float:
    return 100 * json.loads((folder / "eval.json").read_text())["greedy_success"]


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def parse_cell_arguments(description: str | None, cells: Collection[str], *, out: Path, **folders: Path) -> argparse.Namespace:
    """Parse the command line of a benchmark with one run per cell and seed.

    `folders` are further options, each with its default folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--cells", nargs="+", choices=cells, default=list(cells), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--tiny", action="store_true", help="smoke test: one step per run")
    for name, folder in folders.items():
        parser.add_argument(f"--{name}", type=Path, default=folder, help=f"default: {folder}")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    arguments = parse_cell_arguments(__doc__, CELLS, out=Path("runs/games"))
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            if cell in ONE_SEED and seed != arguments.seeds[0]:
                continue
            play(cell, seed, out, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(table(out, arguments.seeds))


if __name__ == "__main__":
    main()
