"""Asynchronous and lock-step scheduling of episodes that wait for tools, on one real engine.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scheduling.py --seeds 0 1 2

Runs 64 episodes of 8 turns. A turn samples a few tokens and then waits for a tool with log-normal
latency (median 0.5 s, sigma 1.0). Both schedules use the trainer's own run_episode. In lock step,
tools start only after all episodes have responded, and episodes continue only after all tools have
finished. The critical path is the time that the episode with the most tool time takes when it runs
alone on the engine. No schedule can be faster.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.conversation import TokenConversation
from megatron_rl.rollout.episode import EpisodeSettings, run_episode
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Env, Step
from megatron_rl.types import Example, Message, Rollout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint


@dataclass
class Waits(Env):
    """Environment with given tool latencies, one per turn.

    The barrier enforces lock step; None means asynchronous scheduling.
    """

    latencies: list[float]
    barrier: asyncio.Barrier | None
    turn: int = 0

    async def reset(self, seed: int) -> list[Message]:
        """Return the first message."""
        return [{"role": "user", "content": "Go."}]

    async def step(self, text: str) -> Step:
        """Wait for the latency of this turn's tool."""
        if self.barrier:
            await self.barrier.wait()
        await asyncio.sleep(self.latencies[self.turn])
        if self.barrier:
            await self.barrier.wait()
        self.turn += 1
        done = self.turn == len(self.latencies)
        return Step(messages=[] if done else [{"role": "user", "content": "Go on."}], reward=0.0, done=done)

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""


@dataclass
class WaitsTask:
    """Task whose episodes use `Waits` environments."""

    barrier: asyncio.Barrier | None = None
    name: str = "waits"
    stop: tuple[str, ...] = ()
    rubric: Rubric = field(default_factory=lambda: Rubric(turn_terms={"nothing": TurnRewardTerm(environment_rewards)}))

    def env(self, example: Example) -> Waits:
        """Return an environment with the example's latencies."""
        return Waits(example.payload["latencies"], self.barrier)


def play(
    engine: ColocatedEngine, renderer: Renderer, latencies_ET: list[list[float]], *, tokens: int, lock_step: bool
) -> tuple[float, list[Rollout]]:
    """Run one episode per list of latencies; return the total seconds and the rollouts."""
    turns = len(latencies_ET[0])
    settings = EpisodeSettings(temperature=1.0, max_turns=turns, max_new_tokens=tokens, max_sequence_tokens=1024, max_images=1, seed=0)

    async def together() -> list[Rollout]:
        task = WaitsTask(asyncio.Barrier(len(latencies_ET)) if lock_step else None)
        examples = [Example(str(number), {"latencies": latencies}) for number, latencies in enumerate(latencies_ET)]
        return await asyncio.gather(
            *(
                run_episode(
                    task,
                    example,
                    conversation=TokenConversation(engine, renderer, settings),
                    settings=settings,
                    group=number,
                    sample_index=0,
                )
                for number, example in enumerate(examples)
            )
        )

    engine.sleep()
    engine.wake()
    started = time.perf_counter()
    rollouts = engine.run(together())
    seconds = time.perf_counter() - started
    assert all(len(rollout.turns) == turns for rollout in rollouts), "an episode ended early"
    return seconds, rollouts


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12, help="maximum number of sampled tokens per turn")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "nano"
        make_checkpoint(model, preset="nano", seed=0)
        renderer = Renderer(ModelSettings(path=str(model)))
        engine = ColocatedEngine(
            str(model), EngineSettings(kv_cache_mib=128, max_num_seqs=chosen.episodes),
            special_tokens=renderer.special_tokens, group=None,
        )  # fmt: skip
        play(engine, renderer, [[0.0]], tokens=chosen.tokens, lock_step=False)
        print("| seed | lock-step s | asynchronous s | critical path s | speedup | asynchronous / critical |\n|---|---|---|---|---|---|")
        for seed in chosen.seeds:
            draws_ET = np.random.default_rng(seed).lognormal(np.log(0.5), 1.0, (chosen.episodes, chosen.turns)).tolist()
            slowest = max(draws_ET, key=sum)
            locked, _ = play(engine, renderer, draws_ET, tokens=chosen.tokens, lock_step=True)
            free, rollouts = play(engine, renderer, draws_ET, tokens=chosen.tokens, lock_step=False)
            alone, _ = play(engine, renderer, [slowest], tokens=chosen.tokens, lock_step=False)
            print(f"| {seed} | {locked:.1f} | {free:.1f} | {alone:.1f} | {locked / free:.2f} | {free / alone:.3f} |", flush=True)
            assert sum(rollout.num_sampled for rollout in rollouts) > chosen.episodes * chosen.turns
        engine.close()


if __name__ == "__main__":
    main()
