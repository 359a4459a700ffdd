"""Confidence intervals, pass@k and paired tests against formulas, enumeration and scipy."""

import math
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from megatron_rl.evaluation.evaluation_report import bootstrap_interval, compute_success_statistics, pass_at_k
from megatron_rl.evaluation.paired_comparison import (
    EvaluationResult,
    compare_evaluations,
    find_different_conditions,
    mcnemar_p_value,
    read_evaluation,
    sign_flip_p_value,
)
from megatron_rl.io.jsonl import write_lines_atomically


def test_the_interval_is_the_normal_one_of_many_examples() -> None:
    """The bootstrap interval of 400 examples is 1.96 standard errors to each side within 5%,
    because their mean is nearly normally distributed."""
    values = np.random.default_rng(3).random(400)
    low, high = bootstrap_interval(list(values))
    error = 1.96 * values.std() / math.sqrt(len(values))
    assert (values.mean() - low, high - values.mean()) == pytest.approx((error, error), rel=0.05)


def test_episodes_of_one_example_are_not_independent() -> None:
    """The interval counts examples, not episodes.

    Ten examples, each always or never solved in eight episodes, have the interval of ten samples,
    not of eighty.
    """
    lines = [{"solved": [float(number < 5)] * 8} for number in range(10)]
    found = compute_success_statistics(lines, samples=8)
    assert found["success_high"] - found["success_low"] == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(10), rel=0.15)
    assert [found[f"pass_at_{k}"] for k in (1, 2, 4, 8)] == [0.5] * 4


def test_pass_at_k_is_the_mean_over_all_choices() -> None:
    """pass@k equals the mean over all choices of k episodes, by enumeration."""
    solved = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [1.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0]]
    for k in (1, 2, 3, 5):
        chosen = [[max(each) for each in combinations(of_example, k)] for of_example in solved]
        assert pass_at_k(k, solved) == pytest.approx(np.mean([np.mean(each) for each in chosen]), abs=1e-12)


def test_pass_at_k_leaves_out_who_lacks_an_episode() -> None:
    """pass@2 leaves out an example with one scored episode, whose other episode failed with an
    infrastructure error."""
    found = compute_success_statistics([{"solved": [0.0, 1.0]}, {"solved": [1.0]}], samples=2)
    assert found["pass_at_2"] == 1.0 and found["pass_at_1"] == 0.5


def test_mcnemar_is_the_binomial_sum() -> None:
    """McNemar's p-value is the two-sided binomial sum.

    Nine examples are solved only by the first and two only by the second: at most two of eleven
    fair coins, times two.
    """
    gaps = [1.0] * 9 + [-1.0] * 2 + [0.0] * 30
    assert mcnemar_p_value(gaps) == pytest.approx(2 * binom.cdf(2, 11, 0.5), abs=1e-12)
    assert mcnemar_p_value([0.0] * 4) == 1.0


def test_random_signs_are_all_signs() -> None:
    """The sign-flip p-value from random signs equals that of all signs within 0.01."""
    gaps = [0.5, 0.25, 0.25, -0.125, 1.0, 0.0, 0.75]
    means = [abs(np.mean([sign * gap for sign, gap in zip(signs, gaps, strict=True)])) for signs in product((1, -1), repeat=len(gaps))]
    exact = np.mean([mean >= abs(np.mean(gaps)) - 1e-12 for mean in means])
    assert sign_flip_p_value(gaps) == pytest.approx(exact, abs=0.01)


def evaluation(folder: Path, solved: dict[str, list[float]], **stated: str) -> Path:
    folder.mkdir()
    write_lines_atomically(folder / "examples.jsonl", [{"id": name, "solved": each} for name, each in solved.items()])
    said = ", ".join(f'"{name}": "{text}"' for name, text in stated.items())
    (folder / "evaluation.json").write_text(f'{{"scores": {{}}, "stated": {{{said}}}}}')
    return folder


def test_examples_are_paired_by_id(tmp_path: Path) -> None:
    """Examples are paired by id.

    By hand, the three common examples change from 0 to 1 (a), 1 to 1 (b) and 0 to 0 (c).
    """
    one = read_evaluation(evaluation(tmp_path / "one", {"a": [0.0], "b": [1.0], "c": [0.0], "only": [1.0]}, prompt="x", model="m"))
    two = read_evaluation(evaluation(tmp_path / "two", {"c": [0.0], "b": [1.0], "a": [1.0]}, prompt="y", model="n"))
    found = compare_evaluations(one, two)
    assert (found.num_examples, found.mean, found.p_value) == (3, pytest.approx(1 / 3), 1.0)
    assert found.low == 0.0 and found.high == 1.0
    assert find_different_conditions(one, two) == ["prompt"], "models are what is compared"


def test_nothing_in_common_and_nothing_there(tmp_path: Path) -> None:
    """Evaluations without a common example, without results or with duplicate ids are rejected."""
    one, two = (EvaluationResult(tmp_path / name, {name: 1.0}, {}, has_fractional_means=False) for name in "ab")
    with pytest.raises(ValueError, match="no example in common"):
        compare_evaluations(one, two)
    with pytest.raises(ValueError, match="contains no finished evaluation"):
        read_evaluation(tmp_path)
    with pytest.raises(ValueError, match="contains no finished evaluation"):
        read_evaluation(evaluation(tmp_path / "empty", {"a": []}))
    write_lines_atomically(evaluation(tmp_path / "twice", {"a": [1.0]}) / "examples.jsonl", [{"id": "a", "solved": [1.0]}] * 2)
    with pytest.raises(ValueError, match="contains the same example id twice"):
        read_evaluation(tmp_path / "twice")
