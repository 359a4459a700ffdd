r"""Grids, nested squares and circles (docs/geometry.md) over several seeds: warm start, then GRPO.

    .venv/bin/python benchmarks/geometry.py --out runs/geometry_seeds  # missing cells, the tables
    .venv/bin/python benchmarks/geometry.py --out runs/geometry_seeds --cells grpo --seeds 0
    .venv/bin/python benchmarks/geometry.py --out runs/geometry_seeds --table  # only the tables
    .venv/bin/python benchmarks/geometry.py --out runs/tiny --tiny --seeds 0   # smoke test

The seed determines the pictures, the initial weights and the rollouts. A cell is the warm start
(sft) or GRPO from it (grpo), each with a final evaluation on all held-out splits. Cells run one at
a time; an interrupted cell is resumed. Success is greedy accuracy, with Wilson's 95% interval for a
seed, and a t interval over the seeds. The baseline answers each question with its most frequent
answer in the training data.
"""

import collections
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from card_games import parse_cell_arguments
from numberline import ROOT
from scipy.stats import t as student_t
from visual_search import processor_s

from megatron_rl.data.benchmarks.benchmark_scores import to_metric_name
from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.io.jsonl import read_lines
from megatron_rl.observe.plot import plot_reward_curves

CELLS = {"sft": "geometry_sft_cpu", "grpo": "geometry_grpo_cpu"}
SPLITS = ("eval", "shift_color", "shift_width", "shift_size", "shift_count")
NUM_EVAL = 120
"""Pictures of each held-out split."""
TINY_DATA = ["--num-train", "8", "--num-eval", "6"]
TINY = {"sft": ["sft.steps=[1]", "sft.batch_size=2"], "grpo": ["run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2"]}


def run_command(*command: object, log: Path) -> None:
    """Run a script of this repository and append its output to a file."""
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=file, stderr=file, env=environment)


def run_cell(cell: str, seed: int, out: Path, *, tiny: bool) -> None:
    """Run the missing parts of a cell, and first those of the warm start that it needs.

    The processor seconds of training, summed over all attempts, are in a file next to the run.
    """
    home = out / f"seed{seed}"
    home.mkdir(parents=True, exist_ok=True)
    if cell == "grpo":
        run_cell("sft", seed, out, tiny=tiny)
    log, data, nano, run = home / f"{cell}.log", home / "data", home / "nano", home / cell
    if not data.exists():
        run_command(
            "tools/data/make_geometry.py", "--out", data, "--seed", seed, "--num-eval", NUM_EVAL, *(TINY_DATA if tiny else []), log=log
        )
    if not nano.exists():
        run_command("tools/data/make_tiny_qwen2_5_vl.py", "--out", nano, "--seed", seed, log=log)
    start = nano if cell == "sft" else home / "sft" / "final"
    given = [f"experiment={CELLS[cell]}", f"run.seed={seed}", *(TINY[cell] if tiny else [])]
    if not (run / "eval.json").exists():
        clock, before = home / f"{cell}.seconds", processor_s()
        spent = float(clock.read_text()) if clock.exists() else 0.0
        held_out = ",".join(str(data / f"{split}.jsonl") for split in SPLITS)
        files = [f"task.data.train=[{data / 'train.jsonl'}]", f"task.data.eval=[{held_out}]"]
        command = ["launch/launch.py", "--nproc_per_node", 2, "launch/train.py", *given, f"model.path={start}", *files, f"run.dir={run}"]
        try:
            run_command(*command, "checkpoint.every=20", log=log)
        finally:
            clock.write_text(f"{spent + processor_s() - before:.1f}\n")


@dataclass(slots=True, frozen=True)
class Score:
    """Correct answers to the questions of one kind in one split."""

    num_correct: int
    num: int


def read_scores(out: Path, seed: int, cell: str) -> dict[str, dict[str, Score]]:
    """Return the scores by split and kind.

    The result is empty if the cell is not finished.
    """
    home = out / f"seed{seed}"
    if not (home / cell / "eval.json").exists():
        return {}
    result = json.loads((home / cell / "eval.json").read_text())
    found: dict[str, dict[str, Score]] = {}
    for split in SPLITS:
        counts = collections.Counter(row["task"] for row in read_lines(home / "data" / f"{split}.jsonl"))
        found[split] = {
            task.partition(",")[0]: Score(round(result[f"greedy_task_{to_metric_name(task)}"] * num), num) for task, num in counts.items()
        }
    return found


def majority_rate(data: Path, split: str) -> float:
    """Return the accuracy of each question's most frequent answer in the training data."""
    answers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in read_lines(data / "train.jsonl"):
        answers[row["question"]][row["answer"]] += 1
    rows = read_lines(data / f"{split}.jsonl")
    return statistics.fmean(answers[row["prompt"]].most_common(1)[0][0] == row["groundtruth"] for row in rows)


