"""Finds the options listed in a single text, such as `A. red; B. blue` or `(A) red (B) blue`."""

import re
from collections.abc import Sequence

from megatron_rl.data.benchmarks.items import LETTERS

INLINE_MARKER = r"(?:^|[\s;\uff1b])%s[.\uff0e:]\s*(?=[^\s;\uff1b])"
"""Pattern of We-Math's option markers, with `%s` in place of the letter.

A marker follows a semicolon or white space, and text follows the marker. In `get Shape ;C.; B.
Shape`, the letter C is therefore not a marker.
"""
_IN_QUESTIONS = (r"(?:^|(?<=[\s:]))\(%s\)\s*", r"(?:^|\n)\s*%s[.:)]\s*", r"(?:^|(?<=\s))%s[.)]\s+")
_REFUSAL = r"(?:^|[\s;\uff1b])[A-Z][.\uff0e:]\s*(?=No correct answer)"
"""Matches We-Math's last option "No correct answer", whose letter may be out of sequence."""


def split_options(words: str, marker: str) -> tuple[str, ...]:
    """Return the options that follow the markers for A, B, C and so on.

    The search for each marker starts after the previous marker.
    """
    spans = _marker_spans(words, marker, start=0)
    last = re.compile(_REFUSAL).search(words, spans[-1][1]) if spans else None
    return _texts_between(words, [*spans, *([last.span()] if last else [])])


def find_listed_options(question: str, *, answer: str) -> tuple[str, ...]:
    """Return the options listed at the end of a question.

    The result is empty if there are fewer than two options or the answer is not the letter of an
    option.
    """
    for marker in _IN_QUESTIONS:
        for first in reversed(list(re.finditer(marker % "A", question))):
            spans = _marker_spans(question, marker, start=first.start())
            if len(spans) > 1:
                options = tuple(option.partition("\n")[0].strip() for option in _texts_between(question, spans))
                return options if answer in [*LETTERS[: len(options)]] else ()
    return ()


def _marker_spans(words: str, marker: str, *, start: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for letter in LETTERS:
        mark = re.compile(marker % letter).search(words, start)
        if mark is None:
            break
        found.append(mark.span())
        start = mark.end()
    return found


def _texts_between(words: str, spans: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    ends = [*(start for start, _ in spans[1:]), len(words)]
    return tuple(words[begin:end].strip(" \t\n;\uff1b") for (_, begin), end in zip(spans, ends, strict=True))
