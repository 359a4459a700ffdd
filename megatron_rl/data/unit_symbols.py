"""Preserves letter case in unit symbols, because case distinguishes `5 mW` from `5 MW`.

Other such pairs are `5 pF` and `5 PF`, or `5 Nm` and `5 nm`. The known symbols are units in their
correct case, combined with all prefixes allowed for the unit. If a symbol is not known in the given
case, the following rules apply:

- A symbol in lower case (`5 pa`), or of two capital letters (`5 MM`), is interpreted as the first
  known symbol with the same letters. Symbols without a prefix come first, then symbols with a
  lowercase prefix, then symbols with a capital prefix.
- Any other symbol (`5 Kg`, `5 Mpa`) is interpreted as the known symbol with the most letters in the
  same case.
"""

import re
from collections import defaultdict

_PREFIXES = ("", *"kmcdhunpfazyrq\u03bc", "da", *"MGTPEZYRQ")
_ANY_PREFIX = (
    *("m", "g", "s", "A", "K", "mol", "cd", "Hz", "N", "Pa", "J", "W", "C", "V", "F", "\u03a9", "S", "Wb", "T", "H", "lm", "lx"),
    *("Bq", "Gy", "Sv", "kat", "eV", "L", "bar", "cal", "rad", "Wh", "Ah", "VA", "Nm", "Ns", "Js", "pc"),
)
_SOME_PREFIXES = {
    **{"B": "kMGTPE", "b": "kMGTPE", "Bps": "kMGT", "bps": "kMGT"},
    **{"M": ("", *"mun\u03bcp"), "G": "mk", "t": ("", *"kMG")},
    **dict.fromkeys(("h", "d", "min", "ft", "in", "yd", "mi", "lb", "oz", "gal", "pt", "Da", "au", "ha", "dB", "Cal"), ("",)),
}
"""Units that are used with few prefixes or with none.

Units with few prefixes are bytes, bits, moles per liter, gauss and tonnes.
"""


def _known_symbols() -> dict[str, list[str]]:
    """Map each case-folded form to the known symbols with that form.

    Among symbols that differ only in case, symbols without a prefix come first, then symbols with a
    lowercase prefix, then symbols with a capital prefix.
    """
    prefixes = dict.fromkeys(_ANY_PREFIX, _PREFIXES) | _SOME_PREFIXES
    by_form: dict[str, list[str]] = defaultdict(list)
    pairs = [(prefix, unit) for unit, allowed in prefixes.items() for prefix in allowed]
    for prefix, unit in sorted(pairs, key=lambda pair: (pair[0].isupper(), pair[0] != "")):
        by_form[(prefix + unit).casefold()].append(prefix + unit)
    return dict(by_form)


_KNOWN = _known_symbols()
_UNITS = re.compile(
    r"(?:(?<=[\d}])|(?<=\\pi)|(?<=\u03c0))\s*[^\W\d_]+"
    r"(?:(?:\^?\{?-?\d\}?)?\s*(?:[/*\xb7\u22c5.]|per(?!\w))?\s*[^\W\d_]+){0,4}"
)
"""Matches the text after a number that may be a unit, or a product or quotient of units."""
_WORD = re.compile(r"[^\W\d_]+")


def mark_unit_case(text: str) -> str:
    """Mark unit symbols that casefold() would make equal to other units, as in `5 MW<1>`."""
    return _UNITS.sub(lambda units: _WORD.sub(lambda word: _mark_word(word[0]), units[0]), text)


def is_unit_symbol(word: str) -> bool:
    """Return True if a word is a unit symbol in any letter case."""
    return word.casefold() in _KNOWN


def _mark_word(word: str) -> str:
    known = _KNOWN.get(word.casefold(), [])
    if len(known) < 2 or word == known[0]:
        return word
    if word not in known and (word.islower() or (len(word) == 2 and word.isupper())):
        return word
    nearest = max(known, key=lambda symbol: sum(map(str.__eq__, symbol, word)))
    place = known.index(nearest)
    return f"{word}<{place}>" if place else word
