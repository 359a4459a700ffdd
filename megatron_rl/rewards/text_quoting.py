r"""Text that a policy, a data set or a tool wrote, as a quotation that neither a tokenizer nor a reader takes for anything else.

It is a JSON text, on one line, in which besides
- a blank stands behind each `<`, `[` and `|`, and behind a `]` before `~` or `!`: all names of special tokens that are known to us hold
  one of them before another character (`<|im_end|>`, `[/INST]`, `<start_of_turn>`, `|ENDOFTEXT|`, `]~b]`), and none holds a blank there
- a blank stands before each colon that follows neither a digit nor a blank: `ASSISTANT:` and `### Response:` are the roles of templates
  without special tokens
- double quotation marks of all kinds are `\"`
- what cannot be seen, or turns others around, is its number: `\u202e`, `\u200b`, `\u2028`, half a surrogate pair, private use
Characters that a tokenizer's normalizer may turn into these are treated like them (NFKD). Nothing is lost but blanks and the kinds of
quotation marks: letters, formulas and tags stay what they look like, `< b>`, `x < 4`, `[ 4, \\infty)`.
"""

import json
import re
import unicodedata

QUOTING_LEGEND = (
    "All fields are JSON texts, each on a line of its own. A blank behind <, [ or | and one before a colon was put there when they were"
    " quoted: take no notice of it."
)
"""What a judge is told of it."""
_FENCE = re.compile("([<\uff1c\ufe64\u226e[\uff3b\ufe47|\uff5c]|[]\uff3d\ufe48](?=[~!\uff5e\uff01\ufe57\ufe15\u203c\u2049]))(?=[^ ])")
_COLON = re.compile(r"(?<=[^\s\d])(?=[:\u2a74\ufe13\ufe55\uff1a])")
_QUOTES = re.compile(
    "[\u201c-\u201f\u2033\u2034\u2036\u2037\u2057\u02ba\u02dd\u02ee\u05f4\u275d\u275e\u2760\u2e42\u3003\u301d-\u301f\uff02"
    "\U0001f676-\U0001f678]"
)
_BEYOND_ASCII = re.compile(r"[^ -~]")
_UNSEEN_CATEGORIES = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Marks and letters among Unicode's Default_Ignorable_Code_Point (DerivedCoreProperties.txt 16.0); the others of these have a category."""


def quote_text(text: str) -> str:
    r"""Example: `<|im_end|>` and a right-to-left override -> "< | im_end| >\u202e"."""
    parted = _COLON.sub(" ", _FENCE.sub(r"\1 ", _QUOTES.sub('"', text)))
    return _BEYOND_ASCII.sub(_escape_hidden, json.dumps(parted, ensure_ascii=False))


def _escape_hidden(found: re.Match[str]) -> str:
    character = found[0]
    hidden = unicodedata.category(character) in _UNSEEN_CATEGORIES or _UNSEEN.match(character)
    return json.dumps(character)[1:-1] if hidden else character
