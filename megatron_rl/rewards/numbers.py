"""Parses numbers in answers: the only number in a text, texts that are a number, and lists.

A number is rejected if its sign or exponent cannot be parsed. Values are exact. Texts are
normalized first (data/answer_text.py), so minus signs of all kinds, full-width digits and thin
spaces are treated like their ASCII equivalents.
"""

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from math import floor

from megatron_rl.data.answer_text import normalize_text
from megatron_rl.rewards.number_words import keeps_value

MAX_NUMBER_CHARS = 30
"""Maximum length of a number that is read from a text."""
ROUNDED_DIGITS = 6
"""Minimum number of digits for a decimal to count as equal to a longer decimal that rounds to it.
"""
_DIGITS = r"((?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
_EXPONENT = r"[-+]?\d{1,2}"
_TEN_TO_THE = rf"10\s*\^\s*(?:\{{\s*({_EXPONENT})\s*\}}|\(\s*({_EXPONENT})\s*\)|({_EXPONENT}))"
_TIMES = r"\s*(?:[xX*\xd7\u22c5\xb7]|\\times|\\cdot)\s*"
_VALUE = re.compile(rf"{_DIGITS}(?:[eE]({_EXPONENT})(?!\w)|{_TIMES}{_TEN_TO_THE})?", re.ASCII)
_POWER_OF_TEN = re.compile(_TEN_TO_THE, re.ASCII)
_FRACTION = re.compile(r"(\d{1,30})\s*/\s*(\d{1,30})|\\[dt]?frac\{(\d{1,30})\}\{(\d{1,30})\}", re.ASCII)
_LEADING_ZERO = re.compile(r"0\d")
_SIGN_WORDS = re.compile(r"(?<!\w)(?:(minus|negative|neg\.?)|plus|positive)\Z", re.IGNORECASE)
_PLUS_OR_MINUS = re.compile(r"plus\W*(?:or\W*)?minus\Z", re.IGNORECASE)
_UNREADABLE_BEFORE = re.compile(r"(?:[/*!_^]|\\(?!approx|sim)[A-Za-z]+|(?<![^\W_])[-+][^\W\d_]+)\Z")
"""Matches text before a number that makes the value ambiguous, including `-USD` in `-USD 5`."""
_NAME_BEFORE = re.compile(r"[^\W\d_\u3040-\u9fff\uac00-\ud7af]\(?\Z")
"""Matches a letter directly before a number, as in `A12` and `f(5)`. Chinese, Japanese and Korean
letters do not match, because these scripts have no space before a number.
"""
_DOTS = re.compile(r"\s*\.\s*\.")
_UNREADABLE_AFTER = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|[_*/\xd7\u22c5+\xb1\u2030\u2031]|[eEkKMBi](?![^\W\d_])|\\(?!circ|%|\$|text)[A-Za-z]+|\u03c0|pi\b|\u221e"
    r"|-\s*(?:[^\W\d_](?![^\W\d_])|\Z))|!|[\u0300-\u036f]"
)
"""Matches text after a number that changes the value: an operator, a factorial, the overline of a
repeating decimal.
"""
_OPENING = " $\u20ac\xa3\xa5\u20b9\u20a9\u20bd\u20ba([{\"'`\\"
"""Characters allowed between a sign and its number: currency signs, brackets, quotation marks."""
_READABLE_SYMBOLS = "+-=~\u2248\u223c\u2243\u2245\u2261\u2234\u2190\u2192\u21d2\u27f9\u27f6"
_UNIT_POWER = re.compile(r"(?<=[^\W\d_])\^\{?-?\d+\}?", re.ASCII)
_PERCENT = re.compile(r"(?<=[\d.])\s*(?:\\?[%\uff05]|percent|per cent|pct)[\s.$]*\Z", re.IGNORECASE)
_CURRENCY = re.compile(r"\\\$|[\u20ac\xa3\xa5\u20b9\u20a9\u20bd\u20ba]|\A[^$]*\$[^$]*\Z")
"""Matches a currency sign. Two dollar signs do not match, because they enclose a formula."""
_MARKS = re.compile(
    r"\\?[%$\u20ac\xa3\xa5\u20b9\u20a9\u20bd\u20ba\xb0^{}]|\\circ(?![A-Za-z])|percent|per cent|pct|deg(?:rees?)?", re.IGNORECASE
)
_DEGREES = re.compile(r"\xb0|\\circ(?![A-Za-z])|\d\s*deg(?:rees?)?(?!\w)", re.IGNORECASE)
_SCALE = re.compile(r"\s*(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GROUPS_OF_THREE = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d*)?", re.ASCII)
_NUMBERS_IN_GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:,[1-9]\d{0,2}(?:,\d{3})+)+", re.ASCII)
"""Matches two or more numbers with thousands separators in a list without spaces: `12,345,67,890`.
"""
_PART = re.compile(r"\s*;\s*|\s*,\s+(?:and\s+)?|\s+and\s+|\s+,\s*")
_BRACKETS = {("(", ")"): "()", ("[", "]"): "[]", ("\\{", "\\}"): "{}", ("{", "}"): "{}"}


