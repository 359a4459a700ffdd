"""Simulated GPU idle time due to the slowest episodes, for run.max_staleness=0, 1 and 2.

    .venv/bin/python benchmarks/waiting.py       # deepeyes_7b_h200x32; takes minutes
    .venv/bin/python benchmarks/waiting.py --gpus 8 --steps 4 --spread 0.3
    .venv/bin/python benchmarks/waiting.py --measure RUN/rollouts   # prints episode lengths
    .venv/bin/python benchmarks/waiting.py --measured lengths.json

Compares colocated and separate engines; uses no GPU. The script is an event simulation: episodes
with log-normal or measured lengths wait for a slot of their engine. An engine step takes the time
that memory_plan/step_time.py estimates for the number of running episodes. A group is complete when
all its episodes are complete. As in rollout/scheduler.py, a step waits for all groups that would
exceed the staleness limit in the next step. The rest of the step's batch consists of the groups
that complete first.

Colocated engines are stopped during updates and weight syncs. Separate engines are stopped only
during weight syncs; the GPUs without an engine only train. If an episode continues after an update,
its tokens are prefilled again. The batch grows in proportion to the number of GPUs. The simulation
makes the same simplifications as the time model in scale.py. The option --measure requires a run
with rollouts.save=all.
"""

import argparse
import heapq
import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas
from scale import case_for, on

from megatron_rl.memory_plan.step_time import StepTimeInputs, decode_step_seconds, prefill_seconds, update_seconds, weight_sync_seconds
from megatron_rl.observe.rollout_store import list_step_files as steps_of

TRAINERS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Fractions of training-only GPUs to try for separate engines."""


@dataclass(slots=True)
class Engine:
    """Simulated engine with its slots and episodes.

    Episode lengths are measured in engine steps; `made` is the number of steps that the engine has
    run.
    """

    slots: int
    seconds_of: list[float]
    """Duration of an engine step in seconds, indexed by the number of running episodes."""
    line: list[tuple[float, int]] = field(default_factory=list)
    """(length in steps, group) of each episode that waits for a slot; the last item starts next."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Heap with (value of `made` at which the episode ends, group) for each running episode."""
    now: float = 0.0
    made: float = 0.0
    idle: float = 0.0
    """Total seconds in which no episode was running."""

    def until(self, now: float) -> None:
        """Advance the engine to the time `now`."""
        if self.running:
            self.made += (now - self.now) / self.seconds_of[len(self.running)]
        else:
            self.idle += now - self.now
        self.now = now

    def fill(self) -> None:
        """Start waiting episodes in free slots."""
        while self.line and len(self.running) < self.slots:
            steps, group = self.line.pop()
            heapq.heappush(self.running, (self.made + steps, group))

    def next_end(self) -> float:
        """Return the time at which the next episode ends."""
        if not self.running:
            return float("inf")
        return self.now + max(0.0, self.running[0][0] - self.made) * self.seconds_of[len(self.running)]


@dataclass(slots=True)
class Engines:
    """All simulated engines, with their unfinished and complete groups."""

    each: list[Engine]
    left: Counter[int] = field(default_factory=Counter)
    """Number of unfinished episodes, keyed by group."""
    played: list[int] = field(default_factory=list)
    """Complete groups that have not been trained on, in order of completion."""

    def deal(self, group: int, episodes: list[float]) -> None:
        """Assign the episodes of a group to the engines in turn."""
        self.left[group] = len(episodes)
        for place, steps in enumerate(episodes):
            engine = self.each[(group * len(episodes) + place) % len(self.each)]
            engine.line.insert(0, (steps, group))
            engine.fill()

    def play(self, start: float, *, until: float, num_groups: float, due: Set[int] = frozenset()) -> float:
        """Simulate the engines from time `start` and return the time at which the simulation ends.

        The simulation ends when `num_groups` groups are complete, including all groups in `due`,
        but no later than at time `until`.
        """
        for engine in self.each:
            engine.now = start
        ends = [(engine.next_end(), number) for number, engine in enumerate(self.each)]
        heapq.heapify(ends)
        now, lacking = start, set(due).difference(self.played)
        while (len(self.played) < num_groups or lacking) and ends[0][0] <= until:
            now, number = heapq.heappop(ends)
            engine = self.each[number]
            engine.until(now)
            _, group = heapq.heappop(engine.running)
            engine.fill()
            heapq.heappush(ends, (engine.next_end(), number))
            self.left[group] -= 1
            if not self.left[group]:
                self.played.append(group)
                lacking.discard(group)
        now = now if len(self.played) >= num_groups and not lacking else until
        for engine in self.each:
            engine.until(now)
        return now

    def take(self, num: int, due: Set[int]) -> list[int]:
        """Remove and return `num` groups: due groups first, then others by time of completion."""
        taken = sorted(self.played, key=lambda group: group not in due)[:num]
        self.played = [group for group in self.played if group not in taken]
        return taken

    def prefill_again(self, steps: float) -> None:
        """Lengthen all running episodes by `steps`, the time to prefill their tokens again."""
        for engine in self.each:
            engine.running = [(end + steps, group) for end, group in engine.running]


