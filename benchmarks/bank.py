"""Cost of storing and viewing all rollouts (rollouts.save=all), measured with synthetic rollouts.

    .venv/bin/python benchmarks/bank.py             # 100,000 rollouts with an image each
    .venv/bin/python benchmarks/bank.py --tiny      # smoke test

Reports the seconds to store a step, the bytes on disk, and response times of the viewer. A rollout
has 3 turns with 600 tokens in total, 120 of them sampled, and all token columns of training. It has
one noise image of 140 x 140 pixels, the worst case for PNG compression. In a real run, the time to
store a step is the metric `time/record` in RUN/metrics.jsonl.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
from PIL import Image as pil

from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.observe.rollout_store import RolloutStore, step_path
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.types import TOKEN_COLUMNS, Image, Rollout, TokenSequence, Turn

OBSERVED, SAMPLED, TURNS = 160, 40, 3


def picture(dice: np.random.Generator) -> Image:
    """Return a random noise image."""
    pixels = dice.integers(0, 256, (140, 140, 3), dtype=np.uint8)
    return Image(pil=pil.fromarray(pixels), patch_PC=None, grid=(1, 10, 10), key=dice.bytes(16).hex(), merge=2)


def episode(dice: np.random.Generator, number: int) -> Rollout:
    """Return a synthetic rollout with all token columns."""
    context, turns = TokenSequence(), []
    for turn in range(TURNS):
        context.extend(dice.integers(0, 1400, OBSERVED).tolist(), images=(picture(dice),) if turn == 0 else ())
        first = len(context.token_ids)
        context.extend(dice.integers(0, 1400, SAMPLED).tolist(), logprobs=(-dice.random(SAMPLED)).tolist(), versions=[number] * SAMPLED)
        turns.append(Turn(sequence=0, token_span=(first, first + SAMPLED), text="go to microwave 1, and heat the apple " * 3))
    for column in TOKEN_COLUMNS:
        context.set_column(column, dice.random(len(context.token_ids)).tolist())
    return Rollout(
        task="made", example_id=str(number // 8), group=number // 8, sample_index=number % 8, sequences=[context], turns=turns, reward=0.5
    )


def measure(folder: Path, *, episodes: int, per_step: int, limit_gb: float) -> None:
    """Store all steps and print the seconds per step and the sizes on disk."""
    dice, bank, seconds = np.random.default_rng(0), RolloutStore(folder, max_gb=limit_gb), []
    for step in range(episodes // per_step):
        rollouts = [episode(dice, number) for number in range(per_step)]
        begin = time.perf_counter()
        bank.record_step(step, rollouts, num_gen_batches=1)
        seconds.append(time.perf_counter() - begin)
    tenth = max(1, len(seconds) // 10)
    held = bank.metrics()
    kib = step_path(folder / ROLLOUTS_FOLDER, len(seconds) - 1).stat().st_size / 1024 / per_step
    print(
        "| episodes | median s / step | median, first 10% of steps | median, last 10% of steps | GB | evicted episodes "
        "| KiB per episode, without image |"
    )
    print("|---|---|---|---|---|---|---|")
    median, first, last = statistics.median(seconds), statistics.median(seconds[:tenth]), statistics.median(seconds[-tenth:])
    print(
        f"| {episodes} in steps of {per_step} | {median:.3f} | {first:.3f} | {last:.3f} | {held['store/gb']:.2f} "
        f"| {held['store/evicted']:.0f} | {kib:.1f} |"
    )


def shown(folder: Path) -> None:
    """Measure the viewer: start-up, page load, text filter and display of one episode.

    The page load consists of the requests that the page sends when it is opened.
    """
    port = find_free_port("127.0.0.1")
    command = [sys.executable, "-m", "megatron_rl.observe.viewer", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served, httpx.Client(trust_env=False, timeout=600) as client:
        try:
            url = served.stdout.readline().strip()

            def seconds(what: str, **asked: object) -> tuple[float, dict | list]:
                begin = time.perf_counter()
                reply = client.get(f"{url}api/{what}", params=asked).raise_for_status()
                return time.perf_counter() - begin, reply.json()

            runs_s, (run,) = seconds("runs")
            row_s, found = seconds("rollouts", run=run["name"], limit=50)
            text_s, _ = seconds("rollouts", run=run["name"], text="heat the apple")
            first = found["rows"][0]
            episode_s, _ = seconds("episode", run=run["name"], step=first["step"], row_index=first["row_index"])
            mib = psutil.Process(served.pid).memory_info().rss / 2**20
        finally:
            served.terminate()
    print("\n| rollouts | page load, s | text filter, s | one episode, s | viewer memory, MiB |")
    print("|---|---|---|---|---|")
    print(f"| {found['total']} | {runs_s + row_s:.2f} | {text_s:.2f} | {episode_s:.2f} | {mib:.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures the cost of storing all rollouts.")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--per-step", type=int, default=256)
    parser.add_argument("--limit-gb", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true", help="smoke test with small sizes")
    given = parser.parse_args()
    sizes = {"episodes": 64, "per_step": 16, "limit_gb": 0.003} if given.tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "run", **({"episodes": given.episodes, "per_step": given.per_step, "limit_gb": given.limit_gb} | sizes))
        shown(Path(folder) / "run")
