"""Options that are listed in one text, as `A. red; B. blue` or `(A) red (B) blue`."""

import re
from collections.abc import Sequence

from megatron_rl.data.benchmarks.items import LETTERS

INLINE_MARKER = r"(?:^|[\s;\uff1b])%s[.\uff0e:]\s*(?=[^\s;\uff1b])"
"""Pattern of We-Math's markers, with the letter as `%s`.

A marker follows a semicolon or white space and is followed by text. In `get Shape ;C.; B. Shape`
the letter C begins no option.
"""
_IN_QUESTIONS = (r"(?:^|(?<=[\s:]))\(%s\)\s*", r"(?:^|\n)\s*%s[.:)]\s*", r"(?:^|(?<=\s))%s[.)]\s+")
_REFUSAL = r"(?:^|[\s;\uff1b])[A-Z][.\uff0e:]\s*(?=No correct answer)"
"""Pattern of We-Math's last option, which may have a letter out of sequence."""


def split_options(words: str, marker: str) -> tuple[str, ...]:
    """Return the options after the markers of A, B, C and so on.

    The marker of a letter is the first one after that of the previous letter.
    """
    spans = _marker_spans(words, marker, start=0)
    last = re.compile(_REFUSAL).search(words, spans[-1][1]) if spans else None
    return _texts_between(words, [*spans, *([last.span()] if last else [])])


def find_listed_options(question: str, *, answer: str) -> tuple[str, ...]:
    """Return the options at the end of a question's text.

    The result is empty if there are fewer than two options or the answer is not one of their
    letters.
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
