r"""Equations in answers: values with names (`x = 1, y = 2`), and equations that name no value (`x + y = 3`).

math-verify drops what stands before the last equals sign: `x = 1, y = 2` would equal `2, 1`, and `x + y = 3` would equal `3`. So several
named values are compared name by name, and only an equation that names one value equals a text without an equals sign.
"""

import re

PARTS = re.compile(r"[,;](?!\d{3}(?!\d))(?![^()\[\]]*[)\]])|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
"""Between the parts of a list: no comma of thousands or between brackets."""
_NAME = re.compile(
    r"(?:m?\\angle\s*|\\(?:overline|overrightarrow|triangle|text|mathrm)\s*)?\{?"
    r"(?:[A-Za-z]{1,2}|[A-Z]{3}|\\(?:alpha|beta|gamma|delta|Delta|theta|lambda|mu|sigma|phi|omega))\}?"
    r"'*(?:_\{?\w+\}?)?(?:\s*\([\w, ]*\))?"
)
r"""Names of values: `x`, `AB`, `S_{10}`, `f(x)`, `\angle A`."""


def named_values(text: str) -> dict[str, str]:
    """Return the values of `x = 1, y = 2` by name; empty for other texts, and where a name occurs twice (`x = 1 or x = 2`)."""
    equations = [[side.strip() for side in part.split("=")] for part in _parts(text) if part.strip()]
    if not all(len(sides) == 2 and _NAME.fullmatch(sides[0]) and sides[1] for sides in equations):
        return {}
    values = {"".join(name.split()): value for name, value in equations}
    return values if len(values) == len(equations) else {}


def num_names(text: str) -> int:
    """Return how many different names stand before an equals sign."""
    sides = [part.partition("=") for part in _parts(text)]
    return len({"".join(left.split()) for left, equals, _ in sides if equals})


def states_a_value(text: str) -> bool:
    """Return whether each equation of a text has a name alone on one side, as `x = 5` and `2x = y` have and `x + y = 3` has not."""
    chains = [[side.strip() for side in part.split("=")] for part in _parts(text) if "=" in part]
    return all(_NAME.fullmatch(sides[0]) or _NAME.fullmatch(sides[-1]) for sides in chains)


def _parts(text: str) -> list[str]:
    is_enclosed = text.startswith("(") and text.find(")") == len(text) - 1
    return PARTS.split(text[1:-1] if is_enclosed else text)
