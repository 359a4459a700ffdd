"""Prints a table that compares one or more evaluations with a baseline (launch/compare.py)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.evaluation.evaluation_report import bootstrap_interval
from megatron_rl.evaluation.paired_comparison import EvaluationResult, compare_evaluations, find_different_conditions, read_evaluation
from megatron_rl.io.bounded_files import to_printable

TABLE_WIDTH = 160
"""Width of the table in columns when the output is not a terminal."""


def comparison_row(baseline: EvaluationResult, evaluation: EvaluationResult) -> list[str]:
    """Return the table cells of one evaluation."""
    low, high = bootstrap_interval(list(evaluation.example_means.values()))
    mean = sum(evaluation.example_means.values()) / len(evaluation.example_means)
    cells = [str(evaluation.folder), str(len(evaluation.example_means)), f"{mean:.1%} ({100 * low:.1f} to {100 * high:.1f})"]
    if evaluation is baseline:
        return [*cells, "", "", ""]
    found = compare_evaluations(baseline, evaluation)
    gap = f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return [*cells, str(found.num_examples), gap, f"{found.p_value:.3g}"]


def print_comparison(evaluations: Sequence[EvaluationResult], console: Console) -> None:
    """Print the table, then the conditions that differ between the baseline and each evaluation."""
    first, *others = evaluations
    table = Table("evaluation", "examples", "success (95%)", "in common", "difference from the first (95%)", "p")
    for each in evaluations:
        table.add_row(*map(to_printable, comparison_row(first, each)))
    console.print(table, markup=False)
    for other in others:
        for name in find_different_conditions(first, other):
            theirs, firsts = (each.conditions.get(name, "not recorded") for each in (other, first))
            line = f"{other.folder}: different {name}: {theirs}; the first evaluation: {firsts}"
            console.print(to_printable(line), markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="compare.py", description="Compare evaluations with the first of them, example by example.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="two or more run directories of launch/evaluate.py")
    options = parser.parse_args(arguments)
    if len(options.folders) < 2:
        parser.error("two or more folders are required")
    try:
        print_comparison(
            [read_evaluation(folder) for folder in options.folders], Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        )
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
