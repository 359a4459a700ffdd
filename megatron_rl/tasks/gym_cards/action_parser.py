"""From what the policy wrote to an action, or to the reason why it names none. Nothing here raises, and nothing is run as code."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

MAX_REPLY_CHARS = 4096
"""Longer replies are not read: no honest one is, and it bounds how deep a reply can nest in the JSON reader."""


class Invalid(StrEnum):
    """What keeps a reply from being an action."""

    TOO_LONG = "too long"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    REPEATED_KEY = "repeated key"
    NO_ACTION = "no action"
    SEVERAL_ACTIONS = "several actions"


class _RepeatedKey(ValueError):
    pass


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedKey
    return read


def _not_a_number(constant: str) -> float:
    raise ValueError(f"{constant} is Python, not JSON")


def read_json(text: str, actions: Sequence[str]) -> int | Invalid:
    """The index into `actions` that a reply names, or why it names none.

    Valid is: one JSON object (RFC 8259, so no NaN), white space around it at most, no key twice, "action" exactly one of `actions`.
    Other keys are not looked at: what the policy says it read is not rewarded, only what it does.
    """
    if len(text) > MAX_REPLY_CHARS:
        return Invalid.TOO_LONG
    try:
        read = json.loads(text, object_pairs_hook=_unrepeated, parse_constant=_not_a_number)
    except _RepeatedKey:
        return Invalid.REPEATED_KEY
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return Invalid.NOT_JSON
    if not isinstance(read, dict):
        return Invalid.NOT_AN_OBJECT
    if read.get("action") not in actions:
        return Invalid.NO_ACTION
    return actions.index(read["action"])


def read_token(text: str, actions: Sequence[str]) -> int | Invalid:
    """RL4VLM's reading: the one action that is named behind the first "action" in quotes, or anywhere in a text without it.

    In lower case. Numbers and words are whole ones: 10 is not 1, and white is no hit. Naming the same action twice is naming it.
    """
    if len(text) > MAX_REPLY_CHARS:
        return Invalid.TOO_LONG
    before, key, behind = text.lower().partition('"action"')
    named = {*re.findall(r"\w+|[^\w\s]", behind if key else before)} & {*actions}
    if len(named) != 1:
        return Invalid.SEVERAL_ACTIONS if named else Invalid.NO_ACTION
    return actions.index(named.pop())


def action_at(text: str) -> int | None:
    """Where the action begins, behind the thoughts: at the last "action" in quotes, as RL4VLM finds it (by token ids, there)."""
    return max((found.start() for found in re.finditer('"action"', text, re.ASCII | re.IGNORECASE)), default=None)


READINGS: Mapping[str, Callable[[str, Sequence[str]], int | Invalid]] = {"json": read_json, "rl4vlm": read_token}
"""By task.options.reading."""
