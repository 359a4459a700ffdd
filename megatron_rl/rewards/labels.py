"""Labels made of digits: times, dates, scores, ratios, ranges, codes. They are compared as what they are and never evaluated.

As arithmetic 2:20 would equal 1:10, and 2023-05-04 would equal 2023-04-05.
"""

import re
from dataclasses import dataclass

from megatron_rl.data.answer_text import normalize

LONGEST_LABEL = 60
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE | re.ASCII)
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})", re.ASCII)
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})", re.ASCII)
_DIGITS_ONLY = re.compile(r"[#+]?[(\d][\d\s().:/\-,+#_]*", re.ASCII)
_MIXED_NUMBER = re.compile(r"-?\s*\d+\s+\d+/\d+", re.ASCII)
_RANGE = re.compile(r"[+#]?\(?\d[\d.,]*(?:\s*-\s*\d[\d.,]*)+\)?", re.ASCII)
_MARKS = re.compile(r"\d\s*:\s*\d|\d/\d+/\d|\d\.\d+\.\d|(?<![\d.,])0\d|,\s*0\d(?!\d(?!\d))|\)\s*\d|\d\s*_|#\s*\d|\d\s+\(?\d", re.ASCII)
"""What arithmetic has not: `2:20`, `1/2/2023`, `1.2.3`, `007`, `(555) 1234`, `12_3`, `#5`, `555 1234`."""
_SEPARATOR = re.compile(r"\s*([-:/.,])\s*")


@dataclass(slots=True, frozen=True)
class DigitLabel:
    kind: str
    """`time`, `time of day` (with am or pm), `date` (year first), `date, year last`, or `code`."""
    value: tuple[int | str, ...]


def digit_label(text: str) -> DigitLabel | None:
    """Return the label that a text is, None for any other text: for numbers, fractions (`3/4`), sums and lists of numbers."""
    label = normalize(text).strip("\"'`$ ").rstrip(".").strip() if len(text) <= 2 * LONGEST_LABEL else ""
    time = _TIME.fullmatch(label)
    if time and (time[2] or time[4]):
        hours, minutes, seconds = (int(part or 0) for part in time.groups()[:3])
        if time[4]:
            return DigitLabel("time of day", (hours % 12 + 12 * (time[4].casefold() == "p"), minutes, seconds))
        return DigitLabel("time", (hours, minutes, seconds))
    if date := _YEAR_FIRST.fullmatch(label):
        return DigitLabel("date", tuple(int(date[part]) for part in (1, 3, 4)))
    if date := _YEAR_LAST.fullmatch(label):
        return DigitLabel("date, year last", tuple(int(date[part]) for part in (1, 3, 4)))
    if not _DIGITS_ONLY.fullmatch(label) or _MIXED_NUMBER.fullmatch(label) or not (_RANGE.fullmatch(label) or _MARKS.search(label)):
        return None
    return DigitLabel("code", (_SEPARATOR.sub(r"\1", " ".join(label.split())),))


def same_label(truth: str, answer: str) -> bool | None:
    """Return whether two labels are the same; None where one is no label, or where their kinds leave it open (`7:30` and `7:30 pm`).

    Two different codes are left open, too: a judge may know that a ratio of 1:2 is one of 2:4.
    """
    wanted, given = digit_label(truth), digit_label(answer)
    if wanted is None or given is None:
        return None
    if wanted == given:
        return True
    kinds = {wanted.kind, given.kind}
    if kinds == {"time", "time of day"}:
        (hours, *rest), (other_hours, *other_rest) = wanted.value, given.value
        is_same_hour = int(hours) % 12 == int(other_hours) % 12
        is_open = is_same_hour and rest == other_rest and min(int(hours), int(other_hours)) <= 12
        return wanted.value == given.value or (None if is_open else False)
    return False if len(kinds) == 1 and wanted.kind != "code" else None