@dataclass(slots=True, frozen=True)
class Told:
    """Mean results of a step."""

    seconds: float
    idle: float
    """Fraction of the total GPU time in which a GPU does not generate, train or sync weights."""
    staleness: float
    """Mean number of weight updates between scheduling a group and training on that group."""


@dataclass(slots=True, frozen=True)
class Shape:
    """Measured token counts and tool times of episodes, by group.

    `tokens` (sampled tokens) and `tools` (seconds in the environment) are relative to the mean over
    all episodes.
    """

    tokens: np.ndarray
    tools: np.ndarray

    def drawn(self, num_groups: int, *, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw groups with replacement, and then draw each group's episodes with replacement.

        The episodes of a drawn group thereby stay similar to each other.
        """
        dice = np.random.default_rng(seed)
        groups, members = dice.integers(0, len(self.tokens), (num_groups, 1)), dice.integers(0, self.tokens.shape[1], (num_groups, size))
        return self.tokens[groups, members], self.tools[groups, members]


def shape_of(path: Path) -> Shape:
    """Read a file with the output of --measure."""
    told = json.loads(path.read_text())
    tokens, tools = np.array(told["tokens"], dtype=float), np.array(told["tools"], dtype=float)
    return Shape(tokens / tokens.mean(), tools / max(tools.mean(), 1e-9))


def measure(bank: Path) -> dict[str, list[list[float]]]:
    """Return the tokens and the tool seconds of each complete group in a rollout store.

    Tool seconds include the time that an episode spends waiting for a tool.
    """
    told: dict[str, list[list[float]]] = {"tokens": [], "tools": []}
    for path in steps_of(bank):
        frame = pandas.read_parquet(path, columns=["group", "num_sampled", "env_s"])
        for _, group in frame.groupby("group"):
            told["tokens"].append(group.num_sampled.tolist())
            told["tools"].append(group.env_s.round(2).tolist())
    size = max(map(len, told["tokens"]))
    return {name: [group for group in groups if len(group) == size] for name, groups in told.items()}


def lengths(case: StepTimeInputs, *, num_groups: int, seed: int, full: float, shape: Shape | None = None) -> list[list[float]]:
    """Return the length of every episode, by group, in steps of a fully loaded engine.

    The length includes the episode's sampled tokens and the time for its tools and prompts. Without
    a measured shape, token counts are log-normal and tool times are constant.
    """
    episode, speeds, size = case.episode, case.speeds, case.settings.batch.group_size
    if shape is None:
        normal = np.random.default_rng(seed).standard_normal((num_groups, size))
        tokens, tools = np.exp(speeds.spread * normal - speeds.spread**2 / 2), np.ones((num_groups, size))
    else:
        tokens, tools = shape.drawn(num_groups, size=size, seed=seed)
    sampled = np.minimum(episode.sampled_tokens * tokens, case.settings.task.max_turns * case.settings.task.max_new_tokens)
    waits = episode.num_turns * speeds.tool_s * tools + prefill_seconds(case) * case.num_engines / case.num_episodes
    return (sampled + waits / full).tolist()


def simulate(case: StepTimeInputs, *, staleness: int, trainers: int = 0, steps: int, seed: int = 0, shape: Shape | None = None) -> Told:
    """Simulate a run and return the means over its steps.

    `trainers` is the number of GPUs that only train; with 0, every GPU generates and trains. The
    first two steps are excluded, because the queues are still empty.
    """
    batch = case.settings.batch
    players = case.world_size - trainers
    engines_of = max(1, players // case.settings.engine.tp)
    slots = max(1, int(min(case.settings.engine.max_num_seqs, case.cache_tokens / case.episode.total_tokens)))
    seconds_of = [0.0, *(decode_step_seconds(case, num_running=count) for count in range(1, slots + 1))]
    per_engine = min(slots, -(-case.num_episodes // engines_of))
    given = lengths(case, num_groups=(steps + staleness + 1) * batch.prompts_per_step, seed=seed, full=seconds_of[per_engine], shape=shape)
    engines = Engines([Engine(slots, seconds_of) for _ in range(engines_of)])
    training = sum(update_seconds(replace(case, world_size=trainers or case.world_size)).values())
    syncing = sum(weight_sync_seconds(case).values())
    again = (
        2
        * case.param_counts.language
        * case.episode.total_tokens
        / 2
        / (case.settings.engine.tp * case.gpu.flops_per_s * case.speeds.prefill_share)
    )
    now, warm, waited, ages = 0.0, (0.0, 0.0), 0.0, []
    dealt_at: dict[int, int] = {}
    waiting: set[int] = set()
    for step in range(steps):
        if step == 2:
            warm = now, sum(engine.idle for engine in engines.each) * players / engines_of + waited * trainers
        while len(waiting) < (staleness + 1) * batch.prompts_per_step:
            group = len(dealt_at)
            engines.deal(group, given[group % len(given)])
            dealt_at[group] = step
            waiting.add(group)
        due = {group for group in waiting if dealt_at[group] <= step - staleness}
        began, now = now, engines.play(now, until=float("inf"), num_groups=batch.prompts_per_step, due=due)
        waited += now - began
        taken = engines.take(batch.prompts_per_step, due)
        ages += [step - dealt_at[group] for group in taken]
        waiting.difference_update(taken)
        if trainers:
            engines.play(now, until=now + training, num_groups=float("inf"))
        engines.prefill_again(again * fmean(len(engine.running) for engine in engines.each) / seconds_of[per_engine])
        waited += syncing * bool(trainers)
        now += training + syncing
    lost = sum(engine.idle for engine in engines.each) * players / engines_of + waited * trainers - warm[1]
    return Told(seconds=(now - warm[0]) / (steps - 2), idle=lost / case.world_size / (now - warm[0]), staleness=fmean(ages))


def rows(case: StepTimeInputs, size: int, *, steps: int, shape: Shape | None = None) -> list[str]:
    """Return one table row for each value of run.max_staleness.

    A row compares colocated engines with the fastest split into engine GPUs and training GPUs.
    """
    here, lines, first = on(case, size, grows=True), [], None
    for staleness in (0, 1, 2):
        together = simulate(here, staleness=staleness, steps=steps, shape=shape)
        first = first or together.seconds
        unit = here.settings.parallel.tp * here.settings.parallel.pp
        numbers = {share: max(1, int(share * size) // unit) * unit for share in TRAINERS}
        given = {"staleness": staleness, "steps": steps, "shape": shape}
        apart = {share: simulate(here, trainers=number, **given) for share, number in numbers.items()}
        best = min(apart, key=lambda share: apart[share].seconds)
        cells = [f"{size:,}", f"{here.num_episodes:,}", str(staleness), *told(together, first), f"{best:.0%}", *told(apart[best], first)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def told(step: Told, first: float) -> list[str]:
    """Return the table cells for one simulation result."""
    return [f"{step.seconds:.0f}", f"{first / step.seconds:.2f}", f"{step.idle:.0%}", f"{step.staleness:.2f}"]


def main() -> None:
    """Run the simulation and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="deepeyes_7b_h200x32")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--steps", type=int, default=6, help="steps per run; the first two are not counted")
    parser.add_argument(
        "--spread",
        type=float,
        help="standard deviation of the logarithm of an episode's tokens; default: memory_plan/step_time_constants.py",
    )
    parser.add_argument("--measured", type=Path, help="file with the output of --measure; default: log-normal lengths")
    parser.add_argument("--measure", type=Path, metavar="RUN/rollouts", help="print the episode lengths of a run's rollout store, and exit")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    shape = shape_of(given.measured) if given.measured else None
    case = case_for(given)
    if given.spread is not None:
        case = replace(case, speeds=replace(case.speeds, spread=given.spread))
    kinds = (f"{kind}, s / step | speedup | GPU idle | mean staleness" for kind in ("colocated", "apart"))
    print(f"| GPUs | episodes | max staleness | {' | training GPUs | '.join(kinds)} |\n|{'---|' * 12}", flush=True)
    for size in given.gpus:
        print("\n".join(rows(case, size, steps=given.steps, shape=shape)), flush=True)


if __name__ == "__main__":
    main()
