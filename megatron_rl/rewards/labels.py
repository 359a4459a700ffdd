"""Labels made of digits: times, dates, scores, ratios, ranges, codes.

Labels are compared as text and never evaluated as arithmetic: otherwise 2:20 would equal 1:10, and
2023-05-04 would equal 2023-04-05.
"""

import re
from dataclasses import dataclass

from megatron_rl.data.answer_text import normalize_text

MAX_LABEL_CHARS = 60
_DECORATION = re.compile(r"\\?%|\xb0|\^?\\circ(?![A-Za-z])|\\text|[$\[\]{}]")
r"""Matches characters of a label that carry no meaning: signs as in `3-5%` or `30\xb0-60\xb0`
(degree signs), and brackets as in `[3-2]`.
"""
_SIZE = re.compile(r"\d[\d.,]*(?:\s*(?:[xX\xd7]|\\times)\s*\d[\d.,]*){1,2}", re.ASCII)
_CODE = re.compile(r"(?=[^A-Z]*[A-Z])[A-Z\d]+(?:[-/.:][A-Z\d]+){2,}", re.ASCII)
"""Matches codes with letters: `0-8044-2957-X`, `A-12-34`."""
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE | re.ASCII)
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})", re.ASCII)
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})", re.ASCII)
_DIGITS_ONLY = re.compile(r"[#+]?[(\d][\d\s().:/\-,+#_]*", re.ASCII)
_MIXED_NUMBER = re.compile(r"-?\s*\d+\s+\d+/\d+", re.ASCII)
_RANGE = re.compile(r"[+#]?\(?\d[\d.,]*(?:\s*-\s*\d[\d.,]*)+\)?", re.ASCII)
_MARKS = re.compile(r"\d\s*:\s*\d|\d/\d+/\d|\d\.\d+\.\d|(?<![\d.,])0\d|,\s*0\d(?!\d(?!\d))|\)\s*\d|\d\s*_|#\s*\d|\d\s+\(?\d", re.ASCII)
"""Matches labels that must not be read as arithmetic or as a number: `2:20`, `1/2/2023`, `1.2.3`,
`007`, `(555) 1234`, `12_3`, `#5`, `555 1234`.
"""
_SEPARATOR = re.compile(r"\s*([-:/.,])\s*")


@dataclass(slots=True, frozen=True)
class DigitLabel:
    """A label made of digits, in normalized form."""

    kind: str
    """Kind of label.

    - `time`, `time with seconds`, or `time of day` (a time with am or pm).
    - `date` (year first), or `date, year last`.
    - `code` for all other labels.
    """
    value: tuple[int | str, ...]


def read_digit_label(text: str) -> DigitLabel | None:
    """Parse a text that is a label and nothing else; return None for any other text.

    Numbers, fractions (`3/4`), sums and lists of numbers are not labels.
    """
    label = normalize_text(text).strip("\"'`$ ").rstrip(".").strip() if len(text) <= 2 * MAX_LABEL_CHARS else ""
    time = _TIME.fullmatch(label)
    if time and (time[2] or time[4]):
        hours, minutes, seconds = (int(part or 0) for part in time.groups()[:3])
        if time[4]:
            return DigitLabel("time of day", (hours % 12 + 12 * (time[4].casefold() == "p"), minutes, seconds))
        return DigitLabel("time with seconds" if time[3] else "time", (hours, minutes, seconds))
    if date := _YEAR_FIRST.fullmatch(label):
        return DigitLabel("date", tuple(int(date[part]) for part in (1, 3, 4)))
    if date := _YEAR_LAST.fullmatch(label):
        return DigitLabel("date, year last", tuple(int(date[part]) for part in (1, 3, 4)))
    bare = _DECORATION.sub("", label).replace("\\", "").strip()
    is_range = _DIGITS_ONLY.fullmatch(bare) and not _MIXED_NUMBER.fullmatch(bare) and (_RANGE.fullmatch(bare) or _MARKS.search(bare))
    if not is_range and not (_CODE.fullmatch(label) and re.search(r"\d", label, re.ASCII)):
        return None
    return DigitLabel("code", (_SEPARATOR.sub(r"\1", " ".join(label.split())),))


def same_label(truth: str, answer: str) -> bool | None:
    """Return True if two labels are equal, False if they differ, None if undecided.

    The result is None in these cases:

    - One text is not a label.
    - One time lacks am or pm, as in `7:30` and `7:30 pm`.
    - The labels are of different kinds, such as `1:30` and `1:30:00`, because `1:30` may be hours
      and minutes or minutes and seconds.
    - The labels are codes that differ as text, such as the equal ratios `1:2` and `2:4`.

    Two sizes are equal if their numbers are equal and in the same order, so `1920 x 1080` does not
    equal `1080 x 1920`. The kind of multiplication sign does not matter. If only one of the texts
    is a size, it is read as a product of numbers instead of a label.
    """
    size, other_size = _read_size(truth), _read_size(answer)
    if size and other_size:
        return size == other_size
    wanted, given = read_digit_label(truth), read_digit_label(answer)
    if wanted is None or given is None:
        return None
    if wanted == given:
        return True
    kinds = {wanted.kind, given.kind}
    if "time of day" in kinds and kinds <= {"time", "time with seconds", "time of day"} and len(kinds) > 1:
        (hours, *rest), (other_hours, *other_rest) = wanted.value, given.value
        is_same_hour = int(hours) % 12 == int(other_hours) % 12
        is_open = is_same_hour and rest == other_rest and min(int(hours), int(other_hours)) <= 12
        return wanted.value == given.value or (None if is_open else False)
    return False if len(kinds) == 1 and wanted.kind != "code" else None


def _read_size(text: str) -> tuple[str, ...]:
    r"""Return the sides in a size such as `3 x 4` or `3\times4`, or () for any other text."""
    size = normalize_text(text).strip("\"'`$ .") if len(text) <= 2 * MAX_LABEL_CHARS else ""
    return tuple(re.findall(r"\d[\d.]*", size.replace(",", ""))) if _SIZE.fullmatch(size) else ()
