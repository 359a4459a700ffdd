"""Simulated step time on 8 to 1,024 GPUs, and its sensitivity to each constant; uses no GPU.

    .venv/bin/python benchmarks/scale.py               # deepeyes_7b_h200x32; 20 s on one core
    .venv/bin/python benchmarks/scale.py --experiment codev_7b_h200x8 --gpus 8 64

Update and weight-sync times come from megatron_rl/memory_plan/step_time.py with the constants in
memory_plan/step_time_constants.py. The rollout time is simulated: episodes with random log-normal
lengths (constant `spread`) are assigned to the engines in turn. The rollout ends when the last
engine is done. One table uses the recipe's batch size for every number of GPUs; the other table
uses a batch size that grows in proportion to the number of GPUs.
"""

import argparse
import heapq
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.cli.app import resolve_settings
from megatron_rl.config import Settings
from megatron_rl.memory_plan.gpu_memory import plan_gpu_memory
from megatron_rl.memory_plan.step_time import (
    StepTimeInputs,
    decode_step_seconds,
    estimate_step_seconds,
    gradient_bytes,
    make_step_time_inputs,
    num_trained_tokens,
    prefill_seconds,
    rollout_seconds,
    sync_bytes,
    tensor_parallel_bytes,
    update_seconds,
    weight_sync_seconds,
)  # fmt: skip
from megatron_rl.memory_plan.step_time_constants import sensitivity_ranges
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.registry import has_critic

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


COLUMNS = (
    "GPUs", "episodes", "s / step", "rollout", "update", "sync", "tokens / s / GPU", "GB tensors", "GB gradients", "GB weights",
    "engines idle", "slots idle",
)  # fmt: skip
"""Columns of the tables.

The GB columns contain the data that a GPU sends per step: tensors to its tensor-parallel peers,
gradients to data-parallel replicas, and new weights to the engines.
"""


@dataclass(slots=True, frozen=True)
class Played:
    """Simulated rollout of one step."""

    seconds: float
    idle_engines: float
    """Mean fraction of the rollout time in which an engine waits for the last engine."""
    idle_slots: float
    """Mean fraction of the rollout time in which an engine slot samples no token."""


def play_engine(steps: list[float], slots: int, seconds_of: list[float]) -> tuple[float, float]:
    """Simulate one engine.

    `steps` contains the length of each episode in engine steps, in starting order. `seconds_of[n]`
    is the duration of an engine step with n running episodes. Returns the seconds until the last
    episode ends, and the mean number of seconds for which a slot is busy.
    """
    free, changes = [0.0] * min(slots, len(steps)), []
    for length in steps:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length)
        changes += [(start, 1), (start + length, -1)]
    now = elapsed = busy = 0.0
    running = 0
    for at, change in sorted(changes):
        elapsed += (at - now) * seconds_of[running]
        busy += (at - now) * seconds_of[running] * running
        now, running = at, running + change
    return elapsed, busy / slots


