r"""Quickstart recipe on several seeds: nano checkpoint, SFT warm start, GRPO.

    .venv/bin/python benchmarks/numberline.py --seeds 0 1 2 --out runs/seeds
    .venv/bin/python benchmarks/numberline.py --staleness 0 1 \
        --beyond algo.rollout_correction=bypass optim.lr=1e-4
    .venv/bin/python benchmarks/numberline.py --seeds 0 --out runs/tiny --tiny      # smoke test

Prints one table and draws one plot. The seed determines the checkpoint's initial weights, the
demonstrations and the rollouts. An episode is a success if its return is above 0. Success rates are
averages over all 30 start states, weighted by the frequency of the states. The rates are exact for
greedy decoding, and estimated from 8 episodes per start state at temperature 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.plot import plot_reward_curves

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "sft": ["sft.steps=[1,1]", "sft.num_demonstrations=8", "sft.batch_size=4", "task.eval_samples=1"],
    "grpo": ["run.steps=2", "batch.prompts_per_step=2", "batch.group_size=2", "task.eval_samples=1", "task.max_turns=1"],
}


def train(*overrides: str) -> float:
    """Run one stage with two processes and return its duration in seconds, including start-up."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "launch/train.py", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def run_seed(seed: int, staleness: int, beyond: list[str], out: Path, *, tiny: bool) -> dict[str, float]:
    """Run one seed and return its row of the table.

    Existing results are reused, so runs with different staleness limits share the nano checkpoint
    and the SFT warm start.
    """
    row: dict[str, float] = {"seed": seed, "staleness": staleness}
    asynchronous = [f"run.max_staleness={staleness}", *beyond] if staleness else []
    start, grpo = make_nano(seed, out), grpo_folder(out, seed, staleness)
    row |= run_stage("sft", start, out / f"seed{seed}" / "sft", seed=seed, tiny=tiny)
    row |= run_stage("grpo", out / f"seed{seed}" / "sft" / "final", grpo, *asynchronous, seed=seed, tiny=tiny)
    steps = [step for step in read_metrics(grpo / "metrics.jsonl") if "reward/mean" in step]
    row["gap max"] = max(step["rollout_mismatch/logprob_abs_diff_max"] for step in steps)
    row["s/step"] = statistics.median(step["time/total"] for step in steps)
    row["stale"] = statistics.mean(step.get("rollout/staleness", 0.0) for step in steps)
    row["sync ms"] = 1e3 * statistics.median(step["time/sync"] for step in steps)
    row["outside"] = sum(step["time/unaccounted"] for step in steps) / sum(step["time/total"] for step in steps)
    return row


def make_nano(seed: int, out: Path) -> Path:
    """Return the folder of a seed's nano checkpoint, which is made if it is missing."""
    folder = out / f"seed{seed}" / "nano"
    if not folder.exists():
        maker = [sys.executable, "tools/data/make_tiny_qwen2_5_vl.py", "--out", str(folder), "--seed", str(seed)]
        subprocess.run(maker, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def run_stage(stage: str, start: Path, run: Path, *overrides: str, seed: int, tiny: bool) -> dict[str, float]:
    """Run a stage from the model `start` unless it has finished; return its success and seconds."""
    if not (run / "eval.json").exists():
        settings = [f"model.path={start}", f"run.dir={run}", f"run.seed={seed}", *(TINY[stage] if tiny else []), *overrides]
        (run / "seconds").write_text(f"{train(f'experiment=numberline_{stage}_cpu', *settings):.1f}\n")
    result, seconds = json.loads((run / "eval.json").read_text()), float((run / "seconds").read_text())
    return {f"{stage} greedy": result["greedy_success"], f"{stage} sampled": result["sampled_success"], f"{stage} s": seconds}


def grpo_folder(out: Path, seed: int, staleness: int) -> Path:
    """Return the GRPO run directory for a seed and a staleness."""
    return out / f"seed{seed}" / (f"grpo_staleness{staleness}" if staleness else "grpo")


def main() -> None:
    """Run all seeds, print the table and draw the reward curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0], help="values of run.max_staleness for GRPO")
    parser.add_argument(
        "--beyond", nargs="+", default=[], metavar="KEY=VALUE", help="additional GRPO settings for runs with a staleness above 0"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--tiny", action="store_true", help="smoke test: one or two steps per stage")
    arguments = parser.parse_args()
    rows = []
    cells = [(seed, staleness) for seed in arguments.seeds for staleness in arguments.staleness]
    for seed, staleness in cells:
        rows.append(run_seed(seed, staleness, arguments.beyond, arguments.out, tiny=arguments.tiny))
        print(json.dumps(rows[-1]), flush=True)
    stages = "after SFT greedy | temperature 1 | after GRPO greedy | temperature 1"
    print(
        f"| seed | max staleness | mean staleness | {stages} | SFT s | GRPO s | s / GRPO step | weight sync ms | max logprob diff "
        f"| fraction of time unaccounted for |"
    )
    print("|" + "---|" * 13)
    for row in rows:
        shares = " | ".join(f"{row[f'{stage} {kind}']:.1%}" for stage in ("sft", "grpo") for kind in ("greedy", "sampled"))
        times = f"{row['sft s']:.0f} | {row['grpo s']:.0f} | {row['s/step']:.2f} | {row['sync ms']:.0f}"
        head = f"{row['seed']:.0f} | {row['staleness']:.0f} | {row['stale']:.2f}"
        print(f"| {head} | {shares} | {times} | {row['gap max']:.1e} | {row['outside']:.2%} |")
    names = {cell: f"seed {cell[0]}" + (f", staleness {cell[1]}" if cell[1] else "") for cell in cells}
    curves = {name: grpo_folder(arguments.out, *cell) / "metrics.jsonl" for cell, name in names.items()}
    plot_reward_curves(curves, arguments.out / "reward_curve.png")
    print(f"reward curves: {arguments.out / 'reward_curve.png'}")


if __name__ == "__main__":
    main()
