"""Benchmark metrics computed from the scores of items."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import ACCURACY_TERM, Example, Rollout

NUM_RESAMPLES, SEED = 1000, 0
INTERVAL_PERCENTILES = (2.5, 97.5)
"""Percentiles of a 95% confidence interval."""
MIN_CORRECT_CREDIT = 0.5


@dataclass(slots=True, frozen=True)
class ItemScore:
    """Score of one response to one item."""

    unit_id: str
    labels: Mapping[str, str]
    credit: float
    """Score from 0 to 1."""


HeadlineMetric = Callable[[Sequence[ItemScore]], float]
"""Function that computes a benchmark's headline metric."""


def mean_credit(scores: Sequence[ItemScore]) -> float:
    """Return the mean score of the items."""
    return sum(each.credit for each in scores) / len(scores)


def mean_over_label(label: str, *, merged: Mapping[str, str] | None = None) -> HeadlineMetric:
    """Return a metric that averages the scores for each label value, then averages these means.

    If `merged` maps several label values to the same name, the means of these values are first
    averaged into one mean.
    """

    def headline(scored: Sequence[ItemScore]) -> float:
        parts: dict[str, list[float]] = {}
        for value, each in group_by_label(scored, label).items():
            parts.setdefault((merged or {}).get(value, value), []).append(mean_credit(each))
        return sum(sum(part) / len(part) for part in parts.values()) / len(parts)

    return headline


def group_by_label(scores: Iterable[ItemScore], label: str) -> dict[str, list[ItemScore]]:
    """Group the items by the value of a label; the groups are sorted by this value."""
    found: dict[str, list[ItemScore]] = {}
    for each in scores:
        found.setdefault(each.labels[label], []).append(each)
    return dict(sorted(found.items()))


def group_by_unit(scores: Iterable[ItemScore]) -> dict[str, list[ItemScore]]:
    """Group the items by unit; the units keep the order in which they first appear."""
    found: dict[str, list[ItemScore]] = {}
    for each in scores:
        found.setdefault(each.unit_id, []).append(each)
    return found


def worst_case_accuracy(scores: Sequence[ItemScore]) -> float:
    """Return DynaMath's worst-case accuracy: the fraction of problems solved in all variants."""
    units = group_by_unit(scores).values()
    return sum(all(each.credit >= MIN_CORRECT_CREDIT for each in unit) for unit in units) / len(units)


def we_math_metrics(scores: Sequence[ItemScore], *, strict: bool) -> dict[str, float]:
    """Return the four metrics of We-Math (arXiv 2407.01284, section 3) and its score.

    A problem is skipped if one of its steps or its composite question has no score. Every other
    problem belongs to one class:

    - `mastered`: the composite question is solved, and all steps are solved. In the loose variant,
      one solved step is sufficient.
    - `memorized`: the composite question is solved, but the problem is not mastered.
    - `not_generalized`: the composite question is not solved, but all steps are solved.
    - `lacking`: any other problem.

    The score is mastered + not_generalized / 2. The metric `memorized` is a fraction of the
    problems with a solved composite question. The other metrics are fractions of all problems that
    were not skipped.
    """
    counts = dict.fromkeys(("mastered", "memorized", "not_generalized", "lacking"), 0)
    for unit in group_by_unit(scores).values():
        right = {each.labels["key"].rpartition("_")[2]: each.credit >= MIN_CORRECT_CREDIT for each in unit}
        steps = [value for name, value in right.items() if name != "multi"]
        if "multi" not in right or len(steps) != int(unit[0].labels["key"][0]):
            continue
        if right["multi"]:
            counts["mastered" if (all(steps) if strict else any(steps)) else "memorized"] += 1
        else:
            counts["not_generalized" if all(steps) else "lacking"] += 1
    total = sum(counts.values())
    if not total:
        return {}
    shares = {name: count / total for name, count in counts.items()}
    solved = counts["mastered"] + counts["memorized"]
    memorized = counts["memorized"] / solved if solved else math.nan
    return {"score": shares["mastered"] + shares["not_generalized"] / 2, **shares, "memorized": memorized}


def we_math_score(scores: Sequence[ItemScore]) -> float:
    """Return We-Math's strict score, or NaN if no problem is complete."""
    return we_math_metrics(scores, strict=True).get("score", math.nan)


def collect_item_scores(examples: Sequence[Example], rollouts: Sequence[Rollout]) -> list[list[ItemScore]]:
    """Return the scores of all benchmark items, as one list per sample index.

    Rows that do not belong to a benchmark, such as the rows of task.data.train, are skipped. The
    result is empty if the reward has no term ACCURACY_TERM.
    """
    found: dict[int, list[ItemScore]] = {}
    for rollout in rollouts:
        by = examples[rollout.group].payload.get("official")
        if isinstance(by, Mapping) and ACCURACY_TERM in rollout.reward_terms:
            found.setdefault(rollout.sample_index, []).append(ItemScore(by["unit"], by["labels"], rollout.reward_terms[ACCURACY_TERM]))
    return [found[sample] for sample in sorted(found)]


def bootstrap_headline_interval(samples: Sequence[Sequence[ItemScore]], headline: HeadlineMetric) -> tuple[float, float]:
    """Return a 95% bootstrap confidence interval of the headline metric (Efron 1979).

    Units are resampled with replacement, each with all its items. The random seed is fixed.
    """
    cut = [group_by_unit(scored) for scored in samples]
    names = list(dict.fromkeys(name for units in cut for name in units))
    dice, drawn = np.random.default_rng(SEED), []
    for _ in range(NUM_RESAMPLES):
        chosen = [names[number] for number in dice.integers(len(names), size=len(names))]
        drawn.append(average_over_samples([_resampled_units(units, chosen) for units in cut], headline))
    low, high = np.nanpercentile(drawn, INTERVAL_PERCENTILES)
    return float(low), float(high)


def average_over_samples(samples: Sequence[Sequence[ItemScore]], headline: HeadlineMetric) -> float:
    """Return the mean of a metric over the samples; each sample is a complete evaluation."""
    return sum(headline(scored) for scored in samples) / len(samples)


def _resampled_units(units: Mapping[str, Sequence[ItemScore]], names: Sequence[str]) -> list[ItemScore]:
    """Return the items of the units in a bootstrap sample; a unit drawn twice counts twice."""
    return [ItemScore(f"{number} {name}", each.labels, each.credit) for number, name in enumerate(names) for each in units.get(name, ())]


def to_metric_name(text: str) -> str:
    """Convert a text to a metric name. Example: Vision Only -> vision_only."""
    return re.sub(r"[^a-z0-9]+", "_", text.casefold()).strip("_") or "none"
