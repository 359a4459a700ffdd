r"""GRPO and on-policy distillation on NumberLine, with equal starts and numbers of episodes.

    .venv/bin/python benchmarks/distillation.py --out runs/distillation  # missing runs, the table
    .venv/bin/python benchmarks/distillation.py --out runs/distillation --cells distill --seeds 0
    .venv/bin/python benchmarks/distillation.py --out runs/tiny --tiny --seeds 0  # smoke test

The seed determines the checkpoint's initial weights, the demonstrations and the rollouts. The
policy starts from the quickstart's warm start of that seed, and the teacher, which only some cells
need, is the quickstart's trained policy of that seed. An interrupted run is resumed. Success rates
are averages over all 30 start states, weighted by the frequency of the states: exact for greedy
decoding, and estimated from 8 episodes per start state at temperature 1.
"""

import json
import statistics
from pathlib import Path

from card_games import parse_cell_arguments
from numberline import make_nano, run_stage, train

EPISODES = ["run.steps=12", "batch.prompts_per_step=24", "batch.group_size=4"]
CELLS = {
    "grpo_short": [],
    "distill": ["algo=distill", "distill.teacher={teacher}"],
    "distill_forward_kl": ["algo=distill", "distill.teacher={teacher}", "distill.divergence=forward_kl"],
    "distill_reward": ["algo=distill", "distill.teacher={teacher}", "distill.apply_to=reward"],
    "grpo_and_distill": ["distill.teacher={teacher}"],
    "grpo_and_merge": ["distill.merge.method=ema"],
    "grpo_and_merge_reward": ["distill.merge.method=ema", "distill.apply_to=reward"],
    "grpo_and_merge_ties": ["distill.merge.method=ties_ema"],
    "grpo_and_merge_sft": ["distill.merge.method=ties_ema", "distill.apply_to=responses"],
}
TINY = ["run.steps=1", "batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=1", "task.max_turns=1"]


def run_cell(cell: str, seed: int, out: Path, *, tiny: bool) -> None:
    """Train the warm start, the teacher if the cell needs it, and the cell, unless they exist."""
    folder = out / f"seed{seed}"
    run_stage("sft", make_nano(seed, out), folder / "sft", seed=seed, tiny=tiny)
    if any("{teacher}" in each for each in CELLS[cell]):
        run_stage("grpo", folder / "sft" / "final", folder / "grpo", seed=seed, tiny=tiny)
    if (folder / cell / "eval.json").exists():
        return
    overrides = [each.format(teacher=folder / "grpo" / "final") for each in CELLS[cell]]
    paths = [f"model.path={folder / 'sft' / 'final'}", f"run.dir={folder / cell}", f"run.seed={seed}"]
    train("experiment=numberline_grpo_cpu", *paths, *EPISODES, *overrides, *(TINY if tiny else []))


def read_success(folder: Path) -> tuple[float, float] | None:
    """Return the success of a run, greedily and at temperature 1; None if it has not finished."""
    if not (folder / "eval.json").exists():
        return None
    result = json.loads((folder / "eval.json").read_text())
    return result["greedy_success"], result["sampled_success"]


def format_table(out: Path, seeds: list[int]) -> str:
    """Return the table of all finished runs, with one row per policy."""
    rows = ["| policy | greedy, % (by seed) | mean | temperature 1, % (by seed) | mean |", "|---|---|---|---|---|"]
    names = {"warm start": "sft", "teacher": "grpo", **{cell: cell for cell in CELLS}}
    for name, folder in names.items():
        found = [each for seed in seeds if (each := read_success(out / f"seed{seed}" / folder))]
        if found:
            columns = [[100 * success for success in column] for column in zip(*found, strict=True)]
            parts = [f"{' / '.join(f'{each:.1f}' for each in column)} | {statistics.fmean(column):.1f}" for column in columns]
            rows.append(f"| {name} | {' | '.join(parts)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the cells and print the table."""
    arguments = parse_cell_arguments(__doc__, CELLS, out=Path("runs/distillation"))
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            run_cell(cell, seed, out, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(format_table(out, arguments.seeds))


if __name__ == "__main__":
    main()
