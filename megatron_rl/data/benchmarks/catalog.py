"""The benchmarks by name (task.data.benchmark): how their rows are read, and which figures are quoted of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import DataSettings
from megatron_rl.data.benchmarks import readers
from megatron_rl.data.benchmarks.benchmark_scores import (
    Headline,
    Scored,
    by_label,
    interval,
    mastered,
    mastery,
    mean,
    mean_over,
    over,
    scored_of,
    slug,
    worst_case,
)
from megatron_rl.data.benchmarks.items import Item, asked
from megatron_rl.data.questions import Questions, open_questions, split_of
from megatron_rl.data.records import Read, Record
from megatron_rl.types import Example, Rollout

DIRECTIONS = {f"object_rel_direction_{level}": "object_rel_direction" for level in ("easy", "medium", "hard")}


@dataclass(slots=True, frozen=True)
class Benchmark:
    read: Callable[[Record], Item]
    headline: Headline = mean
    labels: tuple[str, ...] = ()
    """Whose values have a figure each."""
    within: Headline = mean
    """The figure of one value of a label."""
    more: Callable[[Sequence[Scored]], Mapping[str, float]] = lambda _: {}
    """Further figures."""


def _we_math(scored: Sequence[Scored]) -> dict[str, float]:
    kinds = {"strict": mastery(scored, strict=True), "loose": mastery(scored, strict=False)}
    return {f"{kind}_{name}": value for kind, measures in kinds.items() for name, value in measures.items()}


BENCHMARKS: Mapping[str, Benchmark] = {
    "vstar": Benchmark(readers.vstar, labels=("category",)),
    "hrbench": Benchmark(readers.hrbench, mean_over("cycle"), ("category", "cycle"), mean_over("cycle")),
    "mathverse": Benchmark(readers.mathverse, labels=("version", "type")),
    "mathvista": Benchmark(readers.mathvista, labels=("task", "type")),
    "vsi_bench": Benchmark(readers.vsi_bench, mean_over("type", merged=DIRECTIONS), ("type",)),
    "tir_bench": Benchmark(readers.tir_bench, labels=("task",)),
    "visualprobe": Benchmark(readers.visualprobe, labels=("level",)),
    "mathvision": Benchmark(readers.mathvision, labels=("subject", "level")),
    "wemath": Benchmark(readers.wemath, mastered, ("key",), more=_we_math),
    "dynamath": Benchmark(readers.dynamath, labels=("subject", "level", "type"), more=lambda scored: {"worst_case": worst_case(scored)}),
    "vlmblind": Benchmark(readers.vlmblind, mean_over("task"), ("task",)),
}


def examples_of(data: DataSettings, split: str, *, videos: bool = False) -> Questions:
    """The questions of a split; those of task.data.eval as the benchmark has them, where one is named. ValueError as split_of."""
    return split_of(data, split, read=reader_of(data, split), videos=videos)


def questions_of(data: DataSettings, split: str) -> Questions:
    """The same, not looked at yet, and all of them."""
    paths = {"train": data.train, "eval": data.eval}[split]
    return open_questions(
        paths, images_root=data.images, image_roots=data.image_roots, name=split, columns=data.columns, read=reader_of(data, split)
    )


def reader_of(data: DataSettings, split: str) -> Read | None:
    """None: rows are read as they are."""
    if split != "eval" or not data.benchmark:
        return None
    read = BENCHMARKS[data.benchmark].read

    def record_of(record: Record) -> Record:
        return asked(read(record), record, data=data)

    return record_of


def figures(name: str, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`official`, and a figure for each value of its labels; nothing of no benchmark, or where the reward has no part `accuracy`."""
    samples = scored_of(examples, rollouts) if name else []
    if not samples:
        return {}
    benchmark = BENCHMARKS[name]
    found = {"official": over(samples, benchmark.headline)}
    for label in benchmark.labels:
        for value in dict.fromkeys(value for scored in samples for value in by_label(scored, label)):
            parts = [part for scored in samples if (part := by_label(scored, label).get(value))]
            found[f"{label}_{slug(value)}"] = over(parts, benchmark.within)
    more = [benchmark.more(scored) for scored in samples]
    return found | {each: over_figures(more, each) for each in more[0]}


def over_figures(more: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(each[name] for each in more) / len(more)


def official_interval(name: str, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`official_low` and `official_high`, where there is an official figure."""
    samples = scored_of(examples, rollouts) if name else []
    if not samples:
        return {}
    low, high = interval(samples, BENCHMARKS[name].headline)
    return {"official_low": low, "official_high": high}
