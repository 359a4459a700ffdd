r"""Letter case in formulas.

Math-verify reads `R` as `r`, so `\frac{R}{R+r}` would equal `\frac{r}{R+r}`. This module treats
case as significant for Greek letters, and for texts that contain the same letter in both upper and
lower case. In all other texts, case is ignored, so `X^2` equals `x^2`.
"""

import re
import unicodedata

from megatron_rl.data.answer_text import normalize_text

_GREEK_COMMAND = re.compile(
    r"\\(alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega)(?![A-Za-z])",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FORMULA = re.compile(r"[\\+*/^_=<>|()\u2208-]")
_WORD = re.compile(r"[^\W\d_]{3,}")
_SPARE = "abcfghjklmnopqrstuvwxyz"
"""Letters that may replace another letter. The letters e (the number), i (the imaginary unit) and d
(of a derivative) are excluded.
"""


def differ_in_case(one: str, other: str) -> bool:
    """Return True if two formulas that are equal up to case differ in meaning.

    The meaning differs if a Greek letter differs in case between the formulas, or if one formula
    contains the same letter in both upper and lower case.
    """
    one, other = normalize_text(one), normalize_text(other)
    if _greek(one) != _greek(other):
        return True
    bare, other_bare = (_COMMAND.sub(" ", text) for text in (one, other))
    if bare == other_bare or not (_FORMULA.search(one) and _FORMULA.search(other)) or _WORD.search(bare) or _WORD.search(other_bare):
        return False
    return bool(_in_both_cases(bare) or _in_both_cases(other_bare))


def distinguish_cases(one: str, other: str) -> tuple[str, str] | None:
    r"""Replace case-significant capital letters in two LaTeX formulas with unused letters.

    Return None if there are not enough unused letters. Example: `\frac{R}{R+r}` -> `\frac{a}{a+r}`.
    `\Delta` is also replaced if `\delta` occurs.
    """
    bare, other_bare = (_COMMAND.sub(" ", text) for text in (one, other))
    capitals = [letter.upper() for letter in sorted(_in_both_cases(bare) | _in_both_cases(other_bare))]
    names = {name for text in (one, other) for name in _GREEK_COMMAND.findall(text)}
    greek = sorted(name for name in names if name[0].isupper() and name.lower() in names)
    spare = [letter for letter in _SPARE if letter not in f"{bare} {other_bare}".casefold()]
    if len(spare) < len(capitals) + len(greek):
        return None
    letters = dict(zip([*capitals, *greek], spare, strict=False))

    def renamed(text: str) -> str:
        text = _GREEK_COMMAND.sub(lambda found: f"{{{letters[found[1]]}}}" if found[1] in letters else found[0], text)
        return re.sub(r"\\[A-Za-z]+|[A-Z]", lambda found: letters.get(found[0], found[0]), text)

    return renamed(one), renamed(other)


def _greek(text: str) -> list[str]:
    """Return the LaTeX names or Unicode names of the Greek letters in a text.

    A Greek character next to another letter is skipped.
    """
    characters = re.findall(r"(?<![^\W\d_])[\u0391-\u03c9](?![^\W\d_])", text)
    return _GREEK_COMMAND.findall(text) + [unicodedata.name(character) for character in characters]


def _in_both_cases(text: str) -> frozenset[str]:
    letters = {*text}
    return frozenset(letter for letter in letters if letter.isascii() and letter.islower() and letter.upper() in letters)