def parse_number(text: str, context: str = "") -> Fraction | None:
    """Return the only number in a text, or None.

    The result is None if the text contains other digits, if the sign or exponent cannot be parsed,
    or if the number is next to words that may change its value (number_words.py). `context` is the
    question together with the reference answer.

    Examples: `1,250.5 cm`, `about .5`, `minus 5`, `1e-5`, `2 million` are numbers; `3 or 4`, `2^3`,
    `+-5`, `5k`, `half of 5` are not.
    """
    text = normalize_text(text)
    found = _VALUE.search(text)
    if found is None or len(found[0]) > MAX_NUMBER_CHARS:
        return None
    before, after = text[: found.start()], _UNIT_POWER.sub("", text[found.end() :])
    sign = _sign_at_end(before)
    if sign is None or any(map(str.isdigit, before + after)) or _UNREADABLE_AFTER.match(after) or _is_operator(after.lstrip()[:1]):
        return None
    if _num_open(before) > max(0, -_num_open(after)):
        return None
    if _DOTS.match(text, found.end() - found[0].endswith(".")):
        return None
    scale = _SCALE.match(after)
    words = _SIGN_WORDS.sub("", before.rstrip(_OPENING))
    if not keeps_value(words, after[scale.end() :] if scale else after, context):
        return None
    return sign * _value_of(found) * (_SCALES[scale[1].casefold()] if scale else 1)


def parse_exact_number(text: str) -> Fraction | None:
    """Return the value of a text that consists of one number, or None for any other text.

    Accepted forms are, for example, `-1,250.5`, `1e-05`, `3 x 10^{8}`, `10^-5` and `7.`. An integer
    with a leading zero is not a number but a code (labels.py).
    """
    sign, literal = _signed_literal(text)
    if power := _POWER_OF_TEN.fullmatch(literal):
        return sign * _ten_to_the(power.groups())
    found = _VALUE.fullmatch(literal)
    return None if found is None or _LEADING_ZERO.match(literal) else sign * _value_of(found)


def same_number(truth: str, answer: str) -> bool | None:
    """Return True if two numbers are equal, False if not, None if undecided.

    The result is None if a text does not consist of one number.

    Numbers with different values count as equal in these cases:

    - One number is a decimal with at least ROUNDED_DIGITS digits, and the other number rounds to
      that decimal, as in 3.141593 and 3.14159265.
    - One number is a percentage, and the other number has no unit. The other number may be written
      in percent or as a fraction: 22.5% equals both 22.5 and 0.225.

    A percentage, an amount of money and an angle are never equal to each other.
    """
    if len({_unit_mark(truth), _unit_mark(answer)} - {None}) > 1:
        return False
    if _PERCENT.search(truth) or _PERCENT.search(answer):
        return _same_percentage(truth, answer)
    wanted, given = parse_exact_number(truth), parse_exact_number(answer)
    if wanted is None or given is None:
        return None
    return wanted == given or _is_rounding(truth, answer) or _is_rounding(answer, truth)


def _unit_mark(text: str) -> re.Pattern[str] | None:
    """Return the pattern that matches the unit of a number: percent, currency or degrees.

    Return None if the text is not a number or has none of these units.
    """
    if len(text) > 2 * MAX_NUMBER_CHARS or parse_exact_number(_MARKS.sub("", normalize_text(text))) is None:
        return None
    return next((mark for mark in (_PERCENT, _CURRENCY, _DEGREES) if mark.search(text)), None)


def _same_percentage(truth: str, answer: str) -> bool | None:
    wanted, given = (parse_exact_number(_PERCENT.sub("", text)) for text in (truth, answer))
    if wanted is None or given is None:
        return None
    is_truth, is_answer = (_PERCENT.search(text) is not None for text in (truth, answer))
    if is_truth and is_answer:
        return wanted == given
    share, other = (wanted, given) if is_truth else (given, wanted)
    return other in (share, share / 100)


def same_numbers(truth: str, answer: str) -> bool | None:
    """Return True if two lists of numbers are equal, False if not, None if undecided.

    The result is None if a text is not a list, or if one list has round brackets and the other has
    square brackets. A list in braces is compared as a set. It does not equal a list in any other
    kind of brackets. If neither list has brackets, the order of the numbers is ignored. In all
    other cases, the numbers must be equal in the same order.
    """
    (kind, wanted), (other_kind, given) = _parse_list(truth), _parse_list(answer)
    if not wanted or not given or len(wanted) == len(given) == 1:
        return None
    kinds = {kind, other_kind}
    if "{}" in kinds:
        return kinds <= {"{}", ""} and set(wanted) == set(given)
    if kinds == {""}:
        return Counter(wanted) == Counter(given)
    return wanted == given if len(kinds - {""}) == 1 else None


