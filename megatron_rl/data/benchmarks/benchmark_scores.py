"""The numbers that are quoted of a benchmark, from the credit of each of its items."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Example, Rollout

NUM_RESAMPLES, SEED = 1000, 0
INTERVAL_PERCENTILES = (2.5, 97.5)
"""Percentiles of a 95% interval."""
MIN_CORRECT_CREDIT = 0.5
ACCURACY_TERM = "accuracy"
"""Of the reward: what an episode's credit is."""


@dataclass(slots=True, frozen=True)
class ItemScore:
    """One reply to one item."""

    unit_id: str
    labels: Mapping[str, str]
    credit: float
    """From 0 to 1."""


HeadlineMetric = Callable[[Sequence[ItemScore]], float]
"""The number that is quoted."""


def mean_credit(scores: Sequence[ItemScore]) -> float:
    return sum(each.credit for each in scores) / len(scores)


def mean_over_label(label: str, *, merged: Mapping[str, str] | None = None) -> HeadlineMetric:
    """The mean over a label's values of their means. What `merged` maps to one name are means of that name's mean first."""

    def headline(scored: Sequence[ItemScore]) -> float:
        parts: dict[str, list[float]] = {}
        for value, each in group_by_label(scored, label).items():
            parts.setdefault((merged or {}).get(value, value), []).append(mean_credit(each))
        return sum(sum(part) / len(part) for part in parts.values()) / len(parts)

    return headline


def group_by_label(scores: Iterable[ItemScore], label: str) -> dict[str, list[ItemScore]]:
    found: dict[str, list[ItemScore]] = {}
    for each in scores:
        found.setdefault(each.labels[label], []).append(each)
    return dict(sorted(found.items()))


def group_by_unit(scores: Iterable[ItemScore]) -> dict[str, list[ItemScore]]:
    found: dict[str, list[ItemScore]] = {}
    for each in scores:
        found.setdefault(each.unit_id, []).append(each)
    return found


def worst_case_accuracy(scores: Sequence[ItemScore]) -> float:
    """DynaMath's: the share of problems of which every variant is right."""
    units = group_by_unit(scores).values()
    return sum(all(each.credit >= MIN_CORRECT_CREDIT for each in unit) for unit in units) / len(units)


def we_math_metrics(scores: Sequence[ItemScore], *, strict: bool) -> dict[str, float]:
    """We-Math's four measures (arXiv 2407.01284, section 3) and its score, over problems of which every part is there.

    The whole problem is right: mastered where all its steps are (loosely: where one is), else memorized. It is wrong: not generalized where
    all steps are right, else knowledge lacks. Score: mastered + half of not generalized. Of memorized: its share of the problems solved.
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
    return we_math_metrics(scores, strict=True).get("score", math.nan)


def collect_item_scores(examples: Sequence[Example], rollouts: Sequence[Rollout]) -> list[list[ItemScore]]:
    """By number of the sample: what each episode of an item came to. Empty where the reward has no part of that name, and of rows that are
    read as they are (task.data.train)."""
    found: dict[int, list[ItemScore]] = {}
    for rollout in rollouts:
        by = examples[rollout.group].payload.get("official")
        if isinstance(by, Mapping) and ACCURACY_TERM in rollout.reward_terms:
            found.setdefault(rollout.sample_index, []).append(ItemScore(by["unit"], by["labels"], rollout.reward_terms[ACCURACY_TERM]))
    return [found[sample] for sample in sorted(found)]


def bootstrap_headline_interval(samples: Sequence[Sequence[ItemScore]], headline: HeadlineMetric) -> tuple[float, float]:
    """95%, by bootstrap over units (Efron 1979) with a fixed seed: which items there are is chance; what belongs together stays so."""
    cut = [group_by_unit(scored) for scored in samples]
    names = list(dict.fromkeys(name for units in cut for name in units))
    dice, drawn = np.random.default_rng(SEED), []
    for _ in range(NUM_RESAMPLES):
        chosen = [names[number] for number in dice.integers(len(names), size=len(names))]
        drawn.append(average_over_samples([_resampled_units(units, chosen) for units in cut], headline))
    low, high = np.nanpercentile(drawn, INTERVAL_PERCENTILES)
    return float(low), float(high)


def average_over_samples(samples: Sequence[Sequence[ItemScore]], headline: HeadlineMetric) -> float:
    """The mean over the samples: each is a whole evaluation."""
    return sum(headline(scored) for scored in samples) / len(samples)


def _resampled_units(units: Mapping[str, Sequence[ItemScore]], names: Sequence[str]) -> list[ItemScore]:
    """The units that were drawn; one that was drawn twice is two."""
    return [ItemScore(f"{number} {name}", each.labels, each.credit) for number, name in enumerate(names) for each in units.get(name, ())]


def to_metric_name(text: str) -> str:
    """For the name of a figure. Example: Vision Only -> vision_only."""
    return re.sub(r"[^a-z0-9]+", "_", text.casefold()).strip("_") or "none"
