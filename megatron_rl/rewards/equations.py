"""Equations in answers: named values (`x = 1, y = 2`) and other equations (`x + y = 3`).

Math-verify drops everything before the last equals sign, so `x = 1, y = 2` would equal `2, 1`, and
`x + y = 3` would equal `3`. To prevent this, several named values are compared by name, and an
equation can equal a text without an equals sign only if the equation names a single value.
"""

import re
from itertools import pairwise

PART_SEPARATOR = re.compile(r"[,;](?!\d{3}(?!\d))(?![^()\[\]]*[)\]])|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
"""Matches a separator between list items.

Thousands separators and commas within brackets do not match.
"""
_TOKEN = re.compile(r"[()\[\]{}]|=|\\(?:approx(?:eq)?|simeq|doteq)(?![A-Za-z])")
_DECIMAL = re.compile(r"[(+-]*\d*\.(\d*)(?:\s*\\(?:times|cdot)\s*10\^\{?([-+]?\d{1,2})\}?)?\)?", re.ASCII)
_NAME = re.compile(
    r"(?:m?\\angle\s*|\\(?:overline|overrightarrow|triangle|text|mathrm)\s*)?\{?"
    r"(?:[A-Za-z]{1,2}|[A-Z]{3}|\\(?:alpha|beta|gamma|delta|Delta|theta|lambda|mu|sigma|phi|omega))\}?"
    r"'*(?:_\{?\w+\}?)?(?:\s*\([\w, ]*\))?"
)
r"""Matches names of values: `x`, `AB`, `S_{10}`, `f(x)`, `\angle A`."""


def links(text: str) -> tuple[str, list[tuple[str, str, bool]]]:
    r"""Return the text with normalized equations, and the pairs of values that must agree.

    In the returned text, every name precedes its value, and the values after \approx are removed.
    Each pair is (value, next value, is_last). The values are adjacent in an equation with several
    equality signs, such as 2+3 and 5 in `x = 2+3 = 5`. The last two values of an equation must
    agree even if they are not numbers.

    Examples: the text `5 = x` becomes `x=5`, and no pair is returned. The text
    `x = \frac{1}{3} \approx 0.33` becomes `x=\frac{1}{3}`, and the pair is
    (\frac{1}{3}, 0.33, True).
    """
    pieces, pairs, at = [], [], 0
    for separator in [*PART_SEPARATOR.finditer(text), None]:
        part, found = _read_chain(text[at : separator.start() if separator else len(text)])
        pieces += [part, separator[0] if separator else ""]
        pairs += found
        at = separator.end() if separator else at
    return " ".join(" ".join(pieces).split()), pairs


def _read_chain(part: str) -> tuple[str, list[tuple[str, str, bool]]]:
    signs = _relation_signs(part)
    starts, ends = [0, *(sign.end() for sign in signs)], [*(sign.start() for sign in signs), len(part)]
    sides = [part[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    are_exact = [sign[0] == "=" for sign in signs]
    if not signs or not all(sides[1:]):
        return part, []
    if not sides[0]:
        sides, are_exact = sides[1:], are_exact[1:]
    elif not _NAME.fullmatch(sides[0]) and _NAME.fullmatch(sides[-1]) and all(are_exact):
        sides = sides[::-1]
    is_named = _NAME.fullmatch(sides[0]) is not None and len(sides) > 1
    if len(sides) == 2 and all(are_exact):
        return "=".join(sides), []
    values = sides[is_named:]
    kept = next((place for place, is_exact in enumerate(are_exact[is_named:], start=1) if not is_exact), len(values))
    pairs = [(one, other, place == len(values) - 2) for place, (one, other) in enumerate(pairwise(values))]
    return "=".join([*sides[:is_named], *values[:kept]]), pairs


def _relation_signs(part: str) -> list[re.Match[str]]:
    """Return the equality signs that are not inside brackets."""
    depth, found = 0, []
    for token in _TOKEN.finditer(part):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] not in "()[]{}":
            found.append(token)
    return found


def read_named_values(text: str) -> dict[str, str]:
    """Return the values of a text such as `x = 1, y = 2`, keyed by name.

    The result is empty for any other text, and for a text in which a name occurs twice
    (`x = 1 or x = 2`).
    """
    equations = [[side.strip() for side in part.split("=")] for part in _split_parts(text) if part.strip()]
    if not all(len(sides) == 2 and _NAME.fullmatch(sides[0]) and sides[1] for sides in equations):
        return {}
    values = {"".join(name.split()): value for name, value in equations}
    return values if len(values) == len(equations) else {}


def count_names(text: str) -> int:
    """Return the number of distinct left-hand sides of the equations in a text."""
    sides = [part.partition("=") for part in _split_parts(text)]
    return len({"".join(left.split()) for left, equals, _ in sides if equals})


def is_value_equation(text: str) -> bool:
    """Return True if each equation in a text has a single name on one side.

    The result is True for `x = 5` and `2x = y`, and False for `x + y = 3`.
    """
    chains = [[side.strip() for side in part.split("=")] for part in _split_parts(text) if "=" in part]
    return all(_NAME.fullmatch(sides[0]) or _NAME.fullmatch(sides[-1]) for sides in chains)


def rounding_of(one: str, other: str) -> float | None:
    """Return half a unit in the last decimal place of the less precise decimal.

    Return None if neither text is a decimal.
    """
    places = [int(found[2] or 0) - len(found[1]) for text in (one, other) if (found := _DECIMAL.fullmatch(text))]
    return 0.5 * 10.0 ** max(places) if places else None


def _split_parts(text: str) -> list[str]:
    is_enclosed = text.startswith("(") and text.find(")") == len(text) - 1
    return PART_SEPARATOR.split(text[1:-1] if is_enclosed else text)
