r"""Normalizes answer text and extracts the contents of \boxed{...}.

Reference answers and responses both pass through `normalize_text` before they are compared.
Normalization unifies Unicode forms, quotation marks and minus signs, and removes invisible
characters and the styling of LaTeX and Markdown. Normalization never changes a number, a letter or
a word. The run time of every function is linear in the length of the text.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import islice

from megatron_rl.data.unit_symbols import mark_unit_case

BOX_COMMAND = "\\boxed{"
MOST_BOXES = 20
"""Maximum number of boxes read from one text; the limit keeps the run time linear in its length."""
_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL_LINE = re.compile(r"^####[ \t]*(\S[^\n]*?)\s*\Z", re.MULTILINE)
"""Matches the last line of a GSM8K solution, such as `#### 42`."""
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u20e3\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that normalization removes.

These are the code points with property Default_Ignorable_Code_Point (DerivedCoreProperties.txt of
Unicode 16.0), the interlinear annotation characters, and the enclosing keycap of digit emoji.
"""
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u02b9\u02bc\u02c8\u2032\u2035\u00b4", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u2036\u301d\u301e\u301f", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043\u02d7\u2796", "-")
    | {"\u2044": "/", "\u2215": "/", "\u29f8": "/", "\u2236": ":", "\u02d0": ":", "\u2795": "+", "\u00ba": "\u00b0", "\u02da": "\u00b0"}
)


def _letters_of(kind: str) -> dict[str, str]:
    """Map superscript (`super`) or subscript (`sub`) letters to plain letters.

    NFKC alone would turn 2 to the power of x into 2x.
    """
    found = {}
    for code in range(0x2B0, 0x2100):
        stated, _, letter = unicodedata.decomposition(chr(code)).partition("> ")
        if stated == f"<{kind}" and len(letter) == 4 and chr(int(letter, 16)).isalpha():
            found[chr(code)] = chr(int(letter, 16))
    return found


