"""Two or more evaluations as a table, the others held against the first (launch/compare.py)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.evaluation.evaluation_report import bootstrap
from megatron_rl.evaluation.paired_comparison import Evaluation, difference, differing, read_evaluation
from megatron_rl.io.bounded_files import printable

WIDTH = 160
"""Columns where nobody looks at a terminal."""


def row(first: Evaluation, each: Evaluation) -> list[str]:
    low, high = bootstrap(list(each.means.values()))
    mean = sum(each.means.values()) / len(each.means)
    cells = [str(each.folder), str(len(each.means)), f"{mean:.1%} ({100 * low:.1f} to {100 * high:.1f})"]
    if each is first:
        return [*cells, "", "", ""]
    found = difference(first, each)
    gap = f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return [*cells, str(found.num), gap, f"{found.p:.3g}"]


def show(evaluations: Sequence[Evaluation], console: Console) -> None:
    first, *others = evaluations
    table = Table("evaluation", "examples", "success (95%)", "in common", "less the first's (95%)", "p")
    for each in evaluations:
        table.add_row(*map(printable, row(first, each)))
    console.print(table, markup=False)
    for other in others:
        for name in differing(first, other):
            line = f"{other.folder}: another {name}: {other.stated.get(name, 'not said')}; the first: {first.stated.get(name, 'not said')}"
            console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="compare.py", description="Hold evaluations against the first of them, example by example.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="run.dir of launch/evaluate.py; two or more")
    options = parser.parse_args(arguments)
    if len(options.folders) < 2:
        parser.error("give two folders or more")
    try:
        show([read_evaluation(folder) for folder in options.folders], Console(width=None if sys.stdout.isatty() else WIDTH))
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