def _sign_at_end(before: str) -> int | None:
    """Return the sign (1 or -1) of the number after `before`, or None if it cannot be parsed."""
    body, symbols = before.rstrip(_OPENING), _symbols_at_end(before)
    if not body:
        return 1
    if any(map(_is_operator, symbols)) or (set(symbols) & set("+-") and body[-1] not in "+-"):
        return None
    if body[-1] in "+-":
        words = body[:-1].rstrip()
        is_apart, is_joined = len(words) < len(body) - 1, before[len(body) : len(body) + 1] != " "
        is_signed = words.rstrip(_OPENING)[-1:] in ("+", "-")
        if words and (is_signed or ((words[-1].isalnum() or words[-1] in ")]}%") and not (is_apart and is_joined))):
            return None  # not a sign in `--5`, `A-5` and `total - 5`, but a sign in `is -5` and `x = - 5`
        return -1 if body[-1] == "-" else 1
    if word := _SIGN_WORDS.search(body):
        return None if _PLUS_OR_MINUS.search(body) else -1 if word[1] else 1
    if _UNREADABLE_BEFORE.search(body) or _NAME_BEFORE.search(before):
        return None
    return 1


def _symbols_at_end(text: str) -> str:
    start = len(text)
    while start and not (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    return text[start:]


def _num_open(text: str) -> int:
    """Return the number of opening brackets minus the number of closing brackets."""
    return sum((character in "([{") - (character in ")]}") for character in text)


def _is_operator(character: str) -> bool:
    """Return True if a symbol next to a number may change the number's value.

    Such symbols are mathematical operators (such as `|`, `<` and root signs), and dashes and lines
    that are not minus signs.
    """
    if character in _READABLE_SYMBOLS:
        return False
    return unicodedata.category(character) in ("Sm", "Pd") or "\u2500" <= character <= "\u257f" or character == "\u23af"


def _signed_literal(text: str) -> tuple[int, str]:
    literal = normalize_text(text).replace("\\$", "").strip("$ ").removesuffix(".") if len(text) <= 2 * MAX_NUMBER_CHARS else ""
    unsigned = literal.lstrip("+-")
    signs = literal[: len(literal) - len(unsigned)]
    return (-1 if signs == "-" else 1), unsigned.strip("$ ") if len(signs) <= 1 else ""


def _value_of(found: re.Match[str]) -> Fraction:
    return Fraction(found[1].replace(",", "")) * _ten_to_the(found.groups()[1:])


def _ten_to_the(exponents: tuple[str | None, ...]) -> Fraction:
    return Fraction(10) ** int(next((exponent for exponent in exponents if exponent), 0))


def _is_rounding(short: str, long: str) -> bool:
    """Return True if `short` is a decimal without an exponent and `long` rounds to it."""
    (sign, one), (other_sign, other) = _signed_literal(short), _signed_literal(long)
    digits = one.replace(",", "")
    if sign != other_sign or not re.fullmatch(r"\d*\.\d+", digits) or len(digits.replace(".", "").lstrip("0")) < ROUNDED_DIGITS:
        return False
    value = parse_exact_number(other)
    assert value is not None, f"{long} was a number"
    scale = 10 ** len(digits.partition(".")[2])
    return Fraction(floor(abs(value) * scale + Fraction(1, 2)), scale) == Fraction(digits)


def _parse_list(text: str) -> tuple[str, list[Fraction]]:
    """Return the kind of brackets and the values of a list.

    If the text is not a list, no values are returned.
    """
    inside, kind = normalize_text(text).strip("$. "), ""
    for (start, end), name in _BRACKETS.items():
        if inside.startswith(start) and inside.endswith(end):
            inside, kind = inside[len(start) : -len(end)], name
            break
    if len(inside) > 1000 or _GROUPS_OF_THREE.fullmatch(inside):
        return kind, []
    values = [_parse_element(part) for part in _elements(inside)]
    return kind, [value for value in values if value is not None] if None not in values and len(values) > 1 else []


def _elements(inside: str) -> list[str]:
    """Split a list at semicolons, `and` and commas.

    The comma in `1,000` does not split the number if other items are separated by `, `, `;` or
    `and`.
    """
    parts = _PART.split(inside)
    if len(parts) == 1 and _NUMBERS_IN_GROUPS.fullmatch(inside):
        return [found[0] for found in _GROUPS_OF_THREE.finditer(inside)]
    if len(parts) == 1:
        return inside.split(",")
    return [each for part in parts for each in ([part] if _GROUPS_OF_THREE.fullmatch(part.strip("+-$ ")) else part.split(","))]


def _parse_element(text: str) -> Fraction | None:
    sign, literal = _signed_literal(text)
    if found := _FRACTION.fullmatch(literal):
        above, below = (int(digits) for digits in found.groups() if digits)
        return Fraction(sign * above, below) if below else None
    return parse_exact_number(text)