def format_mean(values: Sequence[float]) -> str:
    """Return the mean of fractions in percent, with its 95% t interval if there are several."""
    mean, reach = t_interval(values)
    interval = f" ({100 * max(0.0, mean - reach):.1f} to {100 * min(1.0, mean + reach):.1f})" if len(values) > 1 else ""
    return f"{100 * mean:.1f}{interval}"


def format_change(values: Sequence[float]) -> str:
    """Return the mean of differences in points, with its 95% t interval if there are several."""
    mean, reach = t_interval(values)
    interval = f" ({100 * (mean - reach):+.1f} to {100 * (mean + reach):+.1f})" if len(values) > 1 else ""
    return f"{100 * mean:+.1f}{interval}"


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95% t interval, which is 0 for a single value."""
    num = len(values)
    if num < 2:
        return statistics.fmean(values), 0.0
    return statistics.fmean(values), float(student_t.ppf(0.975, num - 1)) * statistics.stdev(values) / math.sqrt(num)


def make_tables(out: Path, seeds: Sequence[int]) -> str:
    """Return the tables by split, by seed and by kind of all finished cells."""
    found = {
        (cell, split, seed): scores
        for cell in CELLS for seed in seeds for split, scores in read_scores(out, seed, cell).items()
    }  # fmt: skip
    return "\n\n".join((make_split_table(found, out, seeds), make_seed_table(found, out, seeds), make_kind_table(found, seeds)))


Scores = Mapping[tuple[str, str, int], Mapping[str, Score]]


def accuracy(scores: Mapping[str, Score]) -> float:
    """Return the fraction of correct answers of all kinds."""
    return sum(score.num_correct for score in scores.values()) / sum(score.num for score in scores.values())


def make_split_table(found: Scores, out: Path, seeds: Sequence[int]) -> str:
    """Return a table with one row per split: mean over seeds, before and after GRPO."""
    lines = ["| split | majority answer | warm start | after GRPO | difference |", "|---|---|---|---|---|"]
    for split in SPLITS:
        both = [seed for seed in seeds if all((cell, split, seed) in found for cell in CELLS)]
        if not both:
            lines.append(f"| {split} | not run | | | |")
            continue
        before, after = ([accuracy(found[cell, split, seed]) for seed in both] for cell in CELLS)
        baseline = statistics.fmean(majority_rate(out / f"seed{seed}" / "data", split) for seed in both)
        change = format_change([new - old for old, new in zip(before, after, strict=True)])
        lines.append(f"| {split} | {100 * baseline:.1f} | {format_mean(before)} | {format_mean(after)} | {change} |")
    return "\n".join(lines)


def make_seed_table(found: Scores, out: Path, seeds: Sequence[int]) -> str:
    """Return a table with one row per cell and seed: accuracy of each split with its interval."""
    lines = [f"| cell | seed | {' | '.join(SPLITS)} | CPU min |", "|" + "---|" * (len(SPLITS) + 3)]
    for cell in CELLS:
        for seed in seeds:
            columns = []
            for split in SPLITS:
                scores = found.get((cell, split, seed))
                if scores is None:
                    columns.append("not run")
                    continue
                low, high = wilson_interval(accuracy(scores), sum(score.num for score in scores.values()))
                columns.append(f"{100 * accuracy(scores):.1f} ({100 * low:.1f} to {100 * high:.1f})")
            clock = out / f"seed{seed}" / f"{cell}.seconds"
            minutes = f"{float(clock.read_text()) / 60:.1f}" if clock.exists() else ""
            lines.append(f"| {cell} | {seed} | {' | '.join(columns)} | {minutes} |")
    return "\n".join(lines)


def make_kind_table(found: Scores, seeds: Sequence[int]) -> str:
    """Return a table with one row per kind in distribution: mean over seeds for each cell."""
    lines = ["| kind, in distribution | warm start | after GRPO |", "|---|---|---|"]
    both = [seed for seed in seeds if all((cell, "eval", seed) in found for cell in CELLS)]
    for kind in found[next(iter(CELLS)), "eval", both[0]] if both else ():
        columns = [format_mean([accuracy({kind: found[cell, "eval", seed][kind]}) for seed in both]) for cell in CELLS]
        lines.append(f"| {kind} | {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cells, print the tables and draw the curve."""
    arguments = parse_cell_arguments(__doc__, CELLS, out=Path("runs/geometry_seeds"))
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            run_cell(cell, seed, out, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(make_tables(out, arguments.seeds))
    finished = {f"seed {seed}": out / f"seed{seed}" / "grpo" / "metrics.jsonl" for seed in arguments.seeds}
    finished = {name: path for name, path in finished.items() if (path.parent / "eval.json").exists()}
    if finished:
        plot_reward_curves(finished, out / "geometry_curves.png")
        print(f"curve: {out / 'geometry_curves.png'}")


if __name__ == "__main__":
    main()
