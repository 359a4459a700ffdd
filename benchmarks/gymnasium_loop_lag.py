"""Delay of the event loop while many gymnasium environments run at once.

    .venv/bin/python benchmarks/gymnasium_loop_lag.py puzzles/Sokoban-v0 --episodes 200 --turns 20

All episodes run concurrently through task=gymnasium, each in a process of its own. A coroutine
sleeps for 5 ms again and again, and records how much later than that it continues: the time for
which other coroutines, such as requests to the engine, would wait as well. Prints one JSON object
for the idle event loop and one for each number of episodes, with the load average of the machine.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumEnv, GymnasiumTask

TICK_S = 0.005


async def record_lag(lags: list[float]) -> None:
    """Append the delay of each sleep in seconds until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags.append(time.monotonic() - before - TICK_S)


async def run_episode(env: GymnasiumEnv, rng: random.Random, *, turns: int) -> int:
    """Take random actions; return the number of steps."""
    try:
        await env.reset(0)
        for number in range(turns):
            action = env.grammar.sample(rng)
            value = env.grammar.format_action(action) if env.grammar.names else action if env.grammar.is_list else action[0]
            if (await env.step(json.dumps({"action": value}))).done:
                return number + 1
        return turns
    finally:
        await env.close()


async def measure(task: GymnasiumTask, *, num_episodes: int, turns: int, idle_s: float) -> dict[str, object]:
    """Run the episodes at once and return the delays in milliseconds."""
    lags: list[float] = []
    ticking = asyncio.create_task(record_lag(lags))
    started = time.monotonic()
    if num_episodes == 0:
        await asyncio.sleep(idle_s)
        steps = 0
    else:
        examples = task.examples("train")
        await task.env(examples[0]).close()  # checks the environment before the measurement
        episodes = (run_episode(task.env(example), random.Random(number), turns=turns) for number, example in enumerate(examples))
        lags.clear()
        started = time.monotonic()
        steps = sum(await asyncio.gather(*episodes))
    seconds = time.monotonic() - started
    ticking.cancel()
    ordered = [1000 * value for value in sorted(lags)]
    return {
        "episodes": num_episodes, "steps": steps, "seconds": round(seconds, 1), "ticks": len(ordered),
        "lag_median_ms": round(statistics.median(ordered), 2), "lag_p99_ms": round(ordered[int(0.99 * len(ordered))], 2),
        "lag_max_ms": round(ordered[-1], 2), "load_average": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Measure an idle event loop, then the event loop with the episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("id")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=5.0, help="seconds for which the idle event loop is measured")
    given = parser.parse_args()

    async def run(num_episodes: int) -> dict[str, object]:
        options = GymnasiumOptions(id=given.id, train_seeds=max(1, num_episodes), processes=max(1, num_episodes), step_timeout_s=300)
        task = GymnasiumTask(TaskSettings(name="gymnasium", options=options))
        try:
            return await measure(task, num_episodes=num_episodes, turns=given.turns, idle_s=given.idle_s)
        finally:
            await task.close()

    for num_episodes in (0, given.episodes):
        print(json.dumps(asyncio.run(run(num_episodes))), flush=True)


if __name__ == "__main__":
    main()
