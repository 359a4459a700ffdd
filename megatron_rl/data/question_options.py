"""Finds the answer options that a question lists in its text."""

import re
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CAPITALS = re.compile(
    r"(?:^|(?<=[\s(;,]))\(?([A-Z])[.:)\u3001]\s*(?=\S)|(?<=[^A-Za-z])\(([A-Z])\)\s*(?=\S)|(?<=\([A-Z]\)\s)\(([A-Z])\)\s*\Z", re.MULTILINE
)
"""Matches capital letters used as option labels.

The last of several labels without texts, as in `(A) (B) (C)`, may be at the end of the question.
"""
_SMALL = r"(?<![A-Za-z\d)\]])\(({0})\)\s*(?=[^\s,;:?!)\].]|\.\d)|(?:^|(?<=[\s;,]))({0})\)\s+(?=\S)|^[ \t]*({0})[.\u3001]\s+(?=\S)"
"""Matches lowercase letters and numbers used as option labels.

The forms are `(a) 3` and `a) 3`, and at the start of a line also `a. 3`. `f(1)` and `sides a: 3` do
not match.
"""
_MARKS = (
    (_CAPITALS, LETTERS),
    (re.compile(_SMALL.format("[a-z]"), re.MULTILINE), LETTERS.lower()),
    (re.compile(_SMALL.format(r"\d{1,2}"), re.MULTILINE), [str(place) for place in range(1, 27)]),
)
_FULL_WIDTH = {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)} | {0x3000: " "}
_LAST_WORD = re.compile(r"[\s;,(]*(?:\b(?:or|and)\s*)?\Z")


def find_options(question: str) -> dict[str, str]:
    """Return the options that a question lists, keyed by capital letter or by number.

    Labels start at A or 1 and have no gaps. Recognized forms with capital letters are `A. red`,
    `(A) red`, `A) red` and `A: red`. Recognized forms with lowercase letters and numbers are
    `(a) red` and `a) red`, and on a separate line `a. red`. An option ends at the next label
    or at the end of its line. If the options are part of an image, their texts are empty, as in
    `(A) (B) (C)`. The result is empty if fewer than two options are listed.
    """
    question = question.translate(_FULL_WIDTH)
    return next((options for mark, labels in _MARKS if (options := _find_listed(question, mark, labels))), {})


def _find_listed(question: str, mark: re.Pattern[str], labels: Sequence[str]) -> dict[str, str]:
    marks: list[re.Match[str]] = []
    for found in mark.finditer(question):
        before = max(0, found.start() - 1)
        is_next = len(marks) < len(labels) and next(filter(None, found.groups())) == labels[len(marks)]
        if is_next and ("(" in found[0] or question.rfind("(", 0, before) <= question.rfind(")", 0, before)):
            marks.append(found)  # the 1 in `(0, 1)` is not a label
    ends = [*(each.start() for each in marks[1:]), len(question)]
    texts = [_LAST_WORD.sub("", question[each.end() : end].partition("\n")[0]) for each, end in zip(marks, ends, strict=False)]
    return dict(zip((label.upper() for label in labels), texts, strict=False)) if len(marks) > 1 else {}
