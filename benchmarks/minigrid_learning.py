"""GRPO, GiGPO and PPO on MiniGrid, with a nano model and several seeds.

    .venv/bin/python benchmarks/minigrid_learning.py --out runs/grid  # missing cells, then the table
    .venv/bin/python benchmarks/minigrid_learning.py --out runs/grid --cells door_key/ppo --seeds 0
    .venv/bin/python benchmarks/minigrid_learning.py --out runs/grid --table  # prints the table only
    # Smoke test, one step per run:
    .venv/bin/python benchmarks/minigrid_learning.py --out runs/tiny --tiny --seeds 0

Needs the packages minigrid and pygame. A cell is one run of an algorithm on an environment with one
seed. The seed determines the initial weights, the demonstrations (of
examples/gymnasium_environment.py) and the rollouts. Cells run one at a time, with two processes.
All cells with the same environment and seed start from one SFT checkpoint. An interrupted run is
resumed.

Success is the fraction of held-out seeds in which the goal is reached, greedily and at temperature
1, with Wilson's 95% interval. Random play and the solver play the same seeds. Processor minutes
include all processes of a run.
"""

import asyncio
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from card_games import parse_cell_arguments
from numberline import ROOT
from visual_search import processor_s

from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.observe.plot import plot_reward_curves
from megatron_rl.tasks.gymnasium_envs.demonstrations import DemonstrationPlayer, Demonstrator
from megatron_rl.tasks.gymnasium_envs.task import FIRST_EVAL_SEED

NUM_EVAL, NUM_SAMPLES = 40, 2
"""Held-out seeds of an evaluation, and sampled episodes for each."""
NUM_REFERENCE = 200
"""Held-out seeds that random play and the solver play."""
ENVIRONMENTS = {
    "empty": ["task.options.id=MiniGrid-Empty-Random-5x5-v0", "task.options.kwargs.max_steps=10", "task.max_turns=10"],
    "door_key": ["task.options.id=MiniGrid-DoorKey-5x5-v0", "task.options.kwargs.max_steps=20", "task.max_turns=20"],
}
DEMONSTRATED = {"empty": 2, "door_key": 5}
"""Number of demonstrated episodes."""
SFT_STEPS = {"empty": 30, "door_key": 80}
CELLS = {
    "empty/grpo": ["experiment=minigrid_grpo_cpu"],
    "door_key/grpo": ["experiment=minigrid_grpo_cpu"],
    "door_key/gigpo": ["experiment=minigrid_grpo_cpu", "algo=gigpo"],
    "door_key/ppo": ["experiment=minigrid_grpo_cpu", "algo=ppo", "algo.gae_level=turns", "algo.gamma=0.95", "critic.lr=1e-3",
                     "critic.normalize_returns=true", "critic.warmup_steps=1", "batch.prompts_per_step=48", "batch.group_size=1"],
}  # fmt: skip
TINY = ["task.options.eval_seeds=2", "task.eval_samples=1", "task.max_turns=2"]
TINY_STAGE = {"sft": ["sft.steps=[1]", "sft.batch_size=2"], "rl": ["run.steps=1", "batch.prompts_per_step=2"]}


@dataclass(slots=True, frozen=True)
class Score:
    """Successful episodes of one player."""

    success: float
    mean_return: float
    num: int

    def __str__(self) -> str:
        low, high = wilson_interval(self.success, self.num)
        return f"{100 * self.success:.1f} ({100 * low:.1f} to {100 * high:.1f}) | {self.mean_return:.3f}"


def run_tool(*command: object) -> None:
    """Run a script of this repository."""
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def train(folder: Path, *overrides: str) -> None:
    """Run a training run with two processes to its end, unless it is already finished.

    The processor seconds of the run, summed over all attempts, are written to a file next to the
    run directory.
    """
    clock = folder.with_name(f"{folder.name}.seconds")
    if (folder / "eval.json").exists():
        return
    spent, before = float(clock.read_text()) if clock.exists() else 0.0, processor_s()
    command = [sys.executable, "launch/launch.py", "--nproc_per_node", "2", "launch/train.py", *overrides, f"run.dir={folder}"]
    try:
        with folder.with_name(f"{folder.name}.log").open("a") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, "checkpoint.every=5"], cwd=ROOT, check=True, stdout=log, stderr=log, env=environment)
    finally:
        clock.write_text(f"{spent + processor_s() - before:.1f}\n")


