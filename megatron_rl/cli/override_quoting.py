r"""Quoting of key=value overrides for the shell and for Hydra, used to suggest corrections.

Outside quotes, Hydra 1.3.2 (grammar/OverrideLexer.g4) accepts only ASCII letters, digits, blanks
and / - \ + . $ % * @ ? | _ : in a value. Any other value needs quotes for Hydra inside the quotes
for the shell: `'task.data.train=["/data/bär.jsonl"]'`.
"""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from megatron_rl.config import Settings

CLOSING_BRACKETS = {"[": "]", "{": "}", "(": ")"}


def setting_type(key: str) -> object:
    """Return the type of a setting, such as `list[str]`, or None for an unknown key."""
    kind: object = Settings
    for name in key.split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif is_dataclass(kind) and name in {field.name for field in fields(kind)}:
            kind = get_type_hints(kind)[name]
        else:
            return None
    return kind


def quote_override(key: str, value: str) -> str:
    """Return `key=value` quoted for the shell and for Hydra.

    `value` is the text that the user typed, including any quotes.
    """
    return shlex.quote(f"{key}={quote_value(value, setting_type(key))}")


def quote_value(value: str, value_type: object) -> str:
    """Return a value in Hydra's syntax for a setting of type `value_type`.

    If `value_type` is None, brackets and braces in the value determine the type.
    """
    value = value.strip()
    is_list, is_dict = get_origin(value_type) is list, get_origin(value_type) is dict or is_dataclass(value_type)
    plain = unquote(value)
    if is_list or (value_type is None and is_enclosed(plain, "[")):
        entry = get_args(value_type)[0] if is_list else None
        inside = plain[1:-1] if is_enclosed(plain, "[") else value
        return f"[{','.join(quote_value(each, entry) for each in split_top_level(inside))}]"
    if (is_dict or value_type is None) and is_enclosed(plain, "{"):
        return f"{{{','.join(_quote_pair(each, value_type) for each in split_top_level(plain[1:-1]))}}}"
    read = parse_with_hydra(value)
    if read is not None and (value_type not in (str, None) or str(read) == value):
        return value
    text = os.path.expanduser(plain) if plain.startswith("~/") else plain
    try:
        OmegaConf.create([text])
    except GrammarParseError:  # `${` in the text is not a valid interpolation
        text = text.replace("${", r"\${")
    return QuotedString(text, Quote.double).with_quotes()


def _quote_pair(pair: str, kind: object) -> str:
    name, _, value = pair.partition(":")
    entry = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind).get(name.strip()) if is_dataclass(kind) else None
    return f"{name.strip()}:{quote_value(value, entry)}"


def parse_with_hydra(value: str) -> object | None:
    """Return the value as parsed by Hydra; a quoted string is returned without its quotes.

    Return None if Hydra cannot parse the value or reads it as several values of a sweep.
    """
    try:
        override = OverridesParser.create().parse_override(f"key={value}")
    except HydraException:
        return None
    read = override.value()
    return None if override.is_sweep_override() else read


def unquote(value: str) -> str:
    """Remove the quotes around a value that is quoted as a whole; return other values unchanged."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    read = parse_with_hydra(value) if is_quoted else None
    return read if isinstance(read, str) else value


def is_enclosed(value: str, opener: str) -> bool:
    """Return True if a value starts with the bracket `opener` and ends with the closing bracket."""
    return value.startswith(opener) and value.endswith(CLOSING_BRACKETS[opener]) and len(value) > 1


def split_top_level(inside: str) -> list[str]:
    """Split the content of a list at commas that are outside quotes and inner brackets."""
    borders = [-1, *_top_level_commas(inside), len(inside)]
    found = [inside[before + 1 : after].strip() for before, after in pairwise(borders)]
    return [each for each in found if each]


def _top_level_commas(inside: str) -> Iterator[int]:
    counts = all(inside.count(opener) == inside.count(closer) for opener, closer in CLOSING_BRACKETS.items())
    place = depth = 0
    is_first = True
    while place < len(inside):
        quoted = re.match(r"""("|')(?:\\.|(?!\1).)*\1(?=\s*(?:,|$|[\]}]))""", inside[place:], re.DOTALL) if is_first else None
        if quoted:
            place += quoted.end()
            is_first = False
            continue
        letter = inside[place]
        depth += counts * ((letter in CLOSING_BRACKETS) - (letter in CLOSING_BRACKETS.values()))
        if letter == "," and not depth:
            yield place
        is_first = letter in ",[{:" or (is_first and letter.isspace())
        place += 1
