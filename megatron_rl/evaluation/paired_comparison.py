"""Two evaluations of the same examples, held against each other example by example: what examples have in common cancels out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from megatron_rl.data.benchmarks.benchmark_scores import SEED
from megatron_rl.evaluation.evaluation_report import NUM_RESAMPLES, bootstrap_interval
from megatron_rl.evaluation.results_directory import EVALUATION_FILE, EXAMPLES_FILE
from megatron_rl.io.jsonl import read_json, read_lines

COMPARED_CONDITIONS = ("model", "weights")
"""What evaluations are compared for: these may differ."""
ROUNDING_TOLERANCE = 1e-12


@dataclass(slots=True, frozen=True)
class EvaluationResult:
    folder: Path
    example_means: Mapping[str, float]
    """By example, the mean credit of its episodes: where that is 1 or 0, the share that solved it."""
    conditions: Mapping[str, str]
    has_fractional_means: bool
    """Means that are not 1 or 0: more than one episode an example, or half a credit."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PairedDifference:
    num_examples: int
    """Examples that both have."""
    mean: float
    low: float
    high: float
    p_value: float
    """Of a difference at least as large if the two did equally well."""


def read_evaluation(folder: Path) -> EvaluationResult:
    """ValueError: there is none, or its files are damaged."""
    try:
        lines, stated = read_lines(folder / EXAMPLES_FILE), read_json(folder / EVALUATION_FILE)["stated"]
        credits = {str(line["id"]): line.get("credit", line["solved"]) for line in lines}
        means = {name: sum(credit) / len(credit) for name, credit in credits.items()}
        many = any(len(credit) > 1 or credit[0] not in (0, 1) for credit in credits.values())
        found = EvaluationResult(folder, means, {str(name): str(text) for name, text in stated.items()}, many)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder}: holds no finished evaluation ({told}); make one with launch/evaluate.py") from error
    if len(means) < len(lines):
        raise ValueError(f"{folder / EXAMPLES_FILE}: an id stands there twice; give the examples ids of their own")
    return found


def find_different_conditions(baseline: EvaluationResult, candidate: EvaluationResult) -> list[str]:
    """Conditions that are not the same: a difference in success may be theirs."""
    names = [name for name in dict.fromkeys([*baseline.conditions, *candidate.conditions]) if name not in COMPARED_CONDITIONS]
    return [name for name in names if baseline.conditions.get(name) != candidate.conditions.get(name)]


def compare_evaluations(baseline: EvaluationResult, candidate: EvaluationResult) -> PairedDifference:
    """Of `candidate` less `baseline`, over the examples that both have: interval by bootstrap over examples; McNemar's exact test where
    each has one episode an example, else a test by random signs. ValueError: they have no example in common."""
    shared = sorted(baseline.example_means.keys() & candidate.example_means.keys())
    if not shared:
        raise ValueError(f"{candidate.folder}: has no example in common with {baseline.folder}; compare evaluations of the same data")
    gaps = [candidate.example_means[name] - baseline.example_means[name] for name in shared]
    low, high = bootstrap_interval(gaps)
    p = sign_flip_p_value(gaps) if baseline.has_fractional_means or candidate.has_fractional_means else mcnemar_p_value(gaps)
    return PairedDifference(num_examples=len(shared), mean=sum(gaps) / len(gaps), low=low, high=high, p_value=p)


def mcnemar_p_value(differences: Sequence[float]) -> float:
    """Exact and two-sided (McNemar 1947): of the examples that one alone has solved, how many are the other's."""
    won, lost = sum(gap > 0 for gap in differences), sum(gap < 0 for gap in differences)
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """The share of random signs of the gaps, the given ones among them, whose mean is at least as far from zero; by a fixed seed."""
    values, dice = np.asarray(differences), np.random.default_rng(SEED)
    means = [(values * dice.choice((-1.0, 1.0), size=len(values))).mean() for _ in range(NUM_RESAMPLES)]
    return (sum(abs(mean) >= abs(values.mean()) - ROUNDING_TOLERANCE for mean in means) + 1) / (NUM_RESAMPLES + 1)
