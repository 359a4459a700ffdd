"""Visual search on several seeds: nano checkpoint, SFT warm start, then GRPO and PPO.

    .venv/bin/python benchmarks/visual_search.py --seeds 0 1 2 --out runs/visual_search_seeds
    .venv/bin/python benchmarks/visual_search.py --seeds 0 --out runs/tiny --tiny       # smoke test

Uses the real sandbox and prints one table. The seed determines the checkpoint's initial weights,
the demonstrations and the rollouts. Accuracy and tool use are measured on the held-out canvases,
with greedy decoding and at temperature 1. Processor seconds include all processes of a stage and
the sandbox. On two otherwise idle cores, the wall time is about half of the processor seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from numberline import ROOT, train

from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.plot import plot_reward_curves
from megatron_rl.tasks.visual_search.task import NUM_EVAL

STAGES = {"sft": "visual_search_sft_cpu", "grpo": "visual_search_python_cpu", "ppo": "visual_search_ppo_cpu"}
FEW = ["task.data.max_eval=4", "task.eval_samples=1", "task.sandbox.size=2"]
TINY_RUN = ["run.steps=2", "batch.prompts_per_step=2", "batch.group_size=2", *FEW]
TINY = {
    "sft": ["sft.splits=[correct]", "sft.steps=[1]", "sft.num_demonstrations=4", "sft.batch_size=4", *FEW],
    "grpo": TINY_RUN,
    "ppo": TINY_RUN,
}


def processor_s() -> float:
    """Return the total processor time of all finished child processes, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_seed(seed: int, out: Path, *, tiny: bool) -> dict[str, float]:
    """Run one seed and return its row of the table; existing results are reused."""
    folder = out / f"seed{seed}"
    nano = folder / "nano"
    if not nano.exists():
        maker = ["tools/data/make_tiny_qwen2_5_vl.py", "--preset", "nano_search", "--out", str(nano), "--seed", str(seed)]
        subprocess.run([sys.executable, *maker], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    row: dict[str, float] = {"seed": seed}
    for stage, experiment in STAGES.items():
        run = folder / stage
        if not (run / "eval.json").exists():
            start = nano if stage == "sft" else folder / "sft" / "final"
            before = processor_s()
            own = (f"model.path={start}", f"run.dir={run}", f"run.seed={seed}")
            seconds = train(f"experiment={experiment}", *own, *(TINY[stage] if tiny else []))
            took = {"wall": seconds, "processor": processor_s() - before, "load": os.getloadavg()[0]}
            (run / "took.json").write_text(json.dumps(took) + "\n")
        result = json.loads((run / "eval.json").read_text())
        row |= {f"{stage} {name}": value for name, value in {**result, **json.loads((run / "took.json").read_text())}.items()}
    lines = [line for stage in ("grpo", "ppo") for line in read_metrics(folder / stage / "metrics.jsonl")]
    steps = [line for line in lines if "reward/mean" in line]
    row["gap max"] = max(step["rollout_mismatch/logprob_abs_diff_max"] for step in steps)
    row["failed"] = max(step["rollout/failed_fraction"] for step in steps)
    return row


def table(rows: list[dict[str, float]], *, num_eval: int) -> str:
    """Return a Markdown table with accuracy, tool use and processor time for each seed."""
    lines = ["| seed | stage | greedy accuracy (95%) | temperature 1 | tool use greedy | temperature 1 | wall s (load) | processor s |"]
    lines.append("|" + "---|" * 8)
    for row in rows:
        for stage in STAGES:
            value = {name.removeprefix(f"{stage} "): value for name, value in row.items() if name.startswith(f"{stage} ")}
            low, high = wilson_interval(value["greedy_success"], num_eval)
            accuracy = f"{value['greedy_success']:.1%} ({low:.1%} to {high:.1%}) | {value['sampled_success']:.1%}"
            use = f"{value['greedy_tool_use']:.1%} | {value['sampled_tool_use']:.1%}"
            times = f"{value['wall']:.0f} ({value['load']:.0f}) | {value['processor']:.0f}"
            lines.append(f"| {row['seed']:.0f} | {stage} | {accuracy} | {use} | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/visual_search_seeds"))
    parser.add_argument("--tiny", action="store_true", help="smoke test: one or two steps per stage")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    rows = []
    for seed in arguments.seeds:
        rows.append(run_seed(seed, out, tiny=arguments.tiny))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows, num_eval=4 if arguments.tiny else NUM_EVAL))
    runs = {f"seed {seed}, {stage}": out / f"seed{seed}" / stage for seed in arguments.seeds for stage in ("grpo", "ppo")}
    plot_reward_curves({name: run / "metrics.jsonl" for name, run in runs.items()}, out / "reward_curve.png")
    print(f"reward curves: {out / 'reward_curve.png'}")


if __name__ == "__main__":
    main()
