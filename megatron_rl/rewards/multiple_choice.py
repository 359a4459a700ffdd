"""Parses the option letters that an answer to a multiple-choice question selects.

A text may select an option by the option's letter, by its letter and text, by its text alone, or by
its one-based position in the list of options. Several letters select a set of options.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.data.answer_text import comparison_form, normalize_text
from megatron_rl.data.question_options import LETTERS
from megatron_rl.rewards.labels import same_label
from megatron_rl.rewards.numbers import same_number

MAX_CHOICE_CHARS = 200
"""Maximum length of a text that is parsed as a list of letters."""
_CHOICE = re.compile(r"(?:[(\[]([A-Za-z])[)\]][.:]?|([A-Z])[:)]|([a-z])\))(?:\s|\Z)|([A-Z])\.?\Z")
_ONE_OF_SEVERAL = re.compile(r"[(\[]?([A-Z])[)\]]?[.:]?|\(([a-z])\)|([a-z])\)")
_NAMED_IN_WORDS = re.compile(r"(?<!\w)[A-Z](?!\w)|[(\[][a-z][)\]]|(?<!\w)[a-z]\)")
_BETWEEN = re.compile(r"\s*(?:[,;&]\s*(?:and\s)?|\s(?:and\s)?)\s*")
_BETWEEN_OF_OPTIONS = re.compile(r"\s*(?:[,;&/+]\s*(?i:and\s)?|\s(?i:and\s)?)\s*")
"""Matches a separator between option letters; used only if the question lists options. Without
options, `A/B` and `A + B` are formulas.
"""
_NUMBER_WORD = re.compile(
    r"\d|(?<!\w)(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|none|single|double|triple|once|twice|half|pair|dozen"
    r"|first|second|third|fourth|fifth|last|[IVX]+)(?!\w)",
    re.IGNORECASE,
)
"""Matches a number in an option's text. If the options contain numbers, an answer that is a number
may be a value instead of a position.
"""
_OPTION_IN_FULL = re.compile(r"[(\[]?([A-Za-z]|\d{1,2})(?:[)\]]|\s*[-.:,(]|\s)+(.*?)\)?", re.DOTALL)
"""Matches an option's letter with its text: `B - red`, `b. red`, `B (red)`. These texts select
option B if the text of option B is `red`.
"""
_BARE_LABEL = re.compile(r"[(\[]?([A-Za-z]|\d{1,2})[)\]]?[.:]?")
"""Matches a single letter of either case or a number; used only if the question lists options."""
_DOTTED = re.compile(r"\A([A-Z])\.(?=\s)")


def read_choice(text: str) -> str | None:
    """Return the letter in a text such as `B`, `(B)`, `B.`, `(b)` or `B) a dog`.

    Return None for any other text (such as a name that begins with the initial `B.`), and for a
    text that names more than one letter.
    """
    text = normalize_text(text)
    found = _CHOICE.match(text)
    if not found or _NAMED_IN_WORDS.search(text, found.end()):
        return None
    return next(letter for letter in found.groups() if letter).upper()


def read_choice_set(text: str, options: Mapping[str, str]) -> frozenset[str] | None:
    """Return the letters in a text such as `A, C`, `(A) and (C)` or `A C`.

    Return None for any other text, and for a text that repeats a letter (`A, A`). If `options` is
    not empty, lower-case letters (`a, c`) and adjacent letters (`AC`) are also accepted; adjacent
    letters must all be option letters.
    """
    text = normalize_text(text) if len(text) <= MAX_CHOICE_CHARS else ""
    text = text.removesuffix(".").removeprefix("\\{").removesuffix("\\}").strip("{}[] ")
    if options and re.fullmatch(r"[A-Z]{2,}", text) and len(set(text)) == len(text) and set(text) <= options.keys():
        return frozenset(text)
    text = text.upper() if options else text
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1]
    found = [_ONE_OF_SEVERAL.fullmatch(part) for part in (_BETWEEN_OF_OPTIONS if options else _BETWEEN).split(text)]
    letters = [next(letter for letter in each.groups() if letter).upper() for each in found if each]
    return frozenset(letters) if len(found) == len(letters) == len(set(letters)) > 1 else None


def same_choice(truth: str, answer: str, *, options: Mapping[str, str] | None = None) -> bool | None:
    """Return True if both texts select the same options, False if not, None if undecided.

    The result is None if one text selects no option, or if the texts differ and both consist of a
    letter and further text.

    Args:
        truth: Right answer.
        answer: Answer to compare.
        options: Options of the question, keyed by letter. With options, the text of an option
            selects that option, `B. red` is a choice, and a number that is not an option's text is
            a position in the list. Without options, `B. red` is not a choice, because it could be a
            name such as `B. Obama`.
    """
    options = options or {}
    wanted = _read_choice(truth, options)
    given = _read_choice(answer, options) or _read_choice_by_position(answer, options)
    if wanted is None or given is None:
        return None
    if wanted.is_bare or given.is_bare:
        return wanted.letters == given.letters
    return True if wanted == given else None


@dataclass(slots=True, frozen=True)
class _ChosenLetters:
    letters: frozenset[str]
    words: str = ""
    """Text after the letter; empty for a bare letter."""

    @property
    def is_bare(self) -> bool:
        return not self.words


def _read_choice(text: str, options: Mapping[str, str]) -> _ChosenLetters | None:
    several, text = read_choice_set(text, options), normalize_text(text)
    forms = {letter: comparison_form(option) for letter, option in options.items()}
    marked_option = _OPTION_IN_FULL.fullmatch(text)
    letter, words = (marked_option[1].upper(), comparison_form(marked_option[2])) if marked_option else ("", "")
    if letter in forms and (words == forms[letter] != "" or (not words and not several and not letter.isdigit())):
        return _ChosenLetters(frozenset({letter}))
    if several:
        return _ChosenLetters(several)
    if label := _bare_label(text, options):
        return _ChosenLetters(frozenset({label}))
    marked = _DOTTED.sub(r"\1)", text, count=1) if options else text
    if letter := read_choice(marked):
        words = comparison_form(_CHOICE.sub("", marked, count=1))
        is_contradiction = words != "" and words in forms.values() and words != forms.get(letter)
        return None if is_contradiction else _ChosenLetters(frozenset(letter), words)
    named = [letter for letter, form in forms.items() if form == comparison_form(text) != ""]
    named = named or [letter for letter, option in options.items() if same_label(option, text) or same_number(option, text)]
    return _ChosenLetters(frozenset(named)) if len(named) == 1 else None


def _bare_label(text: str, options: Mapping[str, str]) -> str:
    """Return the option label for a text that is a lower-case letter or a number.

    The label is in upper case. Return an empty string for any other text, and for a letter or
    number that may be the text of an option instead of its label.
    """
    bare = _BARE_LABEL.fullmatch(text)
    if bare is None or bare[1].upper() not in options or bare[1].isupper():
        return ""
    if bare[1].isdigit():
        return "" if _have_numbers(options) else bare[1]
    return "" if any(comparison_form(option) == bare[1] for option in options.values()) else bare[1].upper()


def _have_numbers(options: Mapping[str, str]) -> bool:
    return any(_NUMBER_WORD.search(option) for option in options.values())


def _read_choice_by_position(text: str, options: Mapping[str, str]) -> _ChosenLetters | None:
    place = normalize_text(text).removesuffix(".").strip("()")
    is_place = place.isascii() and place.isdigit() and len(place) < 3 and 0 < int(place) <= len(options)
    is_place = is_place and "A" in options and not _have_numbers(options)
    return _ChosenLetters(frozenset(LETTERS[int(place) - 1])) if is_place else None
