"""Random episodes of gymnasium environments through task=gymnasium, from their ids alone.

    .venv/bin/python benchmarks/gymnasium_environments.py MiniGrid-DoorKey-5x5-v0 ALE/Pong-v5

Prints one JSON object for each id: the actions, the size of the frames, numbers of episodes and
turns, returns, solved episodes, seconds of a reset and milliseconds of a step. Actions are
uniformly random; for the pages of MiniWoB, they are clicks on random points. An id that cannot be
run prints its error.
"""

import argparse
import asyncio
import json
import random
import statistics
import time

from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import GymnasiumOptions
from megatron_rl.rollout.task import Step
from megatron_rl.tasks.gymnasium_envs.action_grammar import Action, ActionGrammar
from megatron_rl.tasks.gymnasium_envs.task import GymnasiumEnv, GymnasiumTask, is_solved
from megatron_rl.types import Rollout, ToolCall, Turn

PAGE = (160, 210)
"""Width and height of a page of MiniWoB."""


def draw_action(grammar: ActionGrammar, rng: random.Random) -> Action:
    """Return a random action; a click on a random point if actions are texts."""
    if grammar.characters:
        return [f"click {rng.randrange(PAGE[0])} {rng.randrange(50, PAGE[1])}"]  # the task's text is above 50
    return grammar.sample(rng)


def write_reply(grammar: ActionGrammar, action: Action) -> str:
    """Return a reply with the action."""
    value = grammar.format_action(action) if grammar.names or grammar.characters else action if grammar.is_list else action[0]
    return json.dumps({"action": value})


async def run_episode(env: GymnasiumEnv, rng: random.Random, *, max_turns: int) -> tuple[Rollout, float, list[float], tuple[int, int]]:
    """Run one episode; return it, the seconds of reset and steps, and the size of its frames."""
    steps: list[Step] = []
    try:
        started = time.monotonic()
        await env.reset(0)
        reset_s, seconds, size = time.monotonic() - started, [], env.frames[-1].size
        while len(steps) < max_turns and not (steps and steps[-1].done):
            reply, started = write_reply(env.grammar, draw_action(env.grammar, rng)), time.monotonic()
            steps.append(await env.step(reply))
            seconds.append(time.monotonic() - started)
    finally:
        await env.close()
    moved = ToolCall(tool="move", source="")
    turns = [Turn(sequence=0, token_span=(0, 0), text="", reward=step.reward, tool_call=moved) for step in steps]
    rollout = Rollout(task="gymnasium", example_id="", group=0, sample_index=0, turns=turns, reason=steps[-1].reason)
    return rollout, reset_s, seconds, size


async def measure(full_id: str, *, num_episodes: int, max_turns: int) -> dict[str, object]:
    """Return what was measured in random episodes, one after the other."""
    options = GymnasiumOptions(id=full_id, image_side=0, train_seeds=num_episodes)
    task, rng = GymnasiumTask(TaskSettings(name="gymnasium", options=options)), random.Random(0)
    try:
        played = [await run_episode(task.env(example), rng, max_turns=max_turns) for example in task.examples("train")]
        describe = task.env(task.examples("train")[0]).grammar.describe()
    finally:
        await task.close()
    rollouts, resets, steps, sizes = zip(*played, strict=True)
    returns = [sum(turn.reward for turn in rollout.turns) for rollout in rollouts]
    return {
        "id": full_id, "actions": describe, "frame": sizes[0], "episodes": len(played), "turns": sum(map(len, steps)),
        "ended": sum("terminated" in rollout.reason or "truncated" in rollout.reason for rollout in rollouts),
        "return": [round(value, 3) for value in (min(returns), statistics.fmean(returns), max(returns))],
        "solved": sum(is_solved(rollout, options) for rollout in rollouts),
        "reset_s": round(statistics.median(resets), 3),
        "step_ms": round(1000 * statistics.median(value for each in steps for value in each), 2),
    }  # fmt: skip


def main() -> None:
    """Measure the ids on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="+")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--max-turns", type=int, default=50)
    given = parser.parse_args()
    for full_id in given.ids:
        try:
            found = asyncio.run(measure(full_id, num_episodes=given.episodes, max_turns=given.max_turns))
        except ValueError as error:
            found = {"id": full_id, "error": str(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
