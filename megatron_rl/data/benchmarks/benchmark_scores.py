"""The numbers that are quoted of a benchmark, from the credit of each of its items."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Example, Rollout

RESAMPLES, SEED = 1000, 0
LEVEL = (2.5, 97.5)
"""Percentiles of a 95% interval."""
RIGHT = 0.5
PART = "accuracy"
"""Of the reward: what an episode's credit is."""


@dataclass(slots=True, frozen=True)
class Scored:
    """One reply to one item."""

    unit: str
    labels: Mapping[str, str]
    credit: float
    """From 0 to 1."""


Headline = Callable[[Sequence[Scored]], float]
"""The number that is quoted."""


def mean(scored: Sequence[Scored]) -> float:
    return sum(each.credit for each in scored) / len(scored)


def mean_over(label: str, *, merged: Mapping[str, str] | None = None) -> Headline:
    """The mean over a label's values of their means. What `merged` maps to one name are means of that name's mean first."""

    def headline(scored: Sequence[Scored]) -> float:
        parts: dict[str, list[float]] = {}
        for value, each in by_label(scored, label).items():
            parts.setdefault((merged or {}).get(value, value), []).append(mean(each))
        return sum(sum(part) / len(part) for part in parts.values()) / len(parts)

    return headline


def by_label(scored: Iterable[Scored], label: str) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for each in scored:
        found.setdefault(each.labels[label], []).append(each)
    return dict(sorted(found.items()))


def by_unit(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for each in scored:
        found.setdefault(each.unit, []).append(each)
    return found


def worst_case(scored: Sequence[Scored]) -> float:
    """DynaMath's: the share of problems of which every variant is right."""
    units = by_unit(scored).values()
    return sum(all(each.credit >= RIGHT for each in unit) for unit in units) / len(units)


def mastery(scored: Sequence[Scored], *, strict: bool) -> dict[str, float]:
    """We-Math's four measures (arXiv 2407.01284, section 3) and its score, over problems of which every part is there.

    The whole problem is right: mastered where all its steps are (loosely: where one is), else memorized. It is wrong: not generalized where
    all steps are right, else knowledge lacks. Score: mastered + half of not generalized. Of memorized: its share of the problems solved.
    """
    counts = dict.fromkeys(("mastered", "memorized", "not_generalized", "lacking"), 0)
    for unit in by_unit(scored).values():
        right = {each.labels["key"].rpartition("_")[2]: each.credit >= RIGHT for each in unit}
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


def mastered(scored: Sequence[Scored]) -> float:
    return mastery(scored, strict=True).get("score", math.nan)


def scored_of(examples: Sequence[Example], rollouts: Sequence[Rollout]) -> list[list[Scored]]:
    """By number of the sample: what each episode of an item came to. Empty where the reward has no part of that name, and of rows that are
    read as they are (task.data.train)."""
    found: dict[int, list[Scored]] = {}
    for rollout in rollouts:
        by = examples[rollout.group].payload.get("official")
        if isinstance(by, Mapping) and PART in rollout.reward_terms:
            found.setdefault(rollout.sample_index, []).append(Scored(by["unit"], by["labels"], rollout.reward_terms[PART]))
    return [found[sample] for sample in sorted(found)]


def interval(samples: Sequence[Sequence[Scored]], headline: Headline) -> tuple[float, float]:
    """95%, by bootstrap over units (Efron 1979) with a fixed seed: which items there are is chance; what belongs together stays so."""
    cut = [by_unit(scored) for scored in samples]
    names = list(dict.fromkeys(name for units in cut for name in units))
    dice, drawn = np.random.default_rng(SEED), []
    for _ in range(RESAMPLES):
        chosen = [names[number] for number in dice.integers(len(names), size=len(names))]
        drawn.append(over([_redrawn(units, chosen) for units in cut], headline))
    low, high = np.nanpercentile(drawn, LEVEL)
    return float(low), float(high)


def over(samples: Sequence[Sequence[Scored]], headline: Headline) -> float:
    """The mean over the samples: each is a whole evaluation."""
    return sum(headline(scored) for scored in samples) / len(samples)


def _redrawn(units: Mapping[str, Sequence[Scored]], names: Sequence[str]) -> list[Scored]:
    """The units that were drawn; one that was drawn twice is two."""
    return [Scored(f"{number} {name}", each.labels, each.credit) for number, name in enumerate(names) for each in units.get(name, ())]


def slug(text: str) -> str:
    """For the name of a figure. Example: Vision Only -> vision_only."""
    return re.sub(r"[^a-z0-9]+", "_", text.casefold()).strip("_") or "none"
