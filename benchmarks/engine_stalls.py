"""Time for which the rendering of large images stalls an engine that has pending requests.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_stalls.py

A simulated engine takes 20 ms per step and uses no processor time during a step, like an engine on
a GPU. The trainer's own rollout manager runs 64 episodes in 8 groups. An episode consists of a
prompt with an image of 2 megapixels, a response, a crop of 1.8 megapixels that differs between
episodes, and a second response. The time between two engine steps counts as stalled if a request is
pending, and as idle otherwise.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.config import EngineSettings, ModelSettings
from megatron_rl.rewards.rubric import Rubric, TurnRewardTerm, environment_rewards
from megatron_rl.rollout import colocated
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.rollout.task import Env, Step
from megatron_rl.types import Example, Message
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint

WORD = 65
"""Id of the only token that the simulated engine samples."""


class FixedCore:
    """Simulated vLLM core whose steps take `step_s` seconds and sample one token per request.

    The seed of a request determines the length of its response.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s, self.sleeping_tags = step_s, []
        self.num_steps, self.stalls_s, self.idle_s = 0, [], 0.0
        """Number of steps, stall durations in seconds, and total idle time in seconds."""
        self._left: dict[str, tuple[int, int]] = {}
        self._ended, self._had_work = time.perf_counter(), False

    def is_busy(self) -> bool:
        """Return True if any request is unfinished."""
        return bool(self._left)

    def add(self, request: Request) -> None:
        """Add a request."""
        length = 1 + request.sampling.seed % request.sampling.max_tokens
        self._left[request.id] = (length, length)

    def abort(self, request_ids: list[str]) -> None:
        """Remove the requests with these ids."""
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def step(self) -> list[tuple[str, Completion]]:
        """Wait for `step_s` and return the completed requests."""
        gap_s = time.perf_counter() - self._ended
        if self._had_work:
            self.stalls_s.append(gap_s)
        else:
            self.idle_s += gap_s
        time.sleep(self.step_s)
        self.num_steps += 1
        self._left = {name: (left - 1, length) for name, (left, length) in self._left.items()}
        done = [
            (name, Completion([WORD] * length, [-1.0] * length, is_stopped=True, weight_versions=[0] * length))
            for name, (left, length) in self._left.items() if left == 0
        ]  # fmt: skip
        self.abort([name for name, *_ in done])
        self._ended, self._had_work = time.perf_counter(), bool(self._left)
        return done

    def trim_images(self) -> None:
        """Do nothing, because there is no image cache."""
        ...

    def close(self) -> None:
        """Do nothing, because there are no resources."""
        ...


def fixed_engine(model: Path, renderer: Renderer, *, step_s: float, max_model_len: int) -> tuple[colocated.ColocatedEngine, FixedCore]:
    """Return a pair: a ColocatedEngine that uses a `FixedCore` instead of vLLM, and the core."""
    core, colocated.VllmCore = FixedCore(step_s), lambda *_, **__: core
    engine = colocated.ColocatedEngine(
        str(model), EngineSettings(max_model_len=max_model_len), special_tokens=renderer.special_tokens, group=None,
    )  # fmt: skip
    return engine, core


@dataclass
class Looks(Env):
    """Environment that returns the whole image first, then a crop specific to the episode."""

    whole: Picture
    part: tuple[int, int, int, int]

    async def reset(self, seed: int) -> list[Message]:
        """Return the whole image."""
        return [self._asked(self.whole)]

    async def step(self, text: str) -> Step:
        """Return this episode's crop of the image."""
        return Step(messages=[self._asked(await asyncio.to_thread(self.whole.crop, self.part))], reward=0.0, done=False)

    def _asked(self, picture: Picture) -> Message:
        return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]}


@dataclass
class LooksTask:
    """Task with a different noise image per example.

    Crops start at a different position in each episode.
    """

    pixels: int
    name: str = "looks"
    stop: tuple[str, ...] = ()
    rubric: Rubric = field(default_factory=lambda: Rubric(turn_terms={"nothing": TurnRewardTerm(environment_rewards)}))
    num_made: int = 0

    def env(self, example: Example) -> Looks:
        """Return an environment; the crop position changes with every call."""
        side, self.num_made = int((self.pixels * 0.9) ** 0.5), self.num_made + 1
        start = self.num_made % int(0.05 * side)
        return Looks(example.payload["picture"], (start, start, start + side, start + side))


class Nobody:
    """Placeholder for a trainer that shares the engine's device."""

    def sleep(self) -> None:
        """Do nothing, because there is no trainer."""
        ...

    def wake(self) -> None:
        """Do nothing, because there is no trainer."""
        ...


def noise(seed: int, pixels: int) -> Picture:
    """Return a square noise image."""
    side = int(pixels**0.5)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def main() -> None:
    """Run the benchmark and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="episodes per group")
    parser.add_argument("--megapixels", type=float, default=2.0, help="size of each image")
    parser.add_argument("--tokens", type=int, default=512, help="maximum response length; all lengths are equally likely")
    parser.add_argument("--step-ms", type=float, default=20.0)
    chosen = parser.parse_args()
    pixels = int(chosen.megapixels * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "nano"
        make_checkpoint(model, preset="nano", seed=0)
        renderer = Renderer(ModelSettings(path=str(model), max_pixels=pixels))
    length = 2 * (pixels // renderer.vision_token_side**2 + chosen.tokens) + 1024
    engine, core = fixed_engine(model, renderer, step_s=chosen.step_ms / 1000, max_model_len=length)
    episode = EpisodeSettings(temperature=1.0, max_turns=2, max_new_tokens=chosen.tokens, max_sequence_tokens=length, max_images=2, seed=0)
    rounds = GenerationSettings(num_prompts=chosen.groups, group_size=chosen.samples, max_num_gen_batches=1)
    fleet = RolloutManager(
        LooksTask(pixels),
        engine=engine,
        renderer=renderer,
        trainer=Nobody(),
        episode_settings=episode,
        generation_settings=rounds,
    )
    examples = [Example(str(number), {"picture": noise(number, pixels)}) for number in range(chosen.groups)]
    started, before = time.perf_counter(), os.times()
    rollouts = fleet.run_examples(examples, num_samples=chosen.samples, settings=episode)
    seconds, after = time.perf_counter() - started, os.times()
    assert all(len(rollout.turns) == 2 and len(rollout.sequences[0].images) == 2 for rollout in rollouts), "an episode ended early"
    stalled = sum(core.stalls_s)
    said = {
        "wall_s": seconds, "steps": core.num_steps,
        "stalled_s": stalled, "stalled_share": stalled / (stalled + core.num_steps * core.step_s),
        "longest_stall_s": max(core.stalls_s), "idle_s": core.idle_s,
        "cpu_s": after.user + after.system - before.user - before.system, "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps({name: round(number, 6) for name, number in said.items()}))


if __name__ == "__main__":
    main()
