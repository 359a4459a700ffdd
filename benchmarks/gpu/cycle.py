"""Memory and time per phase when policy and engine alternate on one device, as in a training step.

    # Without compilation and CUDA graphs; run this first:
    python benchmarks/gpu/cycle.py --model .gpu/nano --eager
    # A model with 7B shapes, created by make_shapes.py --words:
    python benchmarks/gpu/cycle.py --model .gpu/7B --lora-rank 64 --turns 3
    # Smoke test: two turns on a CPU:
    python benchmarks/gpu/cycle.py --model runs/quickstart/nano --tiny

A turn consists of these phases: weight sync (the engine's weights wake up, are overwritten with the
trainer's weights, and are verified), offload of the policy, wake-up of the KV cache, groups of
requests with images, sleep of the engine, reload of the policy, and an update. Memory columns are
in GB (10^9 bytes). The column "used" is the device memory in use by all processes at the end of the
phase. The column "reserved" is the part of the used memory that torch has reserved. The column
"peak" is the used memory, with torch's peak allocation in the phase in place of torch's
reservation, as in memory_plan/gpu_memory.py. The column "plan" is the memory that
memory_plan/gpu_memory.py plans for the phase (rollout, sync or update), for the GPU model given by
--gpu and the amount of memory that the device reports. The plan should be within 10% of the peak.
On a CPU, the columns of measured memory contain "-".
"""

import argparse
import asyncio
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gauges import machine, print_head, print_row, timed
from PIL import Image as Pillow

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.build import build_colocated_engine, build_policy
from megatron_rl.config import (
    BatchSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    PlanSettings,
    Settings,
    TaskSettings,
)  # fmt: skip
from megatron_rl.distributed.world import connect, expand_segments, read_world, trim_malloc
from megatron_rl.memory_plan.gpu_memory import RankMemoryPlan, plan_gpu_memory
from megatron_rl.memory_plan.gpu_specs import GB, GPU_SPECS
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm import engine_core
from megatron_rl.types import TokenSequence

T = TypeVar("T")
PLANNED = ("rollout", "sync", "update")
"""Phases that memory_plan/gpu_memory.py plans under the same names."""
TINY = {"turns": 2, "prompts": 2, "group": 2, "tokens": 8, "max_model_len": 128, "micro_batch_tokens": 256, "dtype": "float32"}


@dataclass(slots=True)
class Ledger:
    """Runs and measures phases, and prints a table row after each phase."""

    planned: RankMemoryPlan | None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def phase(self, turn: object, name: str, act: Callable[[], T]) -> T:
        """Run one phase, print its row and return its result."""
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, result = timed(act)
        self.seconds.setdefault(name, []).append(seconds)
        planned = getattr(self.planned, f"{name}_bytes") if self.planned and name in PLANNED else None
        print_row(turn, name, f"{seconds:.3f}", *(measured() if has_gpu else ["-"] * 3), in_gb(planned), ratio(planned))
        return result


def measured() -> list[str]:
    """Return the table cells for used, reserved and peak memory."""
    return [in_gb(size) for size in (used(), torch.cuda.memory_reserved(), peak())]


def used() -> int:
    """Return the device memory in use by all processes, in bytes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak() -> int:
    """Return the used bytes, counting torch's peak allocation instead of torch's reservation."""
    return used() - torch.cuda.memory_reserved() + torch.cuda.max_memory_allocated()


def in_gb(size: int | None) -> str:
    """Return a number of bytes as text in GB, or "-" for None."""
    return "-" if size is None else f"{size / GB:.2f}"


def ratio(planned: int | None) -> str:
    """Return peak memory divided by planned memory as text, or "-" without a plan or GPU."""
    return f"{peak() / planned:.3f}" if planned and torch.cuda.is_available() else "-"


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings of the run."""
    pixels = given.image**2
    return Settings(
        model=ModelSettings(path=str(given.model), dtype=given.dtype, min_pixels=pixels, max_pixels=pixels + 400),
        lora=LoraSettings(rank=given.lora_rank),
        parallel=ParallelSettings(recompute=given.recompute, offload_params=True),
        engine=EngineSettings(
            dtype=given.dtype, gpu_memory_utilization=given.utilization, max_model_len=given.max_model_len, max_num_seqs=256, max_images=1
        ),
        optim=OptimSettings(lr=1e-6),
        batch=BatchSettings(prompts_per_step=given.prompts, group_size=given.group, micro_batch_tokens=given.micro_batch_tokens),
        task=TaskSettings(name="number_line"),
        plan=PlanSettings(gpu=given.gpu or "h200"),
    )  # fmt: skip


