"""Conversion of mathematics typed as plain text into LaTeX that math-verify can read.

Examples of plain text are `sqrt(2)/2`, `x**2`, `2*pi`, `1e-5`, `90 degrees`, `<=`, `1 1/2`.
Math-verify 0.9.0 parses only LaTeX. In plain text, it reads a name as a product of letters, and it
drops or rejects some characters.
"""

import re
from itertools import pairwise

from megatron_rl.data.answer_text import normalize_text, text_before_closing_brace

_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("*\xd7\xb7\u22c5\u2219\u2022", "\\cdot "),
        **{"\xf7": "/", "\xb0": "^\\circ ", "\u221a": "\\sqrt ", "\u221e": "\\infty ", "\xb1": "\\pm ", "\u2213": "\\mp "},
        **{"\u2264": "\\le ", "\u2a7d": "\\le ", "\u2265": "\\ge ", "\u2a7e": "\\ge ", "\u2260": "\\ne "},
        "\u2248": "\\approx ",
        **{"\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u0394": "\\Delta ", "\u03a9": "\\Omega "},
        **{"\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma ", "\u03b8": "\\theta ", "\u03bb": "\\lambda "},
        **{"\u03bc": "\\mu ", "\u03c0": "\\pi ", "\u03c3": "\\sigma ", "\u03c6": "\\phi ", "\u03c9": "\\omega "},
    }
)
_NAME = re.compile(r"(?<![\\A-Za-z])(?:(pi|theta|alpha|beta)|infinity|inf|oo)(?![A-Za-z])")
_ROOT = re.compile(r"(?:(?<![\\A-Za-z])|\\)sqrt\s*(?:\(|(?=\d|[A-Za-z](?![A-Za-z])))", re.IGNORECASE)
_RADICAND = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]", re.ASCII)
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*[(\d_]|\s+[a-z](?![A-Za-z]))"
)
_DEGREES = re.compile(r"(?<=\d)\s*(?:degrees?|deg)(?![A-Za-z])\.?", re.IGNORECASE)
_PERCENT = re.compile(r"(?<=[\d)}])\s*(?:\\?%|percent|per cent|pct)(?![A-Za-z])\s*\Z", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", re.ASCII)
_MIXED_NUMBER = re.compile(r"(?<![\w.,/])(\d+)(?:\s+|\s+and\s+)(\d+)/(\d+)(?![\w./])", re.ASCII)
_DECIMAL = r"(?:\d+(?:\.\d+)?|\.\d+)"
_EXPONENT = re.compile(rf"\^\s*(?:\(([^()]*)\)|([-+]?\s*{_DECIMAL}))")
_EXPONENT_OF_E = re.compile(r"(?<=e)\^\s*([-+]\s*\d+(?:\.\d+)?[a-z]|\d*\.\d+[a-z])(?![A-Za-z])", re.ASCII)
"""Matches an exponent such as the one in `e^-0.02t`, which means `e^{-0.02t}`; in LaTeX, only the
minus sign would be raised.
"""
_REPEATING = re.compile(
    r"(?<![\w.,])(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\}|\\dot\s*\{(\d)\}(?:(\d*)\\dot\s*\{(\d)\})?|(?<=\.)\((\d+)\))", re.ASCII
)
r"""Matches repeating decimals: `0.1\overline{6}`, `0.\dot{3}`, `0.(3)`. `0.1(6)` does not match,
because it may be a product.
"""
_RELATIONS = (("<=", "\\le "), (">=", "\\ge "), ("!=", "\\ne "), ("==", "="), ("**", "^"))
_FRACTION_OF_DIGITS = re.compile(r"(\\[dtc]?frac)\s*(\d)\s*(\d)", re.ASCII)
_INDEX = re.compile(r"(?<=[A-Za-z])\s*_(\d+|\w)")
_PRODUCT_OF_GROUPS = re.compile(
    r"(?<=[)\d])\s*(?=\()|(?<=\))\s*(?=\d)|(?<=\d)\s*(?=\\(?:[dt]?binom|max|min|gcd|lcm|sum|prod|int|lim|lceil)(?![A-Za-z]))"
)
"""Matches the position between adjacent factors, where a product sign is needed: math-verify would
add a number and the group after it, so `3(4)` would be 7.
"""
_GROUP = re.compile(r"\\[dtc]?(?:frac|binom)(?![A-Za-z])")
_FACTOR_BEHIND = re.compile(r"\s*(?:[\d(\[{]|\\\{|\\[dtc]?(?:frac|binom)(?![A-Za-z]))")
_FACTOR_BEFORE = re.compile(r"[\d)]\s*\Z")
_MIXED_GROUP = re.compile(r"(?<![\d.])(\d+)\s*\Z", re.ASCII)
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", re.ASCII)


def to_latex(text: str) -> str:
    r"""Convert a short expression to LaTeX; LaTeX and words are unchanged.

    Examples: `2*sqrt(3)/3` -> `2\cdot \sqrt{3}/3`; `x**-2` -> `x^{-2}`; `1 1/2` -> `1\frac{1}{2}`;
    `50 %` -> `50\%`.
    """
    text = normalize_text(text).removesuffix(".")
    for typed, command in _RELATIONS:
        text = text.replace(typed, command)
    text = _REPEATING.sub(_write_repeating, _FRACTION_OF_DIGITS.sub(r"\1{\2}{\3}", text))
    text = _SCIENTIFIC.sub(r"(\1\\cdot 10^{\2})", _MIXED_NUMBER.sub(_write_mixed, text))
    text = _PERCENT.sub(r"\\%", _DEGREES.sub(r"^\\circ ", text))
    text = text.translate(_SYMBOLS)
    text = _write_roots(_FUNCTION.sub(r"\\\1 ", _NAME.sub(lambda found: f"\\{found[1] or 'infty'} ", text)))
    text = _EXPONENT_OF_E.sub(lambda found: f"^{{{found[1].replace(' ', '')}}}", text)
    text = _EXPONENT.sub(lambda found: f"^{{{found[1] if found[1] is not None else found[2].replace(' ', '')}}}", text)
    text = _write_products(_PRODUCT_OF_GROUPS.sub(r"\\cdot ", _INDEX.sub(r"_{\1}", text)))
    return " ".join(text.split())


def _write_mixed(found: re.Match[str]) -> str:
    whole, above, below = found.groups()
    is_mixed = 0 < int(above) < int(below) and len(below) < 5
    return f"{whole}\\frac{{{above}}}{{{below}}}" if is_mixed else found[0]


def _write_repeating(found: re.Match[str]) -> str:
    whole, fixed, *repeated = (digits or "" for digits in found.groups())
    period = "".join(repeated)
    above, below = int(f"{whole}{fixed}{period}") - int(f"0{whole}{fixed}"), (10 ** len(period) - 1) * 10 ** len(fixed)
    return f"\\frac{{{above}}}{{{below}}}"


def _write_products(text: str) -> str:
    """Insert product signs between fractions or binomials and the factors next to them.

    Mixed numbers and derivatives are left unchanged.
    """
    signs: set[int] = set()
    for found in _GROUP.finditer(text):
        end = _end_of_arguments(text, found.end())
        if end is not None and _FACTOR_BEFORE.search(text[: found.start()]) and not _is_mixed(text, found.start()):
            signs.add(found.start())
        is_derivative = text[found.end() :].lstrip("{ ").startswith(("d", "\\partial"))
        if end is not None and not is_derivative and _FACTOR_BEHIND.match(text, end):
            signs.add(end)
    places = [0, *sorted(signs), len(text)]
    return "\\cdot ".join(text[start:end] for start, end in pairwise(places))


def _is_mixed(text: str, at: int) -> bool:
    r"""Return True if the fraction at `at` is below 1 and follows an integer, as in `3\frac12`."""
    fraction = _FRACTION.match(text, at)
    return bool(fraction and _MIXED_GROUP.search(text[:at]) and 0 < int(fraction[1]) < int(fraction[2]))


def _end_of_arguments(text: str, at: int) -> int | None:
    """Return the end of the second argument after position `at`, or None if an argument is missing.

    An argument is a group in braces or a single character.
    """
    for _ in range(2):
        at += len(text[at:]) - len(text[at:].lstrip())
        inside = text_before_closing_brace(text[at + 1 :]) if text[at : at + 1] == "{" else ""
        if inside is None or not (inside or text[at : at + 1].isalnum()):
            return None
        at += len(inside) + 2 if text[at] == "{" else 1
    return at


def _write_roots(text: str) -> str:
    r"""Replace `sqrt(...)` and `sqrt2` with `\sqrt{...}`; unclosed brackets are left unchanged."""
    pieces, at = [], 0
    for found in _ROOT.finditer(text):
        bare = _RADICAND.match(text, found.end())
        end = bare.end() if bare and not found[0].endswith("(") else _closing(text, found.end())
        if found.start() < at or end is None:
            continue
        pieces += [text[at : found.start()], "\\sqrt{", _write_roots(text[found.end() : end]), "}"]
        at = end + found[0].endswith("(")
    return "".join([*pieces, text[at:]])


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None
