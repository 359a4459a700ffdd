"""Two evaluations of the same examples, held against each other example by example: what examples have in common cancels out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from megatron_rl.data.benchmarks.benchmark_scores import SEED
from megatron_rl.evaluation.evaluation_report import RESAMPLES, bootstrap
from megatron_rl.evaluation.results_directory import EVALUATION, EXAMPLES
from megatron_rl.io.jsonl import read_json, read_lines

OWN = ("model", "weights")
"""What evaluations are compared for: these may differ."""
ROUNDING = 1e-12


@dataclass(slots=True, frozen=True)
class Evaluation:
    folder: Path
    means: Mapping[str, float]
    """By example, the mean credit of its episodes: where that is 1 or 0, the share that solved it."""
    stated: Mapping[str, str]
    has_many: bool
    """Means that are not 1 or 0: more than one episode an example, or half a credit."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Difference:
    num: int
    """Examples that both have."""
    mean: float
    low: float
    high: float
    p: float
    """Of a difference at least as large if the two did equally well."""


def read_evaluation(folder: Path) -> Evaluation:
    """ValueError: there is none, or its files are damaged."""
    try:
        lines, stated = read_lines(folder / EXAMPLES), read_json(folder / EVALUATION)["stated"]
        credits = {str(line["id"]): line.get("credit", line["solved"]) for line in lines}
        means = {name: sum(credit) / len(credit) for name, credit in credits.items()}
        many = any(len(credit) > 1 or credit[0] not in (0, 1) for credit in credits.values())
        found = Evaluation(folder, means, {str(name): str(text) for name, text in stated.items()}, many)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder}: holds no finished evaluation ({told}); make one with launch/evaluate.py") from error
    if len(means) < len(lines):
        raise ValueError(f"{folder / EXAMPLES}: an id stands there twice; give the examples ids of their own")
    return found


def differing(one: Evaluation, other: Evaluation) -> list[str]:
    """Conditions that are not the same: a difference in success may be theirs."""
    names = [name for name in dict.fromkeys([*one.stated, *other.stated]) if name not in OWN]
    return [name for name in names if one.stated.get(name) != other.stated.get(name)]


def difference(one: Evaluation, other: Evaluation) -> Difference:
    """Of `other` less `one`, over the examples that both have: interval by bootstrap over examples; McNemar's exact test where each has one
    episode an example, else a test by random signs. ValueError: they have no example in common."""
    shared = sorted(one.means.keys() & other.means.keys())
    if not shared:
        raise ValueError(f"{other.folder}: has no example in common with {one.folder}; compare evaluations of the same data")
    gaps = [other.means[name] - one.means[name] for name in shared]
    low, high = bootstrap(gaps)
    p = by_signs(gaps) if one.has_many or other.has_many else mcnemar(gaps)
    return Difference(num=len(shared), mean=sum(gaps) / len(gaps), low=low, high=high, p=p)


def mcnemar(gaps: Sequence[float]) -> float:
    """Exact and two-sided (McNemar 1947): of the examples that one alone has solved, how many are the other's."""
    won, lost = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def by_signs(gaps: Sequence[float]) -> float:
    """The share of random signs of the gaps, the given ones among them, whose mean is at least as far from zero; by a fixed seed."""
    values, dice = np.asarray(gaps), np.random.default_rng(SEED)
    means = [(values * dice.choice((-1.0, 1.0), size=len(values))).mean() for _ in range(RESAMPLES)]
    return (sum(abs(mean) >= abs(values.mean()) - ROUNDING for mean in means) + 1) / (RESAMPLES + 1)