def gpu_here() -> str:
    """Return the GPU_SPECS key of this GPU, or "" if GPU_SPECS does not contain this GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((gpu for gpu in GPU_SPECS if re.search(rf"\b{gpu}\b", name, re.IGNORECASE)), "")


def prompts(renderer: Renderer, *, num: int, side: int) -> list[TokenSequence]:
    """Return prompts that consist of an image of colored noise and a question."""
    made = []
    for number in range(num):
        noise = np.random.default_rng(number).integers(0, 255, (side, side, 3), dtype=np.uint8)
        parts = [{"type": "image", "image": Pillow.fromarray(noise)}, {"type": "text", "text": f"What is in picture {number}?"}]
        made.append(renderer.prompt([{"role": "user", "content": parts}]))
    return made


async def replies(
    engine: ColocatedEngine, asked: list[TokenSequence], *, group: int, tokens: int, turn: int
) -> list[tuple[TokenSequence, Completion]]:
    """Generate `group` responses to each prompt, all of them concurrently."""
    pairs = [(context, turn << 32 | number) for number, context in enumerate(context for context in asked for _ in range(group))]
    how = [engine.generate(context.token_ids, context.images, SamplingSettings(tokens, 1.0, seed)) for context, seed in pairs]
    return [(context, said) for (context, _), said in zip(pairs, await asyncio.gather(*how), strict=True)]


def credited(said: list[tuple[TokenSequence, Completion]]) -> list[PackItem]:
    """Return training data in which the advantages alternate between 1 and -1."""
    made = []
    for number, (prompt, reply) in enumerate(said):
        context = TokenSequence()
        context.extend(list(prompt.token_ids), images=tuple(prompt.images))
        context.extend(list(reply.token_ids), logprobs=list(reply.logprobs))
        context.set_column("advantages", [(-1.0) ** number * sampled for sampled in context.loss_mask])
        made.append(PackItem(context, denominator=len(reply.token_ids)))
    return made


def build(settings: Settings, ledger: Ledger, *, turns: int) -> tuple[Policy, ColocatedEngine, Renderer]:
    """Build policy, engine and renderer in the same order as entrypoints/train.py.

    The policy is offloaded before the engine is built, so that its device memory is free for the
    engine, as in a run.
    """
    world = read_world()
    trim_malloc()
    if world.device.type == "cuda":
        expand_segments()
    ledger.phase("-", "connect", lambda: connect(world, timeout_s=600))
    renderer = Renderer(settings.model)
    patches = partial(renderer.patches, load_image=lambda image: image.pil)
    layout = build_layout(settings.parallel, seed=0)
    policy = ledger.phase(
        "-", "build policy", lambda: build_policy(settings, layout, renderer, patches=patches, num_steps=turns, is_rl=True)
    )
    ledger.phase("-", "policy offload", policy.sleep)
    return policy, ledger.phase("-", "build engine", lambda: build_colocated_engine(settings, renderer, world)), renderer


def cycle(settings: Settings, given: argparse.Namespace, ledger: Ledger) -> None:
    """Run all turns of the benchmark and print the measurements."""
    policy, engine, renderer = build(settings, ledger, turns=given.turns)
    ledger.phase("-", "engine sleep", engine.sleep)
    ledger.phase("-", "policy reload", policy.wake)
    asked, loss = prompts(renderer, num=given.prompts, side=given.image), make_policy_objective(settings.algo)
    sent = sum(tensor.numel() * tensor.element_size() for _, tensor in policy.hf_weights())
    sampled, seen = [], {}
    for turn in range(given.turns):
        ledger.phase(turn, "sync", lambda turn=turn: engine.load_weights(policy.hf_weights(), version=turn))
        ledger.phase(turn, "policy offload", policy.sleep)
        ledger.phase(turn, "engine wake-up", engine.wake)
        play = partial(replies, engine, asked, group=given.group, tokens=given.tokens, turn=turn)
        said = ledger.phase(turn, "rollout", lambda play=play: engine.run(play()))
        ledger.phase(turn, "engine sleep", engine.sleep)
        ledger.phase(turn, "policy reload", policy.wake)
        work = credited(said)

        def update(work: list[PackItem] = work, turn: int = turn) -> dict[str, float]:
            return policy.update(policy.pack(work, max_tokens=settings.batch.micro_batch_tokens), loss, step=turn)

        seen = ledger.phase(turn, "update", update)
        sampled.append(sum(len(reply.token_ids) for _, reply in said))
    report(ledger, sent=sent, sampled=sampled, seen=seen)
    policy.close()
    engine.close()


def report(ledger: Ledger, *, sent: int, sampled: list[int], seen: dict[str, float]) -> None:
    """Print the median seconds of each phase over the turns.

    The engine pause is the time of the engine's sleep and wake-up; it does not include the weight
    sync.
    """

    def median(name: str) -> float:
        return statistics.median(ledger.seconds[name])

    rates = [tokens / seconds for tokens, seconds in zip(sampled, ledger.seconds["rollout"], strict=True)]
    print_head("median per turn", "")
    print_row("sync s", f"{median('sync'):.3f}")
    print_row("sync GB, GB/s", f"{sent / GB:.3f}, {sent / GB / median('sync'):.2f}")
    print_row("engine pause s", f"{median('engine sleep') + median('engine wake-up'):.3f}")
    print_row("policy offload and reload s", f"{median('policy offload') + median('policy reload'):.3f}")
    print_row("sampled tokens / s", f"{statistics.median(rates):.0f}")
    for name, value in sorted(seen.items()):
        if name.startswith("rollout_mismatch/logprob_abs_diff"):
            print_row(f"{name}, last turn", f"{value:.3g}")


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Qwen2.5-VL folder with a tokenizer")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="dtype of policy and engine")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--recompute", default="full", choices=["none", "selective", "vision", "full"])
    parser.add_argument("--eager", action="store_true", help="run the engine without compilation and CUDA graphs")
    parser.add_argument("--utilization", type=float, default=0.5, help="engine.gpu_memory_utilization")
    parser.add_argument(
        "--gpu", default=gpu_here(), choices=[*GPU_SPECS, ""], help="GPU model for the memory plan; default: the GPU of this machine"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts, each with an image")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens per response")
    parser.add_argument("--image", type=int, default=140, help="side of the images in pixels; a multiple of 28")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--tiny", action="store_true", help=", ".join(f"{name} {value}" for name, value in TINY.items()))
    given = parser.parse_args()
    if given.tiny:
        vars(given).update(TINY)
    if given.eager:
        as_it_is = engine_core.device_arguments
        engine_core.device_arguments = lambda settings, *, cuda: as_it_is(settings, cuda=cuda) | {"enforce_eager": True}
    settings = settings_of(given)
    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    model = read_spec(given.model, key="--model")
    planned = plan_gpu_memory(model, settings, world_size=1, memory=memory).ranks[0] if given.gpu else None
    print(f"{given.model}, {given.dtype}, {machine()}; plan: {given.gpu or 'none'}")
    print_head("turn", "phase", "s", "used", "reserved", "peak", "plan", "peak / plan")
    cycle(settings, given, Ledger(planned))


if __name__ == "__main__":
    main()
