"""Comparison with TRL's GRPOTrainer on single-turn NumberLine.

    .venv/bin/python benchmarks/vs_trl.py --rounds 2 --steps 30
    .venv/bin/python benchmarks/vs_trl.py --sweep        # compares TRL's options in a few steps

Both sides use the same checkpoint, prompts, settings and cores. Every run is a separate process
tree, and runs of TRL and of this project alternate. TRL is installed in .venv-trl (see
benchmarks/requirements-trl.txt). An episode is a single move. The reward is 1 if the move reaches
the goal, 0 if it gets closer to the goal, and -1 if it is wrong or invalid. A sample is solved if
its reward is at least 0.

    seconds a step   median over the steps after --warmup, each from the end of the previous step to
                     the end of the step, according to the log of each side
    to 95%           total seconds of the steps, without start-up, until the mean fraction of solved
                     samples over three consecutive steps is at least 95%
    first step       seconds from the launch of the process until its first step is logged, which
                     includes imports and start-up of the engine
    peak RSS         maximum resident memory of the process tree over all samples; shared memory
                     counts once per process
    CPU s a step     processor seconds of the process tree per step after --warmup, which other load
                     on the machine affects least

Differences: TRL also ends a response at <|endoftext|>. TRL bans only the image token, and only
during sampling.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PIXELS = (19600, 20000)
"""min_pixels and max_pixels of the processor, which resizes images to 140 x 140 pixels."""
PROMPTS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 32, 8, 48, 3e-4
TRL_STD_EPS = 1e-4
"""Constant that TRL 1.16 adds to a group's standard deviation; algo.std_eps is set to it."""
SOLVED, WINDOW = 0.95, 3
SAMPLE_S = 0.25
TRL_SWITCHES = {
    "1x1": ["--micro-batch", "64"],
    "1x2": ["--micro-batch", "64"],
    "1x2 micro-batch 256": ["--micro-batch", "256"],
    "2x1": ["--micro-batch", "64"],
    "2x1 micro-batch 32": ["--micro-batch", "32"],
    "2x1 micro-batch 128": ["--micro-batch", "128"],
    "2x1 static cache": ["--micro-batch", "64", "--static-cache"],
    "2x1 torch.compile": ["--micro-batch", "64", "--compile"],
}
"""Maps a name to TRL options; the name starts with the numbers of processes and threads."""
TRL_BEST = "2x1"


@dataclass(slots=True, frozen=True)
class Side:
    """One side of the comparison: a command and its log, which has one JSON line per step."""

    name: str
    threads: int
    command: list[str]
    log: Path


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    """Measurements of one run."""

    side: str
    step_s: float
    cpu_step_s: float
    first_step_s: float
    to_solved_s: float | None
    solved: list[float]
    peak_rss_gb: float
    load: tuple[float, float, float]
    """os.getloadavg() before the run."""


def launcher(venv: str, processes: int) -> list[str]:
    """Return the command prefix: torchrun for more than one process, else plain Python."""
    binaries = ROOT / venv / "bin"
    if processes == 1:
        return [str(binaries / "python")]
    return [str(binaries / "torchrun"), "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", str(processes)]


def our_side(given: argparse.Namespace, folder: Path, *, processes: int) -> Side:
    """Return this project's side with the settings of the comparison."""
    settings = {
        "model.path": given.model, "model.min_pixels": PIXELS[0], "model.max_pixels": PIXELS[1],
        "run.dir": folder, "run.steps": given.steps, "run.seed": given.seed, "run.require_improvement": "false",
        "task.max_turns": 1, "task.max_new_tokens": MAX_TOKENS, "task.eval_samples": 1,
        "batch.prompts_per_step": PROMPTS, "batch.group_size": GROUP_SIZE, "batch.minibatches": 1, "batch.epochs": 1,
        "optim.lr": LEARNING_RATE, "optim.schedule": "constant", "optim.warmup_steps": 0, "optim.weight_decay": 0.0, "optim.clip_grad": 1.0,
        "optim.beta1": 0.9, "optim.beta2": 0.999, "optim.eps": 1e-8, "algo.std_eps": TRL_STD_EPS, "algo.norm_adv_by_std": "true",
        "batch.loss_agg_mode": "token_mean", "algo.clip_ratio_low": 0.2, "algo.clip_ratio_high": 0.2, "algo.kl_coef": 0.0,
        "algo.entropy_coef": 0.0,
        "algo.temperature": 1.0,
    }  # fmt: skip
    assignments = [f"{key}={value}" for key, value in settings.items()]
    command = [*launcher(".venv", processes), "launch/train.py", "experiment=numberline_grpo_cpu", *assignments]
    return Side(f"ours {processes}x1", 1, command, folder / "metrics.jsonl")


