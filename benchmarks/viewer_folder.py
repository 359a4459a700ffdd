"""Response times and peak memory of the viewer on a 10 GB run directory.

    .venv/bin/python benchmarks/viewer_folder.py
    .venv/bin/python benchmarks/viewer_folder.py --tiny      # smoke test

One run directory has short episodes, and another has long episodes. A few steps with synthetic
rollouts, as in bank.py, are written in the format of a run. All other steps are hard links to these
files, so a directory has a total size of 10 GB but occupies only about a tenth of that on disk. By
default, the last of the three measured memory limits (`--memory-gb`) is intentionally too small.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from megatron_rl.io.jsonl import write_lines_atomically
from megatron_rl.observe.metrics import METRICS_FILE
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.observe.rollout_store import step_path, write_step
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.types import TOKEN_COLUMNS, Rollout, TokenSequence, Turn

PER_STEP, TURNS, NUM_METRICS = 256, 3, 80
HEAD = (
    "episodes", "steps", "GB", "--memory-gb", "start, s", "runs, s", "rows, s", "sorted, s", "text, s", "mixed, s", "examples, s",
    "curves, s",
    "episode, s",
    "rollouts, skipped files", "peak, MB",
)  # fmt: skip
WORDS = "go to microwave 1, and heat the apple "


@dataclass(frozen=True, slots=True)
class Size:
    """Length of the episodes in a run directory, and number of steps to write."""

    name: str
    tokens: int
    """Number of tokens in a turn; a fifth of the tokens is sampled."""
    made: int
    """Number of steps to write as files; all further steps are hard links to these files."""


SIZES = (Size("short", 200, 8), Size("long", 2000, 3))


def episode(dice: np.random.Generator, number: int, size: Size) -> Rollout:
    """Return a synthetic rollout with all token columns."""
    context, turns, sampled = TokenSequence(), [], size.tokens // 5
    for _ in range(TURNS):
        context.extend(dice.integers(0, 1400, size.tokens - sampled).tolist())
        first = len(context.token_ids)
        context.extend(dice.integers(0, 1400, sampled).tolist(), logprobs=(-dice.random(sampled)).tolist(), versions=[number] * sampled)
        turns.append(Turn(sequence=0, token_span=(first, first + sampled), text=f"{number}: {WORDS * (sampled // 12)}"))
    for column in TOKEN_COLUMNS:
        context.set_column(column, dice.random(len(context.token_ids)).tolist())
    return Rollout(
        task="made", example_id=str(number // 8), group=number // 8, sample_index=number % 8, sequences=[context], turns=turns,
        reward=number % 2 / 2, reward_terms={"accuracy": float(number % 2), "format": 1.0}, answer="pear",
        question=f"What is in image {number // 8}?",
    )  # fmt: skip


def make(run: Path, size: Size, *, num_bytes: float) -> int:
    """Write a run directory of at least `num_bytes` and return its number of steps."""
    dice, folder, total, step = np.random.default_rng(0), run / ROLLOUTS_FOLDER, 0, 0
    while total < num_bytes:
        path = step_path(folder, step)
        if step < size.made:
            write_step(path, [episode(dice, number, size) for number in range(PER_STEP)], step=step, num_gen_batches=1)
        else:
            os.link(step_path(folder, step % size.made), path)
        total += path.stat().st_size
        step += 1
    names = [f"room/metric_{number}" for number in range(NUM_METRICS)]
    write_lines_atomically(run / METRICS_FILE, ({"step": number, **dict.fromkeys(names, 0.123456789)} for number in range(step)))
    return step


def peak_mb(pid: int) -> float:
    """Return the peak resident memory of the process with this id, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000


def look(run: Path, *, last: int, memory_gb: float) -> str:
    """Start a viewer, measure it, and return a row of the table."""
    command = [sys.executable, "-m", "megatron_rl.observe.viewer", str(run), "--port", str(find_free_port("127.0.0.1"))]
    begin = time.perf_counter()
    with subprocess.Popen([*command, "--memory-gb", str(memory_gb)], stdout=subprocess.PIPE, text=True) as served:
        try:
            url = served.stdout.readline().strip()
            started_s = time.perf_counter() - begin
            with httpx.Client(trust_env=False, timeout=600, base_url=url) as client:
                return f"{memory_gb:g} | {started_s:.1f} | {asked(client, last)} | {peak_mb(served.pid):.0f}"
        finally:
            served.terminate()


def asked(client: httpx.Client, last: int) -> str:
    """Measure the response times of the page's requests and return the table cells."""

    def timed(what: str, **given: object) -> tuple[str, dict | list]:
        begin = time.perf_counter()
        reply = client.get(f"api/{what}", params=given)
        taken = f"{time.perf_counter() - begin:.2f}"
        return (taken, reply.json()) if reply.is_success else (f"{reply.status_code} after {taken}", {})

    runs_s, runs = timed("runs")
    name = runs[0]["name"] if runs else "run"
    rows_s, rows = timed("rollouts", run=name, limit=50)
    again_s, _ = timed("rollouts", run=name, limit=50, sort="reward")
    text_s, _ = timed("rollouts", run=name, text="heat the pear")
    mixed_s, _ = timed("rollouts", run=name, is_mixed=True)
    examples_s, _ = timed("examples", run=name)
    curves_s, _ = timed("curves", run=name)
    episode_s, _ = timed("episode", run=name, step=last, row_index=PER_STEP - 1)
    read = f"{rows.get('total', 0)}, {len(rows.get('skipped', []))}" if rows else "none"
    return " | ".join((runs_s, rows_s, again_s, text_s, mixed_s, examples_s, curves_s, episode_s, read))


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--memory-gb", type=float, nargs="+", default=[8.0, 2.0, 0.6])
    parser.add_argument("--tiny", action="store_true", help="smoke test with small sizes")
    given = parser.parse_args()
    sizes = [Size("short", 20, 1)] if given.tiny else SIZES
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            steps = make(run, size, num_bytes=given.gb * 1e9 if not given.tiny else 2e6)
            gb = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e9
            for memory_gb in given.memory_gb[:1] if given.tiny else given.memory_gb:
                print(f"| {size.name} | {steps} | {gb:.2f} | {look(run, last=steps - 1, memory_gb=memory_gb)} |", flush=True)


if __name__ == "__main__":
    main()
