"""GRPO through unmodified agents of openai-agents, smolagents and verifiers, and natively.

    bash launch/install_agents.sh .venv-agents
    .venv/bin/python benchmarks/agent_frameworks.py --out runs/frameworks --seeds 0
    .venv/bin/python benchmarks/agent_frameworks.py --out runs/frameworks --table  # the table only
    # Smoke test, one step per run:
    .venv/bin/python benchmarks/agent_frameworks.py --out runs/tiny --tiny --seeds 0

All cells play NumberLine, with the same rewards. The cell number_line is task=number_line; the
others are the agents of examples/agents, each as a service in its own virtual environment. All
cells of a seed start from one SFT checkpoint: a stage on demonstrations of task=number_line without
mistakes, in which the model learns to read the pictures, then a stage on the transcripts of
examples/agents/record_transcripts.py for all four. Success is the fraction of episodes with a
return above 0 (the target is reached without mistakes), from all 30 start states, greedily and at
temperature 1, with Wilson's 95% interval. Processor minutes of a cell include its evaluations and
the agents' service. Finished parts are kept, and an interrupted run is resumed.
"""

import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from card_games import make, parse_cell_arguments
from numberline import ROOT
from visual_search import processor_s

from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.plot import plot_reward_curves

RECORDER = ROOT / "examples" / "agents" / "record_transcripts.py"
AGENTS = ("openai_agents", "smolagents", "verifiers")
CELLS = ("number_line", *AGENTS)
MODEL = ["model.min_pixels=19600", "model.max_pixels=20000", "engine.max_images=16", "task.max_new_tokens=48"]
PASSES = 4
"""Recorded episodes of each start state."""
REPEATS = {"number_line": 6, "openai_agents": 3, "smolagents": 1, "verifiers": 3}
"""Number of times that a pass of the SFT stage shows the transcripts of a cell. Those of smolagents
are one for each request, so there are five times as many.
"""
SFT = ["experiment=numberline_sft_cpu", "sft.splits=[correct,transcripts]", "sft.steps=[120,160]", "sft.batch_size=32",
       "sft.num_demonstrations=5120", "task.eval_samples=0"]  # fmt: skip
RL = ["batch.prompts_per_step=8", "batch.group_size=8", "batch.minibatches=2", "batch.epochs=2", "batch.loss_agg_mode=sequence_mean",
      "optim.lr=5e-5", "optim.warmup_steps=4", "run.steps=24", "run.eval_every=0", "task.eval_samples=0"]  # fmt: skip
EVALUATIONS = {"greedy": ["evaluation.samples=1"], "sampled": ["evaluation.samples=8", "evaluation.temperature=1"]}
TINY = {
    "sft": ["sft.steps=[1,1]", "sft.batch_size=2", "sft.num_demonstrations=2"],
    "rl": ["run.steps=1", "batch.prompts_per_step=1", "batch.group_size=2"],
    "evaluation": ["evaluation.samples=1", "task.data.max_eval=2"],
}


@contextmanager
def count_seconds(path: Path) -> Iterator[None]:
    """Add the processor seconds of the child processes that end in this context to a file."""
    spent, before = float(path.read_text()) if path.exists() else 0.0, processor_s()
    try:
        yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{spent + processor_s() - before:.1f}\n")


