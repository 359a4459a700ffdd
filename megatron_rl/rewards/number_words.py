"""Words next to a number in an answer, and their effect on the number's value.

The value does not change if all these words are harmless. Harmless words are common words (such as
articles, `about` and `the answer is`), units after the number, and words of the question or of the
reference answer. Any other word may change the value (`a tenth of 5`, `5 pairs`, `anything but 5`).
Words that are known to change a value (such as `half`) are never harmless, even if they occur in
the question.
"""

import re
from collections.abc import Iterable
from itertools import product

from megatron_rl.data.unit_symbols import is_unit_symbol

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_NAME = re.compile(r"(?<![^\W\d_])[^\W\d_]\s*[=:]")
"""Matches the name before a value, as in `x =`."""
_HARMLESS_WORDS = """
    a an the this that these those it its it's is are was were be there there's here i i'd i'm we you he she they has have had with and so
    then thus hence therefore of in on at to for from by as which my our your would will should must can say see think guess believe find
    found get got count counted counting answer final result value number total amount estimate estimated equals equal about approximately
    approx roughly around circa ca nearly almost exactly precisely only just sim circ mathrm text distance length width height depth area
    volume size weight mass age speed temperature angle radius price cost time sum image picture photo video scene room visible shown seen
    altogether overall people person item object unit piece point old tall long wide high deep away
    usd us eur gbp jpy cny rmb inr rs chf aud cad dollar euro cent pound yen yuan rupee franc
    \u7ea6 \u5927\u7ea6 \u5927\u6982 \u7b54\u6848 \u7b54\u6848\u662f \u662f \u6709 \u5171 \u5171\u6709 \u4e2a \u7c73 \u5398\u7c73 \u5c81
"""
_METRIC_UNITS = """
    meter metre gram gramme liter litre second watt volt amp ampere hertz joule newton pascal byte bit ohm calorie mole
"""
_METRIC_PREFIXES = ("", "centi", "milli", "kilo", "micro", "nano", "mega", "giga", "tera", "deci", "hecto")
_OTHER_UNITS = """
    inch inches foot feet yard mile pound ounce ton tonne minute hour day week month year degree celsius fahrenheit kelvin percent pct
    pixel px radian acre hectare gallon pint knot mph kph kmh fps rpm psi hr hrs sec secs mins yr lbs sq square cubic per kcal deg
"""
_CHANGING_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety infinity hundred thousand million billion trillion lakh crore mil mn bn tn grand
    milliard quadrillion quintillion sextillion septillion octillion nonillion decillion googol centi milli kilo micro nano mega giga tera
    peta deci hecto
    th half halve third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth twentieth hundredth thousandth millionth
    billionth pair couple trio dozen score gross myriad fold twice thrice double triple quadruple times multiple fraction
    not no never none nor neither without except but anything other isn't aren't wrong false or than less more fewer greater least most
    under over above below beyond up between within maximum minimum max min
    squared cubed square cube factorial power root sqrt log ln sin cos tan exp plus minus negative positive divided multiplied reciprocal
    inverse opposite
"""
_LARGE_NUMERALS = frozenset("\u767e\u5343\u4e07\u4ebf\u842c\u5104\u500d\u534a")
"""Chinese characters for hundred, thousand, ten thousand, hundred million, -fold (times) and half.
"""


def keeps_value(before: str, after: str, context: str) -> bool:
    """Return True if the words before and after a number do not change its value.

    `context` is the question together with the reference answer. If `context` contains no words,
    the number may be followed by any word that is not known to change a value (as in `5 chairs`).
    """
    known = _with_plurals(_words(context)) - _CHANGING

    def is_harmless(word: str) -> bool:
        return word in _HARMLESS or word in known or _is_part_of(word, context)

    def is_unit_or_noun(word: str) -> bool:
        return word in _UNITS or is_unit_symbol(word) or (not known and len(word) > 1 and not _changes_value(word))

    is_plain = all(map(is_harmless, _words(_NAME.sub(" ", before))))
    return is_plain and all(is_harmless(word) or is_unit_or_noun(word) for word in _words(after))


def _words(text: str) -> list[str]:
    return [found[0].casefold() for found in _WORD.finditer(text)]


def _changes_value(word: str) -> bool:
    return word in _CHANGING or not _LARGE_NUMERALS.isdisjoint(word)


def _is_part_of(word: str, context: str) -> bool:
    """Return True if a non-ASCII word occurs in the context and is not known to change a value.

    Scripts such as Chinese have no spaces between words, so any substring of the context counts.
    """
    return not word.isascii() and not _changes_value(word) and word in context.casefold()


def _with_plurals(words: Iterable[str]) -> frozenset[str]:
    return frozenset(form for word in words for form in (word, f"{word}s", f"{word}es", word.removesuffix("s"), word.removesuffix("es")))


_HARMLESS = _with_plurals(_HARMLESS_WORDS.split())
_UNITS = _with_plurals([*map("".join, product(_METRIC_PREFIXES, _METRIC_UNITS.split())), *_OTHER_UNITS.split()])
_CHANGING = _with_plurals(_CHANGING_WORDS.split())
