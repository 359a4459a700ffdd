"""Paired comparison of two evaluations on the same examples.

Differences are computed per example, which removes the variation between examples.
"""

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
"""Conditions that are allowed to differ between two compared evaluations, because they are the
subject of the comparison.
"""
ROUNDING_TOLERANCE = 1e-12


@dataclass(slots=True, frozen=True)
class EvaluationResult:
    """Results of one evaluation, read from its directory."""

    folder: Path
    example_means: Mapping[str, float]
    """Maps each example ID to the mean score of the example's episodes.

    If all scores are 0 or 1, the mean is the fraction of episodes that solved the example.
    """
    conditions: Mapping[str, str]
    has_fractional_means: bool
    """True if any score is neither 0 nor 1, or any example has more than one episode."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PairedDifference:
    """Mean difference between two evaluations, with its confidence interval and p-value."""

    num_examples: int
    """Number of examples that both evaluations contain."""
    mean: float
    low: float
    high: float
    p_value: float
    """Probability of a difference at least this large if the two models perform equally well."""


def read_evaluation(folder: Path) -> EvaluationResult:
    """Read the results in an evaluation's directory.

    Raises ValueError if the directory contains no finished evaluation or contains damaged files.
    """
    try:
        lines, stated = read_lines(folder / EXAMPLES_FILE), read_json(folder / EVALUATION_FILE)["stated"]
        credits = {str(line["id"]): line.get("credit", line["solved"]) for line in lines}
        means = {name: sum(credit) / len(credit) for name, credit in credits.items()}
        many = any(len(credit) > 1 or credit[0] not in (0, 1) for credit in credits.values())
        found = EvaluationResult(folder, means, {str(name): str(text) for name, text in stated.items()}, many)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder}: contains no finished evaluation ({told}); create it with launch/evaluate.py") from error
    if len(means) < len(lines):
        raise ValueError(f"{folder / EXAMPLES_FILE}: contains the same example id twice; give each example a unique id")
    return found


def find_different_conditions(baseline: EvaluationResult, candidate: EvaluationResult) -> list[str]:
    """Return the names of the conditions that differ and may explain a difference in scores."""
    names = [name for name in dict.fromkeys([*baseline.conditions, *candidate.conditions]) if name not in COMPARED_CONDITIONS]
    return [name for name in names if baseline.conditions.get(name) != candidate.conditions.get(name)]


def compare_evaluations(baseline: EvaluationResult, candidate: EvaluationResult) -> PairedDifference:
    """Return the mean difference, `candidate` minus `baseline`, over the common examples.

    The interval is computed by bootstrapping over examples. If both evaluations have one episode
    per example and all scores are 0 or 1, the p-value is computed by McNemar's exact test.
    Otherwise, the p-value is computed by a sign-flip test.

    Raises:
        ValueError: The evaluations have no common example.
    """
    shared = sorted(baseline.example_means.keys() & candidate.example_means.keys())
    if not shared:
        raise ValueError(f"{candidate.folder}: has no example in common with {baseline.folder}; compare evaluations of the same data")
    gaps = [candidate.example_means[name] - baseline.example_means[name] for name in shared]
    low, high = bootstrap_interval(gaps)
    p = sign_flip_p_value(gaps) if baseline.has_fractional_means or candidate.has_fractional_means else mcnemar_p_value(gaps)
    return PairedDifference(num_examples=len(shared), mean=sum(gaps) / len(gaps), low=low, high=high, p_value=p)


def mcnemar_p_value(differences: Sequence[float]) -> float:
    """Return the p-value of McNemar's exact two-sided test (McNemar 1947).

    This is a binomial test on the examples that exactly one of the two evaluations solved.
    """
    won, lost = sum(gap > 0 for gap in differences), sum(gap < 0 for gap in differences)
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the p-value of a random sign-flip test of the mean, with a fixed seed.

    The p-value is the fraction of sign assignments that yield a mean at least as far from zero as
    the observed mean. The observed signs count as one of the assignments.
    """
    values, dice = np.asarray(differences), np.random.default_rng(SEED)
    means = [(values * dice.choice((-1.0, 1.0), size=len(values))).mean() for _ in range(NUM_RESAMPLES)]
    return (sum(abs(mean) >= abs(values.mean()) - ROUNDING_TOLERANCE for mean in means) + 1) / (NUM_RESAMPLES + 1)
