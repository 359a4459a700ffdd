r"""Environment steps per second during rollouts, compared with RL4VLM's scheme.

    .venv/bin/python benchmarks/env_steps.py --model runs/quickstart/sft/final --seconds 60
    .venv/bin/python benchmarks/env_steps.py --model runs/quickstart/sft/final --seconds 60 \
        --cores 2 --games 384

Both sides use the same cores, model, game and rules.

This project runs launch/train.py with PPO, with one process per core and one engine per process.
The episodes of a step run concurrently, and the engine returns logprobs with the tokens. The rate
of a training step is its number of turns divided by its rollout time in seconds (time/engine plus
time/environment). The first step is excluded. RL4VLM's scheme (arXiv 2405.10292, --num-processes 1)
runs one environment at a time. In each environment step, Hugging Face's generate() samples a
response to a single prompt, and a second forward pass over prompt and response computes the
logprobs. This scheme uses Hugging Face's model without an engine, with one thread per core. Both
sides use the same code to draw and process images, and process each image once.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings, TaskSettings
from megatron_rl.registry import build_task
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.task import Task

ROOT = Path(__file__).resolve().parents[1]
PIXELS = {"min_pixels": 19600, "max_pixels": 20000}
MAX_TOKENS = 48


def ours(model: str, *, steps: int, max_tokens: int, games: int, cores: int) -> list[float]:
    """Return the turns per second of each step except the first."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"model.path={model}", f"run.dir={folder}/run", f"run.steps={steps}", f"batch.prompts_per_step={games}"]
        task = ["task.eval_samples=1", f"task.max_new_tokens={max_tokens}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cores}"]
        command = [*torchrun, "launch/train.py", "experiment=numberline_ppo_cpu", *run, *task]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(folder, "run/metrics.jsonl").read_text().splitlines())
        found = [line for line in lines if "rollout/turns" in line]
    return [
        line["rollout/turns"] * line["rollout/num_groups_used"] / (line["time/engine"] + line["time/environment"]) for line in found[1:]
    ]


class OneByOne:
    """RL4VLM's rollout scheme: a single environment and no inference engine."""

    def __init__(self, model: str, task: Task, *, max_tokens: int) -> None:
        self.renderer = Renderer(ModelSettings(path=model, **PIXELS))
        self.network = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
        self.task, self.max_tokens = task, max_tokens

    async def play(self, *, seconds: float) -> float:
        """Return the environment steps per second, excluding the first step."""
        examples, taken, began = self.task.examples("train"), 0, 0.0
        while not began or time.perf_counter() - began < seconds:
            env, number = self.task.env(examples[taken % len(examples)]), 0
            messages, is_over = await env.reset(taken), False
            while not is_over and number < self.task.settings.max_turns:
                step = await env.step(self._reply(messages))
                messages, is_over, number = step.messages, step.done, number + 1
                taken, began = (taken + 1, began) if began else (0, time.perf_counter())
        return taken / (time.perf_counter() - began)

    @torch.no_grad()
    def _reply(self, messages: list) -> str:
        context = self.renderer.prompt(messages)
        patches = torch.cat([image.patch_PC for image in context.images])
        seen = {"pixel_values": patches, "image_grid_thw": torch.tensor([image.grid for image in context.images])}
        ids = torch.tensor([context.token_ids])
        written = self.network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **seen, max_new_tokens=self.max_tokens, do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, eos_token_id=self.renderer.end_id, pad_token_id=self.renderer.end_id,
            suppress_tokens=self.renderer.banned_ids,
        )  # fmt: skip
        reply = written[:, ids.shape[1] :]
        logits = self.network(input_ids=written, attention_mask=torch.ones_like(written), **seen).logits[:, ids.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, reply.unsqueeze(-1))
        assert torch.isfinite(logprobs).all()
        return self.renderer.decode_response(reply[0].tolist())


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="nano model after the SFT warm start")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the RL4VLM-style loop")
    parser.add_argument("--steps", type=int, default=6, help="number of our rollout steps")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--games", type=int, default=96, help="concurrent games in each of our steps")
    parser.add_argument("--cores", type=int, default=1, help="cores for each side")
    given = parser.parse_args()
    torch.set_num_threads(given.cores)
    task = build_task(TaskSettings(name="number_line", max_turns=10, max_new_tokens=given.max_tokens))
    theirs = asyncio.run(OneByOne(given.model, task, max_tokens=given.max_tokens).play(seconds=given.seconds))
    rates = ours(str(Path(given.model).resolve()), steps=given.steps, max_tokens=given.max_tokens, games=given.games, cores=given.cores)
    print("| environment steps / s | mean | lowest | highest |\n|---|---|---|---|")
    print(f"| RL4VLM-style loop | {theirs:.2f} | | |")
    print(f"| ours | {sum(rates) / len(rates):.1f} | {min(rates):.1f} | {max(rates):.1f} |")
    print(f"| ratio | {sum(rates) / len(rates) / theirs:.1f} | {min(rates) / theirs:.1f} | {max(rates) / theirs:.1f} |")


if __name__ == "__main__":
    main()
