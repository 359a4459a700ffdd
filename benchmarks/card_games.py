"""What a nano of a million parameters learns of the card games: GRPO, GiGPO and PPO from one warm start; a cell at a time, one core each.

    .venv/bin/python benchmarks/card_games.py --out runs/games                             # every cell that is missing, then the table
    .venv/bin/python benchmarks/card_games.py --out runs/games --cells number_line/ppo --seeds 0
    .venv/bin/python benchmarks/card_games.py --out runs/games --table                     # the table of what is there
    .venv/bin/python benchmarks/card_games.py --out runs/tiny --tiny --seeds 0             # a step a run: tries the script, says nothing

A cell is a game, an algorithm and a seed (of the first weights, the demonstrations and the rollouts); its run resumes where it was stopped.
Success is what the game's own evaluation says (docs/games.md), greedy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PPO = ["experiment=numberline_ppo_cpu"]
WARM = {
    "number_line": ["experiment=numberline_sft_cpu"],
    "ez_points": [
        "experiment=numberline_sft_cpu", "task=ez_points", "sft.splits=[correct]", "sft.steps=[110]", "sft.num_demonstrations=3000",
        "model.min_pixels=28000", "model.max_pixels=28300",
    ],
    "blackjack": [
        "experiment=numberline_sft_cpu", "task=blackjack", "sft.splits=[correct]", "sft.steps=[110]", "sft.num_demonstrations=3000",
        "model.min_pixels=28000", "model.max_pixels=28300",
    ],
}  # fmt: skip
PICTURES = ["model.min_pixels=28000", "model.max_pixels=28300"]
CELLS = {
    "number_line/grpo": ["experiment=numberline_grpo_cpu"],
    "number_line/gigpo": ["experiment=numberline_grpo_cpu", "algo=gigpo"],
    "number_line/ppo": PPO,
    "ez_points/ppo": [*PPO, "task=ez_points", *PICTURES, "algo.discount=0.99"],
    "blackjack/ppo": [*PPO, "task=blackjack", *PICTURES, "algo.discount=1.0", "batch.prompts_per_step=192"],
}
PUBLISHED = {"number_line": "RL4VLM 89.4, GFlowVLM 100", "ez_points": "RL4VLM 50.0, CoSo 50", "blackjack": "RL4VLM 40.2, GFlowVLM 43.8"}
RANDOM = {"number_line": 28.3, "ez_points": 0.064, "blackjack": 28.1}
BEST = {"number_line": 100.0, "ez_points": 100.0, "blackjack": 42.95}
TINY = ["task.eval_samples=1", "task.max_tokens_per_turn=8", "task.max_turns=1"]
TINY_STAGE = {
    "sft": ["sft.steps=[1]", "sft.splits=[correct]", "sft.num_demonstrations=4", "sft.batch_size=2"],
    "rl": ["run.steps=1", "batch.prompts_per_step=2", "batch.minibatches=1"],
}
TINY_GAME = {"ez_points": ["task.max_turns=7"], "blackjack": ["task.options.eval_drawings=1"]}


def train(folder: Path, *overrides: str) -> dict[str, float]:
    """Run to the end, or nothing where it is there; the evaluation, with the seconds of all its lives."""
    clock = folder.with_name(f"{folder.name}.seconds")
    if not (folder / "eval.json").exists():
        spent, started = float(clock.read_text()) if clock.exists() else 0.0, time.perf_counter()
        command = [sys.executable, "launch/train.py", *overrides, f"run.dir={folder}", "checkpoint.every=10"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with folder.with_name(f"{folder.name}.log").open("a") as log:
                subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            clock.write_text(f"{spent + time.perf_counter() - started:.1f}\n")
    return json.loads((folder / "eval.json").read_text()) | {"seconds": float(clock.read_text())}


def play(cell: str, seed: int, out: Path, *, tiny: bool) -> None:
    """The cell's warm start, which its game's other cells share, and its run."""
    game, algorithm = cell.split("/")
    home = out / f"seed{seed}"
    if not (home / "nano").exists():
        maker = [sys.executable, "tools/data/make_tiny_qwen2_5_vl.py", "--out", str(home / "nano"), "--seed", str(seed)]
        subprocess.run(maker, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    small = [[*TINY, *TINY_STAGE[stage], *TINY_GAME.get(game, [])] if tiny else [] for stage in ("sft", "rl")]
    train(home / game / "sft", *WARM[game], f"model.path={home / 'nano'}", f"run.seed={seed}", *small[0])
    start = home / game / "sft" / "final"
    train(home / game / algorithm, *CELLS[cell], f"model.path={start}", f"run.seed={seed}", *small[1])


def table(out: Path, seeds: list[int]) -> str:
    """Means over the seeds that were run, the lowest and the highest beside them."""
    lines = ["| game | algorithm | seeds | warm start | after | random | best possible | published (7B) | s a run |", "|" + "---|" * 9]
    for cell in CELLS:
        game, algorithm = cell.split("/")
        homes = [out / f"seed{seed}" / game for seed in seeds if (out / f"seed{seed}" / game / algorithm / "eval.json").exists()]
        if homes:
            before, after = ([_success(home / stage) for home in homes] for stage in ("sft", algorithm))
            seconds = [float((home / f"{algorithm}.seconds").read_text()) for home in homes]
            found = f"{len(homes)} | {_spread(before)} | {_spread(after)}"
        else:
            seconds, found = [], "not run | | "
        clock = f"{statistics.fmean(seconds):.0f}" if seconds else ""
        lines.append(f"| {game} | {algorithm} | {found} | {RANDOM[game]} | {BEST[game]} | {PUBLISHED[game]} | {clock} |")
    return "\n".join(lines)


def _success(folder: Path) -> float:
    return 100 * json.loads((folder / "eval.json").read_text())["greedy_success"]


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/games"))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--tiny", action="store_true", help="a step a run")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            play(cell, seed, out, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(table(out, arguments.seeds))


if __name__ == "__main__":
    main()
