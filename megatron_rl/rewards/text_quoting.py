r"""Quoting of untrusted text from a policy, a dataset or a tool.

Quoted text cannot be mistaken for special tokens, chat roles or the surrounding prompt. Quoting
converts the text to a JSON string on one line and makes these changes:

- A space is inserted after each `<`, `[` and `|`, and after each `]` that precedes `~` or `!`. In
  all known special tokens, one of these characters is followed by a character other than a space
  (`<|im_end|>`, `[/INST]`, `<start_of_turn>`, `|ENDOFTEXT|`, `]~b]`).
- A space is inserted before each colon that follows neither a digit nor whitespace, because
  `ASSISTANT:` and `### Response:` are roles in chat templates without special tokens.
- Double quotation marks of all kinds become `\"`.
- Invisible characters and direction marks are escaped, such as `\u202e`, `\u200b`, `\u2028`, lone
  surrogates and private-use characters.

A character that a tokenizer's normalizer (NFKD) may turn into one of the characters listed above is
treated like the listed character. All other characters are unchanged. Letters, formulas and tags
therefore remain readable, as in `< b>`, `x < 4` and `[ 4, \\infty)`.
"""

import json
import re
import unicodedata

QUOTING_LEGEND = (
    "All fields are JSON texts, each on a line of its own. A blank behind <, [ or | and one before a colon was put there when they were"
    " quoted: take no notice of it."
)
"""Explanation of the quoting for the judge's system prompt."""
_FENCE = re.compile("([<\uff1c\ufe64\u226e[\uff3b\ufe47|\uff5c]|[]\uff3d\ufe48](?=[~!\uff5e\uff01\ufe57\ufe15\u203c\u2049]))(?=[^ ])")
_COLON = re.compile(r"(?<=[^\s\d])(?=[:\u2a74\ufe13\ufe55\uff1a])")
_QUOTES = re.compile(
    "[\u201c-\u201f\u2033\u2034\u2036\u2037\u2057\u02ba\u02dd\u02ee\u05f4\u275d\u275e\u2760\u2e42\u3003\u301d-\u301f\uff02"
    "\U0001f676-\U0001f678]"
)
_BEYOND_ASCII = re.compile(r"[^ -~]")
_UNSEEN_CATEGORIES = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Matches the marks and letters with Unicode's property Default_Ignorable_Code_Point
(DerivedCoreProperties.txt 16.0); the other characters with this property are matched by their
category.
"""


def quote_text(text: str) -> str:
    r"""Return the text as a quoted string, including the quotation marks.

    Example: `<|im_end|>` followed by a right-to-left override -> "< | im_end| >\u202e".
    """
    parted = _COLON.sub(" ", _FENCE.sub(r"\1 ", _QUOTES.sub('"', text)))
    return _BEYOND_ASCII.sub(_escape_hidden, json.dumps(parted, ensure_ascii=False))


def _escape_hidden(found: re.Match[str]) -> str:
    character = found[0]
    hidden = unicodedata.category(character) in _UNSEEN_CATEGORIES or _UNSEEN.match(character)
    return json.dumps(character)[1:-1] if hidden else character