def launch(script: str, folder: Path, *overrides: str, result: str) -> None:
    """Run a script of launch/ to its end, unless it is already finished.

    The SFT run has two processes. All others have one, so that two cells fit on two cores.
    """
    if (folder / result).exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.log").open("a") as log:
        spawner = ["launch/launch.py", "--nproc_per_node", "2"] if folder.name == "sft" else []
        command = [sys.executable, *spawner, f"launch/{script}.py", *overrides, f"run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def task_settings(cell: str, data: Path, url: str) -> list[str]:
    """Return the settings of a cell's task."""
    if cell == "number_line":
        return ["task=number_line"]
    questions = data / "questions.jsonl"
    files = [f"task.data.{split}=[{questions}]" for split in ("train", "eval")]
    # Two turns more than the game has moves: smolagents ends with a call of final_answer, and asks
    # for it once more if it is missing.
    return ["task=agent", "task.reward=reported", f"task.options.url={url}", "task.max_turns=12", *files]


def prepare(seed: int, home: Path, environments: Path, *, tiny: bool) -> Path:
    """Return the SFT checkpoint of a seed, after making it and what it is trained on."""
    data, nano = home / "data", home / "nano"
    if not (data / "words.txt").exists():  # the last file of the recording
        shutil.rmtree(data, ignore_errors=True)
        command = [sys.executable, RECORDER, "--out", data, "--environments", environments, "--seed", seed]
        subprocess.run([*map(str, command), "--passes", str(1 if tiny else PASSES)], cwd=ROOT, check=True)
    make("make_tiny_qwen2_5_vl", nano, "--seed", seed, "--vocab", 800, "--words", data / "words.txt")
    transcripts = ",".join(str(data / f"{cell}.jsonl") for cell in CELLS for _ in range(REPEATS[cell]))
    given = [f"model.path={nano}", f"run.seed={seed}", f"task.data.demonstrations=[{transcripts}]", "checkpoint.every=50"]
    with count_seconds(home / "sft.seconds"):
        launch("train", home / "sft", *SFT, *MODEL, *given, *(TINY["sft"] if tiny else []), result="final/config.json")
    return home / "sft" / "final"


def run_cell(cell: str, seed: int, out: Path, environments: Path, *, tiny: bool) -> None:
    """Evaluate the SFT checkpoint on a cell's task, train it, and evaluate the result."""
    home = out / f"seed{seed}"
    start = prepare(seed, home, environments, tiny=tiny)
    if all((home / f"{cell}_after_{kind}" / "evaluation.json").exists() for kind in EVALUATIONS):
        return
    serve = runpy.run_path(str(RECORDER))["start_service"]
    python = environments.resolve() / cell / "bin" / "python"
    service = nullcontext("") if cell == "number_line" else serve(python, cell, home / "data" / "pictures")
    with count_seconds(home / f"{cell}.seconds"), service as url:
        task = [*task_settings(cell, home / "data", url), *MODEL, f"run.seed={seed}"]
        evaluate(home / f"{cell}_before", start, *task, tiny=tiny)
        trained = ["checkpoint.every=5", *(TINY["rl"] if tiny else [])]
        launch("train", home / cell, *task, *RL, f"model.path={start}", *trained, result="final/config.json")
        evaluate(home / f"{cell}_after", home / cell / "final", *task, tiny=tiny)


def evaluate(folder: Path, checkpoint: Path, *task: str, tiny: bool) -> None:
    """Evaluate a checkpoint greedily and at temperature 1, in two folders."""
    small = TINY["evaluation"][: 1 if "task=number_line" in task else 2] if tiny else []
    for kind, given in EVALUATIONS.items():
        overrides = [*task, f"model.path={checkpoint}", *given, *small]
        launch("evaluate", folder.with_name(f"{folder.name}_{kind}"), *overrides, result="evaluation.json")


def describe_evaluation(folder: Path) -> str:
    """Return two cells of the table: success with its interval, and mean return."""
    if not (folder / "evaluation.json").exists():
        return "not run | "
    rewards = [reward for line in (folder / "examples.jsonl").read_text().splitlines() for reward in json.loads(line)["rewards"]]
    success = statistics.fmean(reward > 0 for reward in rewards)
    low, high = wilson_interval(success, len(rewards))
    return f"{100 * success:.1f} ({100 * low:.1f} to {100 * high:.1f}) | {statistics.fmean(rewards):.2f}"


def describe_training(folder: Path) -> str:
    """Return two cells of the table: the largest logprob difference, and processor minutes."""
    if not (folder / "final" / "config.json").exists():
        return " | "
    steps = [step for step in read_metrics(folder / "metrics.jsonl") if "reward/mean" in step]
    gap = max(step["rollout_mismatch/logprob_abs_diff_max"] for step in steps)
    clock = folder.with_name(f"{folder.name}.seconds")
    return f"{gap:.1e} | {float(clock.read_text()) / 60:.1f}" if clock.exists() else f"{gap:.1e} | "


def make_table(out: Path, seeds: Sequence[int]) -> str:
    """Return a Markdown table of all runs."""
    lines = [
        "| cell | seed | policy | greedy success, % | return | success at temperature 1, % | return | max logprob difference | CPU min |",
        "|" + "---|" * 9,
    ]
    for cell in CELLS:
        for seed in seeds:
            home = out / f"seed{seed}"
            for time, name in (("before", "SFT"), ("after", "GRPO")):
                greedy, sampled = (describe_evaluation(home / f"{cell}_{time}_{kind}") for kind in EVALUATIONS)
                training = describe_training(home / cell) if time == "after" else " | "
                lines.append(f"| {cell} | {seed} | {name} | {greedy} | {sampled} | {training} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cells and print the table."""
    arguments = parse_cell_arguments(__doc__, CELLS, out=Path("runs/frameworks"), environments=Path(".venv-agents"))
    out = arguments.out.resolve()
    for seed in [] if arguments.table else arguments.seeds:
        for cell in arguments.cells:
            run_cell(cell, seed, out, arguments.environments, tiny=arguments.tiny)
            print(f"seed {seed}, {cell}: done", flush=True)
    print(make_table(out, arguments.seeds))
    curves = {f"{cell}, seed {seed}": out / f"seed{seed}" / cell / "metrics.jsonl" for cell in CELLS for seed in arguments.seeds}
    finished = {name: path for name, path in curves.items() if (path.parent / "final" / "config.json").exists()}
    if finished:
        plot_reward_curves(finished, out / "reward_curve.png")


if __name__ == "__main__":
    main()