def trl_side(given: argparse.Namespace, folder: Path, switches: str) -> Side:
    """Return TRL's side with the settings of the comparison and the options in `switches`."""
    processes, threads = int(switches[0]), int(switches[2])
    log = folder / "metrics.jsonl"
    settings = {
        "--model": given.model, "--out": log, "--steps": given.steps, "--prompts": PROMPTS, "--group-size": GROUP_SIZE,
        "--max-tokens": MAX_TOKENS, "--lr": LEARNING_RATE, "--min-pixels": PIXELS[0], "--max-pixels": PIXELS[1], "--seed": given.seed,
        "--threads": threads,
    }  # fmt: skip
    assignments = [str(part) for pair in settings.items() for part in pair]
    command = [*launcher(".venv-trl", processes), "benchmarks/trl_side.py", *assignments, *TRL_SWITCHES[switches]]
    return Side(f"TRL {switches}", threads, command, log)


def look(process: psutil.Popen) -> tuple[int, float]:
    """Return the resident bytes and the processor seconds of a process and its descendants.

    Processes that have already ended are not included.
    """
    rss, cpu_s = 0, 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
            rss, cpu_s = rss + member.memory_info().rss, cpu_s + times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return rss, cpu_s


def measure(side: Side, given: argparse.Namespace) -> Result:
    """Run one side to its end and return its measurements.

    Raises:
        RuntimeError: The run failed; the message contains the end of the run's output.
    """
    side.log.parent.mkdir(parents=True)
    output, load, started = side.log.with_name("output.txt"), os.getloadavg(), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads)}
    peak, seen = 0, {0: (0.0, 0.0)}
    with output.open("w") as file:
        process = psutil.Popen(side.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                rss, cpu_s = look(process)
                peak = max(peak, rss)
                num_steps = side.log.read_bytes().count(b"\n") if side.log.exists() else 0
                seen.setdefault(num_steps, (time.perf_counter() - started, cpu_s))
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
    if process.returncode:
        raise RuntimeError(f"{side.name} exited with code {process.returncode}:\n{output.read_text()[-2000:]}")
    lines = [line for line in map(json.loads, side.log.read_text().splitlines()) if line["step"] < given.steps]
    seconds, solved = [step_seconds(line) for line in lines], [solved_fraction(line) for line in lines]
    first, last = min(n for n in seen if n >= given.warmup), max(n for n in seen if n <= given.steps)
    return Result(
        side=side.name,
        step_s=statistics.median(seconds[given.warmup :]),
        cpu_step_s=(seen[last][1] - seen[first][1]) / (last - first),
        first_step_s=seen[min(n for n in seen if n > 0)][0],
        to_solved_s=time_to_solved(seconds, solved),
        solved=solved,
        peak_rss_gb=peak / 1e9,
        load=load,
    )


def step_seconds(line: dict[str, float]) -> float:
    """Return the duration of a step in seconds.

    In this project's log, the total of the first step also contains the time before the step,
    including engine start-up; this time is subtracted.
    """
    starting = ("time/start", "time/unaccounted") if line["step"] == 0 else ()
    return line["time/total"] - sum(line.get(name, 0.0) for name in starting)


def solved_fraction(line: dict[str, float]) -> float:
    """Return the fraction of solved samples.

    This project's log contains mean and standard deviation of the rewards. Rewards are -1, 0 or 1,
    so E[r^2] - E[r] is twice the fraction of rewards of -1.
    """
    if "solved" in line:
        return line["solved"]
    mean, std = line["reward/mean"], line["reward/std"]
    return 1 - (std**2 + mean**2 - mean) / 2


def time_to_solved(seconds: list[float], solved: list[float]) -> float | None:
    """Return the seconds until the mean solved fraction of WINDOW steps reaches SOLVED, or None."""
    for end in range(WINDOW, len(solved) + 1):
        if statistics.fmean(solved[end - WINDOW : end]) >= SOLVED:
            return sum(seconds[:end])
    return None


def report(results: list[Result], given: argparse.Namespace) -> None:
    """Print medians over the rounds for each side, and the conditions of the comparison."""
    print(f"\n{'':24s} {'s/step':>7} {'samples/s':>9} {'CPU s/step':>10} {'to 95%':>7} {'first step':>10} {'peak RSS':>9} {'solved':>15}")
    for name in dict.fromkeys(result.side for result in results):
        own = [result for result in results if result.side == name]
        times = [(result.step_s, result.cpu_step_s, result.first_step_s) for result in own]
        step_s, cpu_s, first_s = (statistics.median(values) for values in zip(*times, strict=True))
        reached = [result.to_solved_s for result in own if result.to_solved_s is not None]
        to_solved = f"{statistics.median(reached):.0f} s" if len(reached) == len(own) else "-"
        solved = statistics.fmean(statistics.fmean(result.solved[-WINDOW:]) for result in own)
        peak = max(result.peak_rss_gb for result in own)
        print(
            f"{name:24s} {step_s:7.2f} {PROMPTS * GROUP_SIZE / step_s:9.0f} {cpu_s:10.2f} {to_solved:>7} {first_s:8.0f} s "
            f"{peak:6.2f} GB {own[0].solved[0]:6.1%} > {solved:6.1%}"
        )
    loads = ", ".join(f"{result.load[0]:.1f}" for result in results)
    print(f"{given.steps} steps of {PROMPTS} prompts x {GROUP_SIZE} samples, at most {MAX_TOKENS} tokens each")
    print(f"load average before each run: {loads}")


def compare(results: list[Result], ours: str, theirs: str) -> None:
    """Print the ratios of TRL's step times to this project's step times.

    The function also reports whether both sides start from the same policy.
    """
    pairs = list(zip((r for r in results if r.side == ours), (r for r in results if r.side == theirs), strict=True))
    for what, ratios in {
        "seconds per step": [them.step_s / us.step_s for us, them in pairs],
        "CPU seconds per step": [them.cpu_step_s / us.cpu_step_s for us, them in pairs],
    }.items():
        print(f"{what}: {theirs} / {ours} = {statistics.median(ratios):.2f} (per round: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    us, them = (side.solved[0] for side in pairs[0])
    mean = (us + them) / 2
    noise = math.sqrt(2 * mean * (1 - mean) / (PROMPTS * GROUP_SIZE))
    verdict = "the same policy" if abs(us - them) <= 3 * noise else "NOT the same policy"
    print(f"step 0 solved: ours {us:.1%}, TRL {them:.1%}, standard error of the difference {noise:.1%}: {verdict}")
    print("prompt ids and pixels: equal (benchmarks/trl_side.py exits with an error otherwise)")


def main() -> None:
    """Run both sides and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart/sft/final", help="NumberLine checkpoint after the warm start")
    parser.add_argument("--rounds", type=int, default=2, help="number of runs per side; runs of the two sides alternate")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2, help="number of first steps excluded from the medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl", default=TRL_BEST, choices=list(TRL_SWITCHES), metavar="SWITCHES", help=f"one of {', '.join(TRL_SWITCHES)}")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="run TRL once with each choice of --trl, and this project once with 1 and once with 2 processes",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs/vs_trl", help="new folder for results.jsonl and the logs of the runs")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"--out={given.out}: exists; remove it or choose another folder")
    given.model = str(Path(given.model).resolve())
    results: list[Result] = []

    def run(build: Callable[[Path], Side]) -> None:
        side = build(given.out / f"{len(results):02d}")
        print(f"{side.name} ...", flush=True)
        results.append(measure(side, given))
        with (given.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(results[-1])) + "\n")

    if given.sweep:
        for switches in TRL_SWITCHES:
            run(partial(trl_side, given, switches=switches))
        for processes in (1, 2):
            run(partial(our_side, given, processes=processes))
    else:
        for _ in range(given.rounds):
            run(partial(trl_side, given, switches=given.trl))
            run(partial(our_side, given, processes=2))
    report(results, given)
    if not given.sweep:
        compare(results, ours=results[1].side, theirs=results[0].side)


if __name__ == "__main__":
    main()
