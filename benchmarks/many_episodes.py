"""A thousand concurrent rollouts with images on two server engines.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/many_episodes.py
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/many_episodes.py --tiny       # smoke test

Reports failed rollouts and the time for which callbacks block the rollouts' event loop. The run is
like a run of launch/train.py with run.mode=rollout_only, engine.mode=server and
engine.num_local_servers=2. Its task is defined in this script: the policy receives an image, and
after each response a random crop of this image. Callbacks are measured in processor time of their
thread, which excludes the load of other programs.
"""

import argparse
import asyncio
import os
import tempfile
import threading
import time
from asyncio import events
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image as pil
from PIL.Image import Image as Picture

from megatron_rl.entrypoints.train import run
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.observe.rollout_store import list_step_files, read_rollouts
from megatron_rl.registry import Plugins
from megatron_rl.rollout import manager
from megatron_rl.rollout.task import Env, Step, Task
from megatron_rl.types import Example, Message
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

LOOKS = 3
"""Number of images in a rollout: the whole image and then crops."""
SIDE = 280
"""Side of the whole image, in pixels."""


class Looks(Env):
    """Environment that returns a random crop after each response."""

    def __init__(self, whole: Picture, seed: int) -> None:
        self._whole, self._dice, self._num = whole, np.random.default_rng(seed), 0

    async def reset(self, seed: int) -> list[Message]:
        """Return the whole image."""
        return [self._asked(self._whole)]

    async def step(self, text: str) -> Step:
        """Return a random crop, or end the episode."""
        self._num += 1
        if self._num == LOOKS:
            return Step(messages=[], reward=0.0, done=True, reason="looked")
        left, top = self._dice.integers(0, SIDE // 4, 2).tolist()
        part = await asyncio.to_thread(self._whole.crop, (left, top, left + SIDE * 3 // 4, top + SIDE * 3 // 4))
        return Step(messages=[self._asked(part)], reward=0.0, done=False)

    def _asked(self, picture: Picture) -> Message:
        return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]}


class LooksTask(Task):
    """Task with a different noise image per example."""

    num_made = 0

    def examples(self, split: str) -> Sequence[Example]:
        """Return 1024 examples."""
        return [Example(str(number), {}) for number in range(1024)]

    def env(self, example: Example) -> Looks:
        """Return an environment with the example's noise image and its own seed for crops."""
        self.num_made += 1
        pixels = np.random.default_rng(int(example.id)).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        return Looks(pil.fromarray(pixels), self.num_made)


@dataclass
class Seen:
    """Durations of callbacks, and current and maximum number of concurrent rollouts."""

    seconds: list[float] = field(default_factory=list)
    slow: Counter[str] = field(default_factory=Counter)
    """Number of callbacks that took more than 50 ms, keyed by the text of the event-loop handle."""
    most: int = 0
    now: int = 0


@contextmanager
def watched() -> Iterator[Seen]:
    """Time every callback of the rollout thread and count running rollouts in the `with` block."""
    seen, run_handle, play = Seen(), events.Handle._run, manager.run_episode

    def timed(handle: events.Handle) -> None:
        if threading.current_thread().name != "episodes":
            return run_handle(handle)
        begin = time.thread_time()
        run_handle(handle)
        seen.seconds.append(time.thread_time() - begin)
        if seen.seconds[-1] > 0.05:
            seen.slow[repr(handle)[:120]] += 1
        return None

    async def counted(*given: object, **more: object) -> object:
        seen.now += 1
        seen.most = max(seen.most, seen.now)
        try:
            return await play(*given, **more)
        finally:
            seen.now -= 1

    events.Handle._run, manager.run_episode = timed, counted
    try:
        yield seen
    finally:
        events.Handle._run, manager.run_episode = run_handle, play


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=125, help="number of groups of 8 episodes")
    parser.add_argument("--tiny", action="store_true", help="smoke test with two groups")
    given = parser.parse_args()
    groups = 2 if given.tiny else given.groups
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "nano", preset="nano", seed=0)
        words = [f"model.path={folder}/nano", "model.max_pixels=100000"]
        words += ["task=vqa", "task.name=looks", f"task.max_turns={LOOKS}", "task.max_new_tokens=24"]
        words += ["engine.mode=server", "engine.num_local_servers=2", "engine.health_timeout_s=60", f"engine.max_num_seqs={4 * groups}"]
        words += ["engine.kv_cache_mib=512", "engine.max_model_len=2048", "engine.max_images=3"]
        words += [f"batch.prompts_per_step={groups}", "batch.group_size=8", "run.mode=rollout_only"]
        words += ["rollouts.save=all", "run.steps=1", f"run.dir={folder}/run", "run.eval_every=0"]
        begin = time.perf_counter()
        with watched() as seen:
            run(compose_settings(words), Plugins(tasks={"looks": LooksTask}))
        seconds = time.perf_counter() - begin
        (path,) = list_step_files(Path(folder) / "run" / ROLLOUTS_FOLDER)
        rollouts = list(read_rollouts(path, with_images=False))
    failed = [rollout.reason for rollout in rollouts if not rollout.is_scored]
    whole = sum(len(rollout.turns) == LOOKS and len(rollout.images) >= LOOKS for rollout in rollouts)
    p50, p99 = np.percentile(np.array(seen.seconds) * 1000, [50, 99])
    print(
        "| episodes | max concurrent | failed | complete (three images) | run time, s | callbacks | median, ms | p99, ms "
        "| longest, ms | above 50 ms | load average |"
    )
    print("|" + "---|" * 11)
    print(
        f"| {len(rollouts)} | {seen.most} | {len(failed)} | {whole} | {seconds:.0f} | {len(seen.seconds)} | {p50:.3f} | {p99:.2f} "
        f"| {max(seen.seconds) * 1000:.1f} | {seen.slow.total()} | {os.getloadavg()[0]:.1f} |"
    )
    for name, num in seen.slow.most_common(5):
        print(f"{num} callbacks above 50 ms: {name}")
    for reason in sorted({*failed})[:3]:
        print(f"failed: {reason}")


if __name__ == "__main__":
    main()