_RAISED = dict(zip("\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207d\u207e", "0123456789+-()", strict=True))
_RAISED |= _letters_of("super")
_LOWERED = dict(zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u208a\u208b\u208d\u208e", "0123456789+-()", strict=True))
_LOWERED |= _letters_of("sub")
_SCRIPTS = re.compile(f"(?P<raised>[{''.join(_RAISED)}]+)|(?P<lowered>[{''.join(_LOWERED)}]+)")
_FRACTION = re.compile("(?:(?P<whole>\\d)\\s?)?(?P<fraction>[\u00bc-\u00be\u2150-\u215e\u2189])")
MAX_PASSES = 8
"""Maximum number of passes of `normalize_text`; random texts of a fuzz test needed at most 4."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:[\u2009\u202f]|\\,|\{,\})\d{3})+(?![\d,])")
_TEXT_COMMANDS = {
    "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "textsc", "textmd", "textup", "mathrm", "mathbf", "mathit",
    "mathsf", "mathtt", "mathnormal", "operatorname", "emph", "underline", "boldsymbol", "bm", "pmb", "mbox", "hbox", "displaystyle",
    "textstyle", "rm", "bf", "it", "sf", "tt", "left", "right", "bigl", "bigr", "Bigl", "Bigr",
}  # fmt: skip
_LATEX = re.compile(r"\\([A-Za-z]+)\*?\s*|\\.|[{}]|[^\\{}]+|\\", re.DOTALL)
_INVISIBLE_DELIMITER = re.compile(r"\\(?:left|right)\s*\.|\\!\s*")
r"""Matches invisible delimiters and negative spaces in LaTeX.

Invisible delimiters are `\left.` and `\right.`; a negative space is `\!`, as in `11,\!111`.
"""
_SPACE = re.compile(r"\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|(?<=[\w}\])${.,:;])~|\s")
"""Matches LaTeX spacing commands and plain white space.

In LaTeX, `~` after a word is a space; elsewhere it is treated as a negation (`~p`).
"""
_BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=[^\s*])([^*]+)(?<=[^\s*])\*\*(?![\w(\[{*])")
_SINGLE_SCRIPT = re.compile(r"([\^_])\{(\w)\}(?!\d)")
_ESCAPED = re.compile(r"\\([$%&#_])")
_FORMULA_INDEX = re.compile(r"(?<=[a-z)\]])_(?:\{(\d+)\}(?!\d)|(\d+))")
"""Matches a numeric subscript in a formula, because `h_2o` and `h2o` must compare equal."""
_BEFORE_UNIT = re.compile(r"(?<=\d)\s+(?=[^\W\d_]|[%\xb0])|(?<=[$\u20ac\xa3\xa5])\s+(?=\d)")
"""Matches the optional space between a number and its unit or currency: `5 cm`, `50 %`, `$ 5`."""
_BETWEEN_NUMBERS = re.compile(r"(?<=\d),\s+(?=\d)")
_ORDINAL = re.compile(r"(?<=\d)\^\{?(st|nd|rd|th)\}?(?!\w)")
_STOPS = ".,;\u3002"
_WORD_END = re.compile(r"[^\W\d_]{2}\Z")
_GROUP = re.compile(r"\{([^{},;]+)\}")
_ENCLOSING = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"))
_QUOTES = (('"', '"'), ("'", "'"))


def normalize_text(text: str) -> str:
    r"""Return the text in normal form, on one line and with letter case preserved.

    Example: `\text{Yes}`, `**Yes**` and `\u201cYes\u201d` -> `Yes`, `Yes` and `"Yes"`; `\u22125` (a
    minus sign) -> `-5`; `5\u00b2` -> `5^2`; `1\u00bd` -> `1\frac{1}{2}`; `10{,}000` -> `10,000`;
    `10\,000` -> `10000`.

    The normal form of a normal form is the same text: a pass can leave characters next to each
    other that the next pass reads together, so passes are repeated, at most MAX_PASSES times.
    """
    for _ in range(MAX_PASSES):
        before, text = text, _normalize_once(text)
        if text == before:
            break
    return text


def _normalize_once(text: str) -> str:
    text = _THOUSANDS.sub(_join_thousands, text)
    text = _SCRIPTS.sub(_write_script, _FRACTION.sub(_write_fraction, text.translate(_CHARACTERS)))
    text = _IGNORABLE.sub("", unicodedata.normalize("NFKC", text)).translate(_CHARACTERS)
    if "\\" in text or "~" in text:
        text = _SPACE.sub(" ", _without_text_commands(_INVISIBLE_DELIMITER.sub("", text)))
    text = _SINGLE_SCRIPT.sub(r"\1\2", _BOLD.sub(r"\1", text))
    return _strip_enclosing(" ".join(text.split()), _ENCLOSING)


def comparison_form(text: str) -> str:
    """Return a text in the form that is used to compare answers.

    The form ignores case (except in unit symbols), quotation marks and dollar signs around the
    text, and trailing punctuation.
    """
    text = unicodedata.normalize("NFKC", mark_unit_case(_ESCAPED.sub(r"\1", normalize_text(text))).casefold())
    text = _ORDINAL.sub(r"\1", _FORMULA_INDEX.sub(r"\1\2", _BEFORE_UNIT.sub("", text)))
    text = _BETWEEN_NUMBERS.sub(",", text)
    return _strip_end(_strip_enclosing(_strip_end(text), (*_ENCLOSING, *_QUOTES)))


def ends_in_dots(text: str) -> bool:
    """Return True if a text ends in a digit followed by several dots.

    `0.333...` is not the number `0.333`, and `5..` is not a number.
    """
    return _has_dots_behind_digit(normalize_text(text))


def extract_last_box(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} or \fbox{...}.

    If the text has no box, return the text after `####` on its last line. Return None if the text
    has neither, or if the last box is not closed.
    """
    starts = [found.end() for found in _BOX_START.finditer(text)]
    if starts:
        return text_before_closing_brace(text[starts[-1] :])
    final = _FINAL_LINE.search(text)
    return final[1] if final else None


def boxed_texts(text: str) -> list[str]:
    """Return the contents of the first MOST_BOXES boxes, including nested boxes.

    Unclosed boxes are skipped.
    """
    starts = [found.end() for found in islice(_BOX_START.finditer(text), MOST_BOXES)]
    return [inside for start in starts if (inside := text_before_closing_brace(text[start:])) is not None]


def strip_box(text: str) -> str:
    r"""Return x if the text is `\boxed{x}` or `\fbox{x}`, ignoring enclosing marks such as `$`.

    Any other text is returned unchanged.
    """
    box = _strip_enclosing(text, _ENCLOSING)
    found = _BOX_START.match(box)
    inside = text_before_closing_brace(box[found.end() :]) if found else None
    return inside if found and inside is not None and found.end() + len(inside) + 1 == len(box) else text


def count_boxes(text: str) -> int:
    r"""Count the \boxed{ and \fbox{ commands in a text."""
    return len(_BOX_START.findall(text))


def text_before_closing_brace(body: str) -> str | None:
    r"""Return the text before the brace that closes an already open brace.

    Return None if that brace is never closed. Escaped braces (`\{`) do not count.
    """
    depth = 1
    for token in re.finditer(r"\\.|[{}]", body, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return body[: token.start()]
    return None


def _strip_end(text: str) -> str:
    """Strip trailing punctuation, but strip `!` only after a word.

    `n!` and `5...` remain unchanged, because `n` and `5` have different values.
    """
    text = text.strip("$ ")
    body = text.rstrip(_STOPS + "!")
    if "!" in text[len(body) :] and not _WORD_END.search(body[-2:]):
        body = text.rstrip(_STOPS)
    return text if _has_dots_behind_digit(text) else body.strip("$ ")


def _has_dots_behind_digit(text: str) -> bool:
    body = text.rstrip(_STOPS + "$ ")
    return body[-1:].isdigit() and text[len(body) :].count(".") > 1


def _join_thousands(found: re.Match[str]) -> str:
    separator = "," if "{,}" in found[0] else ""
    return re.sub(r"[\u2009\u202f]|\\,|\{,\}", separator, found[0])


def _write_script(found: re.Match[str]) -> str:
    mark, table = ("^", _RAISED) if found["raised"] else ("_", _LOWERED)
    return f"{mark}{{{''.join(table[character] for character in found[0])}}}"


def _write_fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found["fraction"]).partition("\u2044")
    return f"{found['whole']}\\frac{{{above}}}{{{below}}}" if found["whole"] else f"{above}/{below}"


def _without_text_commands(text: str) -> str:
    """Remove style-only commands together with the braces around their arguments."""
    pieces: list[str] = []
    is_dropped: list[bool] = []  # one entry per open brace
    is_argument = False
    for token in _LATEX.finditer(text):
        found, command = token[0], token[1]
        if command in _TEXT_COMMANDS:
            if pieces and re.search(r"\\[A-Za-z]+\Z", pieces[-1]):
                pieces.append(" ")  # keeps \circ\text{C} from becoming \circC
            is_argument = True
            continue
        if found == "{":
            is_dropped.append(is_argument)
        is_kept = found not in "{}" or not (is_argument if found == "{" else is_dropped and is_dropped.pop())
        pieces += [found] if is_kept else []
        is_argument = False
    return "".join(pieces)


def _strip_enclosing(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Strip pairs of marks that enclose the whole text, at most four levels deep."""
    for _ in range(4):
        group = _GROUP.fullmatch(text)
        inner = group[1].strip() if group else text
        for start, end in pairs:
            if len(inner) > len(start) + len(end) and inner.startswith(start) and inner.endswith(end):
                inner = inner[len(start) : -len(end)].strip()
        if inner == text:
            break
        text = inner
    return text
