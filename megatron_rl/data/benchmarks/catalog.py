"""Benchmarks, keyed by name (task.data.benchmark), with their row readers and metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import DataSettings
from megatron_rl.data.benchmarks import puzzle_readers, readers
from megatron_rl.data.benchmarks.benchmark_scores import (
    HeadlineMetric,
    ItemScore,
    average_over_samples,
    bootstrap_headline_interval,
    collect_item_scores,
    group_by_label,
    mean_credit,
    mean_over_label,
    to_metric_name,
    we_math_metrics,
    we_math_score,
    worst_case_accuracy,
)
from megatron_rl.data.benchmarks.items import BenchmarkItem, item_to_record
from megatron_rl.data.questions import QuestionDataset, load_split, open_questions
from megatron_rl.data.records import ConvertRecord, DataRecord
from megatron_rl.types import Example, Rollout

DIRECTIONS = {f"object_rel_direction_{level}": "object_rel_direction" for level in ("easy", "medium", "hard")}


@dataclass(slots=True, frozen=True)
class Benchmark:
    """Row reader and metrics of a benchmark."""

    read_item: Callable[[DataRecord], BenchmarkItem]
    headline: HeadlineMetric = mean_credit
    labels: tuple[str, ...] = ()
    """Labels for which one metric per label value is reported."""
    label_metric: HeadlineMetric = mean_credit
    """Metric to compute for each value of a label."""
    extra_metrics: Callable[[Sequence[ItemScore]], Mapping[str, float]] = lambda _: {}
    """Function that computes further metrics, keyed by name."""


def _we_math_extra_metrics(scored: Sequence[ItemScore]) -> dict[str, float]:
    kinds = {"strict": we_math_metrics(scored, strict=True), "loose": we_math_metrics(scored, strict=False)}
    return {f"{kind}_{name}": value for kind, measures in kinds.items() for name, value in measures.items()}


BENCHMARKS: Mapping[str, Benchmark] = {
    "vstar": Benchmark(readers.read_vstar, labels=("category",)),
    "hrbench": Benchmark(readers.read_hrbench, mean_over_label("cycle"), ("category", "cycle"), mean_over_label("cycle")),
    "mathverse": Benchmark(readers.read_mathverse, labels=("version", "type")),
    "mathvista": Benchmark(readers.read_mathvista, labels=("task", "type")),
    "vsi_bench": Benchmark(readers.read_vsi_bench, mean_over_label("type", merged=DIRECTIONS), ("type",)),
    "tir_bench": Benchmark(readers.read_tir_bench, labels=("task",)),
    "visualprobe": Benchmark(readers.read_visualprobe, labels=("level",)),
    "mathvision": Benchmark(readers.read_mathvision, labels=("subject", "level")),
    "wemath": Benchmark(readers.read_wemath, we_math_score, ("key",), extra_metrics=_we_math_extra_metrics),
    "dynamath": Benchmark(
        readers.read_dynamath, labels=("subject", "level", "type"), extra_metrics=lambda scored: {"worst_case": worst_case_accuracy(scored)}
    ),
    "vlmblind": Benchmark(readers.read_vlmblind, mean_over_label("task"), ("task",)),
    "puzzlevqa": Benchmark(puzzle_readers.read_puzzlevqa, mean_over_label("puzzle"), ("puzzle",)),
    "logicvista": Benchmark(puzzle_readers.read_logicvista, labels=("skill", "capability")),
}


def load_benchmark_questions(data: DataSettings, split: str, *, videos: bool = False) -> QuestionDataset:
    """Return the questions of a split.

    If task.data.benchmark is set, the rows of task.data.eval are read as items of that benchmark.

    Raises:
        ValueError: no files are given, or a row cannot be used (see `load_split`).
    """
    return load_split(data, split, convert_record=make_record_reader(data, split), allow_videos=videos)


def open_benchmark_questions(data: DataSettings, split: str) -> QuestionDataset:
    """Return all questions of a split without checking their rows."""
    paths = {"train": data.train, "eval": data.eval}[split]
    return open_questions(
        paths,
        images_root=data.images,
        image_roots=data.image_roots,
        name=split,
        columns=data.columns,
        convert_record=make_record_reader(data, split),
    )


def make_record_reader(data: DataSettings, split: str) -> ConvertRecord | None:
    """Return the function that converts benchmark rows to questions, or None if none is needed."""
    if split != "eval" or not data.benchmark:
        return None
    read = BENCHMARKS[data.benchmark].read_item

    def record_of(record: DataRecord) -> DataRecord:
        return item_to_record(read(record), record, data=data)

    return record_of


def compute_benchmark_metrics(name: str, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metric `official`, one metric per label value, and any further metrics.

    The result is empty if there is no benchmark or the reward has no term `accuracy`.
    """
    samples = collect_item_scores(examples, rollouts) if name else []
    if not samples:
        return {}
    benchmark = BENCHMARKS[name]
    found = {"official": average_over_samples(samples, benchmark.headline)}
    for label in benchmark.labels:
        for value in dict.fromkeys(value for scored in samples for value in group_by_label(scored, label)):
            parts = [part for scored in samples if (part := group_by_label(scored, label).get(value))]
            found[f"{label}_{to_metric_name(value)}"] = average_over_samples(parts, benchmark.label_metric)
    more = [benchmark.extra_metrics(scored) for scored in samples]
    return found | {each: mean_over_samples(more, each) for each in more[0]}


def mean_over_samples(more: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean of one metric over the samples."""
    return sum(each[name] for each in more) / len(more)


def compute_official_interval(name: str, examples: Sequence[Example], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return `official_low` and `official_high`, a confidence interval of the official metric.

    The result is empty if there is no official metric.
    """
    samples = collect_item_scores(examples, rollouts) if name else []
    if not samples:
        return {}
    low, high = bootstrap_headline_interval(samples, BENCHMARKS[name].headline)
    return {"official_low": low, "official_high": high}
