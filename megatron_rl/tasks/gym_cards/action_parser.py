"""From what the policy wrote to an action, or to the reason why it names none. Nothing here raises, and nothing is run as code."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

MAX_REPLY_CHARS = 4096
"""Longer replies are not read: no honest one is, and it bounds how deep a reply can nest in the JSON reader."""


class InvalidAction(StrEnum):
    """What keeps a reply from being an action."""

    TOO_LONG = "too long"
    NOT_JSON = "not JSON"
    NOT_AN_OBJECT = "not an object"
    REPEATED_KEY = "repeated key"
    NO_ACTION = "no action"
    SEVERAL_ACTIONS = "several actions"


class _RepeatedJsonKey(ValueError):
    pass


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise _RepeatedJsonKey
    return read


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is Python, not JSON")


def parse_json_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """The index into `actions` that a reply names, or why it names none.

    Valid is: one JSON object (RFC 8259, so no NaN), white space around it at most, no key twice, "action" exactly one of `actions`.
    Other keys are not looked at: what the policy says it read is not rewarded, only what it does.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    try:
        read = json.loads(text, object_pairs_hook=_reject_repeated_keys, parse_constant=_reject_constant)
    except _RepeatedJsonKey:
        return InvalidAction.REPEATED_KEY
    except (ValueError, RecursionError):  # malformed, or an integer beyond Python's digit limit; nested too deep
        return InvalidAction.NOT_JSON
    if not isinstance(read, dict):
        return InvalidAction.NOT_AN_OBJECT
    if read.get("action") not in actions:
        return InvalidAction.NO_ACTION
    return actions.index(read["action"])


def parse_named_action(text: str, actions: Sequence[str]) -> int | InvalidAction:
    """RL4VLM's reading: the one action that is named behind the first "action" in quotes, or anywhere in a text without it.

    In lower case. Numbers and words are whole ones: 10 is not 1, and white is no hit. Naming the same action twice is naming it.
    """
    if len(text) > MAX_REPLY_CHARS:
        return InvalidAction.TOO_LONG
    before, key, behind = text.lower().partition('"action"')
    named = {*re.findall(r"\w+|[^\w\s]", behind if key else before)} & {*actions}
    if len(named) != 1:
        return InvalidAction.SEVERAL_ACTIONS if named else InvalidAction.NO_ACTION
    return actions.index(named.pop())


def find_action_start(text: str) -> int | None:
    """Where the action begins, behind the thoughts: at the last "action" in quotes, as RL4VLM finds it (by token ids, there)."""
    return max((found.start() for found in re.finditer('"action"', text, re.ASCII | re.IGNORECASE)), default=None)


ACTION_PARSERS: Mapping[str, Callable[[str, Sequence[str]], int | InvalidAction]] = {
    "json": parse_json_action,
    "rl4vlm": parse_named_action,
}
"""By task.options.reading."""
