"""Numbers and options in answers to published benchmarks, for the rules in benchmark_rules.py.

A number is read with its sign, decimals and exponent. If a part of the number cannot be parsed, no
number is returned, because the remaining part would be a different number. For example, `-(5)` and
`5^2` are not 5, `1:2` is not 1, and `A12` is not 12. All functions run in time linear in the length
of the text.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from megatron_rl.rewards.answer import same_text
from megatron_rl.rewards.multiple_choice import read_choice
from megatron_rl.rewards.numbers import parse_number

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SIGNS = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"} | {0xFF0B: "+", 0xFF0C: ",", 0x3001: ","}
_MINUS_WORD = re.compile(r"\b(?:minus|negative)\s+(?=\.?\d)", re.IGNORECASE)
_LOOSE_SIGN = re.compile(r"(?<![\d)\]%])(?<![\d)\]%]\s)-\s+(?=\.?\d)")
"""Matches a sign that is separated from its number by a space, as in `- 5` but not in `3 - 5`."""
_BULLETS = re.compile(r"\s*(?:[-*\u2022]\s+\d[^\n]*(?:\n|\Z)\s*){2,}")
_BULLET = re.compile(r"^\s*[-*\u2022]\s+", re.MULTILINE)
_NUMERAL = r"(?:(?<![\d)\]%])[-+])?(?:\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,2})?"
_NUMBER = re.compile(_NUMERAL, re.ASCII)
_PAIR = re.compile(rf"(?<![\w.+-])({_NUMERAL})\s*,\s*({_NUMERAL})", re.ASCII)
_PLAIN = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,2})?", re.ASCII)
_RUN = re.compile(r"[\d\s,]+", re.ASCII)
_GOES_ON = re.compile(r"\d|[.eE/:^][-+]?\d|[\^\u03c0]")
"""Matches text that continues a number; the digits before this text are only a part of the number.
"""
_CHANGED = re.compile(
    r"-[^\w\s-]+\.?\d|[\u221a\u221b\u03c0]|\^(?!\s*\{?\s*\\circ)|\d\s*!|\d\s*pi\b|\bpi\b"
    r"|[A-Za-z]\(?-?\.?\d|\b(?:hundred|thousand|million|billion|dozen|half)\b"
    r"|\\(?!text|mathrm|mathbf|mbox|circ|degree|approx|left|right)[A-Za-z]",
    re.IGNORECASE,
)
r"""Matches text that changes the value of the only number in an answer, or that makes the number
part of a label: `-(5)`, `\sqrt{5}`, `5 million`, `A12`, `f(0)`.
"""
_PI = re.compile(r"\\pi(?![A-Za-z])|\u03c0|(?<![A-Za-z])pi(?![A-Za-z])")
_AFTER_PI = re.compile(r"\s*(?:/\s*(\d{1,9}))?(?:\s+[A-Za-z\u00b0 ]{1,20})?\.?\s*", re.ASCII)
_BARE = re.compile(r"\(([A-Za-z])\)|\[([A-Za-z])\]|<([A-Za-z])>|([A-Za-z])[).:]?")
_LABELED = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[).:])\s*(\S.*)", re.DOTALL)
_MARKS = " \t\n*`$\"'"
"""Characters that may enclose an answer: white space, quotation marks, and marks of Markdown and
LaTeX.
"""
_DOTTED = re.compile(r"^([A-Z])\.(?=\s)")


def read_number(text: str) -> Fraction | None:
    """Return the number in a text, or None if the text does not contain exactly one number.

    Example: the result is -5/2 for `-2.5 cm`, 1000 for `1e3`, and None for `3 or 4`.
    """
    text = normalize_signs(text).strip()
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    return None if _CHANGED.search(text) else parse_number(text)


def read_number_with_pi(text: str) -> float | None:
    """Return the only number (or multiple of pi) in a text, or None if there is no such number.

    Example: the result is 7.853981633974483 for `2.5π`, and -1.5707963267948966 for `-π/2`.
    """
    before, *rest = _PI.split(normalize_signs(text))
    if not rest:
        found = read_number(before)
        return None if found is None else float(found)
    after = _AFTER_PI.fullmatch(rest[0])
    factor = before.rstrip(" *\u00b7\u00d7")
    if not re.search(r"\d", factor):
        times: Fraction | None = Fraction(-1 if factor.endswith("-") else 1)
    else:
        times = read_number(factor) if re.search(r"[\d)]\Z", factor) else None
    if len(rest) > 1 or after is None or times is None or (divisor := int(after[1] or 1)) == 0:
        return None
    return float(times) * math.pi / divisor


def read_numbers(text: str) -> list[Fraction] | None:
    """Return all numbers in a text, in order.

    Return None if a digit is part of a label (`A12`), a time, a ratio or a power.
    """
    found: list[Fraction] = []
    text = normalize_signs(text)
    for numeral in _NUMBER.finditer(text):
        start, end = numeral.span()
        before = text[max(0, start - 2) : start]
        is_product = re.fullmatch(r"\d[xX\u00d7]", before) is not None
        if (before[-1:].isalpha() and not is_product) or before.endswith(".") or _GOES_ON.match(text, end):
            return None
        found.append(Fraction(numeral[0]))
    return found


def read_pair(text: str) -> tuple[Fraction, Fraction] | None:
    """Return the first two numbers that are separated by a comma, or None."""
    text = normalize_signs(text)
    found = _PAIR.search(text)
    return None if found is None or _GOES_ON.match(text, found.end()) else (Fraction(found[1]), Fraction(found[2]))


def read_grid(text: str, side: int) -> list[int]:
    """Return the first run of side * side integers, or an empty list if there is no such run.

    The integers are separated by commas or whitespace.
    """
    text = normalize_signs(text)
    for run in _RUN.finditer(text):
        before, digits = text[max(0, run.start() - 1) : run.start()], re.findall(r"\d+", run[0])
        is_cut = (run[0][0].isdigit() and (before.isalnum() or (before and before in "-+./:^"))) or (
            run[0][-1].isdigit() and _GOES_ON.match(text, run.end())
        )
        if side and len(digits) == side * side and not is_cut and all(len(each) <= 30 for each in digits):
            return [int(each) for each in digits]
    return []


def read_bare_letter(answer: str) -> str:
    """Return the letter of an answer that consists of one letter, or an empty string.

    The case of the letter is preserved.

    Accepted answers are, for example, `B`, `b`, `(B)`, `[B]`, `B.` and `B)`.
    """
    bare = _BARE.fullmatch(answer.strip(_MARKS))
    return next((letter for letter in bare.groups() if letter), "") if bare else ""


def find_option(answer: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer selects.

    Return an empty string for a letter that belongs to no option, and None if no option is
    selected. A letter takes precedence over the text of an option: with the options `B`, `C`, `D`,
    the answer `C` selects the third option. Likewise, `C. red` selects option C even if `red` is
    the text of another option.
    """
    answer, letters, letter = answer.strip(_MARKS), LETTERS[: len(options)], read_bare_letter(answer)
    if letter and letter.upper() in letters and (letter.isupper() or answer not in options):
        return letter.upper()
    named = [each for each, option in zip(letters, options, strict=False) if same_text(option, answer)]
    if named:
        return named[0] if len(named) == 1 else None
    if labeled := _LABELED.fullmatch(answer):
        label = (labeled[1] or labeled[2]).upper()
        if label in letters and same_text(options[letters.index(label)], labeled[3]):
            return label
    given = read_choice(_DOTTED.sub(r"\1)", answer)) or (letter if letter.isupper() else "")
    if not given:
        return None
    return given if len(given) == 1 and given in letters else ""


def normalize_signs(text: str) -> str:
    """Normalize minus signs and remove bullets.

    Every minus sign becomes a `-` directly before its number. Bullets are removed only if the text
    has at least two lines and every line starts with a bullet.
    """
    text = text.translate(_SIGNS)
    if _BULLETS.fullmatch(text):
        text = _BULLET.sub("", text)
    return _LOOSE_SIGN.sub("-", _MINUS_WORD.sub("-", text))
