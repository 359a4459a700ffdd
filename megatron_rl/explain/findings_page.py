"""Renders the findings about a step as one page of plain text."""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.explain.findings import CheckResult, FindingsPage, LogprobComparison

MAX_LINES = 4
"""Maximum number of lines per section; further lines are only counted."""


def render_page(page: FindingsPage) -> str:
    """Render the findings as text."""
    return "\n".join(_render_lines(page))


def _render_lines(page: FindingsPage) -> Iterator[str]:
    yield from page.title
    for each in page.checks:
        yield f"  {each.name:<26} {_check_status(each):<9} {each.num_checked} {each.unit}"
        yield from _truncate_lines(each.problems)
    if page.comparisons:
        yield "logprobs of sampled tokens, minus Hugging Face's:     mean      p99      max   tolerance"
    for each in page.comparisons:
        yield _render_comparison(each)
        if each.first_difference:
            yield f"      first: {each.first_difference}"
    for title, lines in (("layers", page.layer_differences), ("likely explanations", page.explanations), ("skipped", page.skipped)):
        if lines:
            yield f"{title}:"
            yield from _truncate_lines(lines)
    yield "differences found" if page.has_differences else "no differences found"


def _check_status(each: CheckResult) -> str:
    if not each.num_checked:
        return "nothing"
    return "DIFFERS" if each.problems else "ok"


def _render_comparison(each: LogprobComparison) -> str:
    gaps = each.abs_diffs or [0.0]
    numbers = f"{np.mean(gaps):>9.1e}{np.quantile(gaps, 0.99):>9.1e}{max(gaps):>9.1e}"
    return f"  {each.name:<30} {'ok' if each.is_within_tolerance else 'DIFFERS':<9} {len(each.abs_diffs):>6} {numbers}   {each.tolerance}"


def _truncate_lines(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"      {line}" for line in lines[:MAX_LINES])
    if len(lines) > MAX_LINES:
        yield f"      and {len(lines) - MAX_LINES} more"
