"""What is said of a step, as one page of plain text."""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.explain.findings import Checked, Compared, Page

SHOWN = 4
"""Lines of one kind; the rest is counted."""


def text_of(page: Page) -> str:
    return "\n".join(_lines(page))


def _lines(page: Page) -> Iterator[str]:
    yield from page.title
    for each in page.checks:
        yield f"  {each.name:<26} {_state(each):<9} {each.num} {each.unit}"
        yield from _some(each.found)
    if page.compared:
        yield "logprobs of sampled tokens, less Hugging Face's:      mean      p99      max   normal"
    for each in page.compared:
        yield _compared(each)
        if each.first:
            yield f"      first: {each.first}"
    for title, lines in (("layers", page.layers), ("what explains it", page.explained), ("skipped", page.skipped)):
        if lines:
            yield f"{title}:"
            yield from _some(lines)
    yield "something differs" if page.differs else "all agree"


def _state(each: Checked) -> str:
    if not each.num:
        return "nothing"
    return "DIFFERS" if each.found else "ok"


def _compared(each: Compared) -> str:
    gaps = each.gaps or [0.0]
    numbers = f"{np.mean(gaps):>9.1e}{np.quantile(gaps, 0.99):>9.1e}{max(gaps):>9.1e}"
    return f"  {each.name:<30} {'ok' if each.is_normal else 'DIFFERS':<9} {len(each.gaps):>6} {numbers}   {each.bound}"


def _some(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"      {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"      and {len(lines) - SHOWN} more"