def play(case: StepTimeInputs, *, seed: int) -> Played:
    """Draw the episode lengths of a step and simulate all engines.

    While an episode waits for a tool, its sequence keeps its slot, so tool time is added to the
    episode's length as engine steps.
    """
    episode, speeds, settings = case.episode, case.speeds, case.settings
    slots = max(1, int(min(settings.engine.max_num_seqs, case.cache_tokens / episode.total_tokens)))
    normal = np.random.default_rng(seed).standard_normal(case.num_episodes)
    tokens = episode.sampled_tokens * np.exp(speeds.spread * normal - speeds.spread**2 / 2)
    most = settings.task.max_turns * settings.task.max_new_tokens
    mine = -(-case.num_episodes // case.num_engines)
    seconds_of = [0.0, *(decode_step_seconds(case, num_running=count) for count in range(1, min(slots, mine) + 1))]
    steps = np.minimum(tokens, most) + episode.num_turns * speeds.tool_s / seconds_of[-1]
    ended = [play_engine(list(steps[first :: case.num_engines]), slots, seconds_of) for first in range(case.num_engines)]
    last = max(seconds for seconds, _ in ended)
    return Played(
        seconds=last + prefill_seconds(case),
        idle_engines=1 - fmean(seconds for seconds, _ in ended) / last,
        idle_slots=1 - fmean(busy for _, busy in ended) / last,
    )


def case_for(given: argparse.Namespace) -> StepTimeInputs:
    """Return the time model's inputs for the recipe, with the number of GPUs from the recipe."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings: Settings = resolve_settings(compose("train", overrides=[f"experiment={given.experiment}"]))
    model = load_known_spec(settings.model.path)
    return make_step_time_inputs(
        model, settings, plan_gpu_memory(model, settings, world_size=settings.plan.world_size, has_values=has_critic(settings))
    )


def on(case: StepTimeInputs, world_size: int, *, grows: bool) -> StepTimeInputs:
    """Return the inputs for `world_size` GPUs; if `grows`, scale the batch size in proportion."""
    batch = case.settings.batch
    prompts_per_step = max(batch.minibatches, batch.prompts_per_step * world_size // case.world_size) if grows else batch.prompts_per_step
    settings = replace(case.settings, batch=replace(batch, prompts_per_step=prompts_per_step))
    return replace(case, settings=settings, world_size=world_size)


def row(case: StepTimeInputs, *, seeds: int) -> str:
    """Return a row of the table, with averages over the seeds."""
    played = [play(case, seed=seed) for seed in range(seeds)]
    rolled, trained, synced = (
        fmean(each.seconds for each in played),
        sum(update_seconds(case).values()),
        sum(weight_sync_seconds(case).values()),
    )
    step, batch = rolled + trained + synced, case.settings.batch
    sent = tensor_parallel_bytes(case, num_trained_tokens(case)), batch.minibatches * batch.epochs * gradient_bytes(case), sync_bytes(case)
    idle = fmean(each.idle_engines for each in played), fmean(each.idle_slots for each in played)
    tokens = case.num_episodes * case.episode.total_tokens / step / case.world_size
    cells = [
        f"{case.world_size:,}", f"{case.num_episodes:,}", f"{step:.0f}",
        f"{rolled:.0f}", f"{trained:.0f}", f"{synced:.1f}", f"{tokens:.0f}",
        *(f"{size / 1e9:.1f}" for size in sent), *(f"{share:.0%}" for share in idle),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def sensitivities(case: StepTimeInputs) -> list[tuple[str, float, float]]:
    """Return each constant with the relative step times at half and at twice the constant's value.

    The constant with the largest effect comes first.
    """
    now, found = estimate_step_seconds(case).step_total, []
    for name, values in sensitivity_ranges(case.speeds).items():
        changed = [estimate_step_seconds(replace(case, speeds=replace(case.speeds, **{name: value}))).step_total / now for value in values]
        found.append((name, *changed))
    return sorted(found, key=lambda each: -max(abs(math.log(share)) for share in each[1:]))


def main() -> None:
    """Run the simulation and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="deepeyes_7b_h200x32")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 256, 1024])
    parser.add_argument("--seeds", type=int, default=3, help="number of simulated steps; the tables show their mean")
    given = parser.parse_args()
    case = case_for(given)
    episode = case.episode
    print(f"{given.experiment}: {case.settings.plan.gpu}, episodes of {episode.total_tokens:,.0f} tokens, "
          f"{episode.sampled_tokens:,.0f} of them sampled\n")  # fmt: skip
    head = " | ".join(COLUMNS)
    for grows, words in ((False, "The recipe's batch"), (True, "A batch that scales with the number of GPUs")):
        print(f"{words}\n\n| {head} |\n|{'---|' * len(COLUMNS)}")
        for size in given.gpus:
            print(row(on(case, size, grows=grows), seeds=given.seeds))
        print()
    for size in (given.gpus[0], given.gpus[-1]):
        print(f"Change in the step time on {size:,} GPUs\n\n| constant | halved | doubled |\n|---|---|---|")
        for name, half, twice in sensitivities(on(case, size, grows=False)):
            if max(abs(half - 1), abs(twice - 1)) >= 0.005:
                print(f"| {name} | {half - 1:+.0%} | {twice - 1:+.0%} |")
        print()
    shown = rollout_seconds(case)
    print(f"Closed-form estimate: {sum(shown.values()):.0f} s of rollout on {case.world_size} GPUs")


if __name__ == "__main__":
    main()
