"""Success rates of random play and of the planner in generated ALFWorld games.

    .venv/bin/python benchmarks/alfworld_random.py --games data/alfworld  # creates missing games
    # Smoke test:
    .venv/bin/python benchmarks/alfworld_random.py --games /tmp/games --num 2 --timed 2 --at-once 2

Prints Markdown tables. Also measures environment steps per second with random play. All games are
from the eval split. Random play draws one admissible command uniformly in each step, for at most 50
steps. Each step runs the task's real environment and renders its images. No engine runs, so the
step rate covers only the work of the environment.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.config.task_options import AlfworldOptions
from megatron_rl.evaluation.intervals import wilson_interval
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND
from megatron_rl.tasks.alfworld.scene_prompts import write_reply
from megatron_rl.tasks.alfworld.task import MAX_STEPS, AlfworldTask
from megatron_rl.types import Example
from megatron_rl_tools.data import make_alfworld


@dataclass(slots=True)
class Tally:
    """Numbers of episodes and wins per kind of game, total number of steps, and total reward."""

    played: Counter[str] = field(default_factory=Counter)
    won: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    earned: float = 0.0

    def add(self, kind: str, *, won: bool, steps: int, earned: float) -> None:
        """Add the result of an episode."""
        self.played[kind] += 1
        self.won[kind] += won
        self.steps += steps
        self.earned += earned

    def row(self, name: str) -> str:
        """Return the table row for this player."""
        cells = [f"{100 * self.won[kind] / self.played[kind]:.0f}" if self.played[kind] else "-" for kind in ALFWORLD_NAME_BY_KIND]
        num = self.played.total()
        low, high = wilson_interval(self.won.total() / num, num)
        share = f"{100 * self.won.total() / num:.1f} ({100 * low:.1f} to {100 * high:.1f})"
        return f"| {name} | {share} | {' | '.join(cells)} | {self.steps / num:.1f} | {self.earned / num:.1f} |"


def task_of(games: Path, *, at_once: int, num: int) -> AlfworldTask:
    """Return an ALFWorld task with the games in the folder `games`."""
    data = DataSettings(train=[str(games / "train")], eval=[str(games / "eval")], max_eval=num)
    return AlfworldTask(
        TaskSettings(name="alfworld", max_turns=MAX_STEPS, data=data, options=AlfworldOptions(processes=at_once, call_s=600))
    )


async def play(task: AlfworldTask, example: Example, tally: Tally, *, replies: list[str] | None, dice: random.Random) -> None:
    """Run one episode with the given replies, or with random commands if `replies` is None."""
    env = task.env(example)
    won, steps, earned = False, 0, 0.0
    try:
        await env.reset(0)
        while not won and steps < (MAX_STEPS if replies is None else len(replies)):
            step = await env.step(write_reply("", dice.choice(env.observation.commands)) if replies is None else replies[steps])
            won, steps, earned = step.done, steps + 1, earned + step.reward
    finally:
        await env.close()
    tally.add(example.payload["kind"], won=won, steps=steps, earned=earned)


async def everyone(games: Path, *, at_once: int, num: int, is_random: bool) -> tuple[Tally, float, float]:
    """Run all games concurrently.

    Returns the tally, the steps per second (including the time to start the games), and the
    unshared memory (USS), in MiB, of the largest TextWorld process.
    """
    task, tally = task_of(games, at_once=at_once, num=num), Tally()
    try:
        examples = task.examples("eval")
        await play(task, examples[0], Tally(), replies=task.gold_replies(examples[0]), dice=random.Random(0))  # loads TextWorld
        started = time.perf_counter()
        await asyncio.gather(*(
            play(task, example, tally, replies=None if is_random else task.gold_replies(example), dice=random.Random(number))
            for number, example in enumerate(examples)
        ))  # fmt: skip
        spent = time.perf_counter() - started
        players = [process for process in psutil.Process().children(recursive=True) if not process.children()]
        memory = max(process.memory_full_info().uss for process in players) / 2**20
        return tally, tally.steps / spent, memory
    finally:
        await task.close()


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=Path, required=True, help="folder of the games; missing games are generated")
    parser.add_argument("--num", type=int, default=200, help="number of eval games")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[1, 2, 8], help="numbers of concurrent games to measure, each in a separate run"
    )
    parser.add_argument("--timed", type=int, default=40, help="number of games in each run of --at-once")
    given = parser.parse_args()
    started = time.perf_counter()
    assert make_alfworld.main(["--out", str(given.games), "--num-train", "6", "--num-eval", str(given.num)]) == 0
    print(f"Games ready after {time.perf_counter() - started:.0f} s; {os.cpu_count()} cores.\n")
    print(f"| games won (%) | all kinds (95% CI) | {' | '.join(ALFWORLD_NAME_BY_KIND)} | steps per game | mean return |")
    print(f"|---|---|{'---|' * len(ALFWORLD_NAME_BY_KIND)}---|---|")
    for name in ("random", "planner"):
        tally, *_ = asyncio.run(everyone(given.games, at_once=max(given.at_once), num=given.num, is_random=name == "random"))
        print(tally.row(name), flush=True)
    print("\n| concurrent games | steps / s | MiB of the largest TextWorld process |\n|---|---|---|")
    for at_once in given.at_once:
        _, rate, memory = asyncio.run(everyone(given.games, at_once=at_once, num=given.timed, is_random=True))
        print(f"| {at_once} | {rate:.0f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