def run_cell(cell: str, seed: int, out: Path, *, tiny: bool) -> None:
    """Run a cell, and first whatever it starts from and is missing."""
    environment, algorithm = cell.split("/")
    home = out / f"seed{seed}" / environment
    demonstrations, nano, chosen = home / "demonstrations", home / "nano", ENVIRONMENTS[environment]
    if not demonstrations.exists():
        count = ["--episodes", DEMONSTRATED[environment], "--first-seed", 100 * seed]
        run_tool("examples/gymnasium_environment.py", "demonstrate", "--out", demonstrations, *count, *chosen)
    if not nano.exists():
        words = ["--vocab", 600, "--words", demonstrations / "words.txt"]
        run_tool("tools/data/make_tiny_qwen2_5_vl.py", "--out", nano, "--seed", seed, *words)
    small = [[*TINY, *TINY_STAGE[stage]] if tiny else [] for stage in ("sft", "rl")]
    given = [*chosen, f"task.options.eval_seeds={NUM_EVAL}", f"task.eval_samples={NUM_SAMPLES}", f"run.seed={seed}"]
    transcripts = f"task.data.demonstrations=[{demonstrations / 'transcripts.jsonl'}]"
    train(
        home / "sft",
        "experiment=minigrid_sft_cpu",
        f"model.path={nano}",
        transcripts,
        f"sft.steps=[{SFT_STEPS[environment]}]",
        *given,
        *small[0],
    )
    train(home / algorithm, *CELLS[cell], f"model.path={home / 'sft' / 'final'}", *given, *small[1])


def play_reference(environment: str, demonstrator: Demonstrator, *, num: int) -> Score:
    """Play held-out seeds with a demonstrator."""
    given = ["experiment=minigrid_sft_cpu", *ENVIRONMENTS[environment]]
    player = DemonstrationPlayer(compose_settings(given).task, demonstrator)
    played = [asyncio.run(player.play(FIRST_EVAL_SEED + number)) for number in range(num)]
    solved = statistics.fmean(episode.is_solved for episode in played)
    return Score(solved, statistics.fmean(episode.episode_return for episode in played), num)


def make_random_player(seed: int) -> Demonstrator:
    """Return a demonstrator that plays uniformly random actions."""
    dice = random.Random(seed)
    return lambda env, _: dice.randrange(int(env.action_space.n))


def load_references(out: Path, *, num: int) -> dict[str, dict[str, Score]]:
    """Return the scores of random play and of the solver, which are measured once."""
    path = out / "references.json"
    if not path.exists():
        solver = runpy.run_path(str(ROOT / "examples" / "gymnasium_environment.py"))["demonstrate"]
        players = {"random play": make_random_player(0), "solver": solver}
        measured = {
            environment: {name: play_reference(environment, player, num=num) for name, player in players.items()}
            for environment in ENVIRONMENTS
        }
        rows = {
            environment: {name: [score.success, score.mean_return, score.num] for name, score in scores.items()}
            for environment, scores in measured.items()
        }
        path.write_text(json.dumps(rows) + "\n")
    return {environment: {name: Score(*row) for name, row in rows.items()} for environment, rows in json.loads(path.read_text()).items()}


def read_scores(folder: Path) -> dict[str, Score]:
    """Return the greedy and the sampled score of a run."""
    found = json.loads((folder / "eval.json").read_text())
    return {
        kind: Score(found[f"{kind}_success"], found[f"{kind}_return"], int(found[f"{kind}_episodes"])) for kind in ("greedy", "sampled")
    }


def make_table(out: Path, seeds: Sequence[int], *, num_reference: int) -> str:
    """Return a Markdown table of all finished runs."""
    lines = [
        "| environment | player | seed | success, % | return | at temperature 1, % | return | CPU min |",
        "|" + "---|" * 8,
    ]
    for environment, references in load_references(out, num=num_reference).items():
        lines += [f"| {environment} | {name} | | {score} | | | |" for name, score in references.items()]
        for stage in ("sft", *(cell.split("/")[1] for cell in CELLS if cell.startswith(f"{environment}/"))):
            for seed in seeds:
                folder = out / f"seed{seed}" / environment / stage
                if not (folder / "eval.json").exists():
                    lines.append(f"| {environment} | {stage} | {seed} | not run | | | | |")
                    continue
                scores, spent = read_scores(folder), float(folder.with_name(f"{stage}.seconds").read_text()) / 60
                lines.append(f"| {environment} | {stage} | {seed} | {scores['greedy']} | {scores['sampled']} | {spent:.1f} |")
    return "\n".join(lines)


def plot_curves(out: Path, seeds: Sequence[int]) -> None:
    """Plot the rewards of all finished runs of an environment in one figure."""
    for environment in ENVIRONMENTS:
        runs = {
            f"{algorithm}, seed {seed}": out / f"seed{seed}" / environment / algorithm / "metrics.jsonl"
            for cell in CELLS for place, algorithm in [cell.split("/")] if place == environment for seed in seeds
        }  # fmt: skip
        finished = {name: path for name, path in runs.items() if (path.parent / "eval.json").exists()}
        if finished:
            plot_reward_curves(finished, out / f"{environment}.png")


def main() -> None:
    """Run the cells and print the table."""
    arguments = parse_cell_arguments(__doc__, CELLS, out=Path("runs/minigrid_seeds"))
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            run_cell(cell, seed, out, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(make_table(out, arguments.seeds, num_reference=4 if arguments.tiny else NUM_REFERENCE))
    plot_curves(out, arguments.seeds)


if __name__ == "__main__":
    main()
